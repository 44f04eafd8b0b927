-- COVERING in inbox/by_log/lanes.py
-- $1 clock
SELECT segment, CASE WHEN NOT EXISTS (
           SELECT FROM "mailroom".log_segment AS o
           WHERE o.log = 'orders' AND o.emptied_at IS NULL AND o.segment < s.segment)
       THEN 0 ELSE first_clock END
FROM "mailroom".log_segment AS s
WHERE log = 'orders' AND emptied_at IS NULL AND segment >= coalesce((
    SELECT segment FROM "mailroom".log_segment
    WHERE log = 'orders' AND first_clock <= $1::bigint + 1 ORDER BY segment DESC LIMIT 1), 0)
ORDER BY segment LIMIT 9
