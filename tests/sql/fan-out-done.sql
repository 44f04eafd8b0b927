-- DONE in dispatcher/delivery/fan_out.py
WITH gone AS (DELETE FROM "mailroom".fan_out RETURNING 1)
SELECT count(*), EXISTS (SELECT FROM "mailroom".inbox_registry WHERE "order" = 'total') FROM gone
