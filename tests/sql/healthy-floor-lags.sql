-- LAGS in dispatcher/housekeeping/healthy_floor.py
SELECT NOT (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = i.key) IS NULL OR i.clock - greatest(r.floor, r.healthy_floor) > 1000
FROM "mailroom".inbox_registry AS r, LATERAL (
    SELECT key, clock FROM "mailroom".inbox_shipping WHERE (clock + 0) > greatest(r.floor, r.healthy_floor)
    ORDER BY (clock + 0) LIMIT 1) AS i
WHERE name = 'shipping'
