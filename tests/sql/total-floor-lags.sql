-- LAG in dispatcher/housekeeping/total_floor.py
SELECT r.sent_floor, least(s.clock, coalesce((
    SELECT sent_clock FROM "mailroom".inbox_shipping WHERE (sent_clock + 0) > r.sent_floor
    ORDER BY (sent_clock + 0), origin LIMIT 1) - 1, s.clock))
FROM "mailroom".inbox_registry AS r, LATERAL (
    SELECT clock FROM "mailroom".stable WHERE inbox = 'shipping' ORDER BY clock DESC LIMIT 1) AS s
WHERE r.name = 'shipping' AND r."order" = 'total'
