-- FLOOR_STATE in dispatcher/housekeeping/janitor.py
SELECT floor, (SELECT clock FROM "mailroom".inbox_shipping WHERE (clock + 0) > r.floor ORDER BY (clock + 0) LIMIT 1),
       last_value, r."order" = 'total'
FROM "mailroom".inbox_registry r, "mailroom".clock WHERE name = 'shipping' AND log IS NULL
