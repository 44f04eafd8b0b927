-- CLOCK in dispatcher/housekeeping/janitor.py
SELECT least(last_value, (SELECT clock - 1 FROM "mailroom".fan_out ORDER BY clock LIMIT 1)) FROM "mailroom".clock
