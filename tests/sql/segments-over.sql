-- OVER in mailroom/logs/segments.py
-- $1 now
SELECT s.segment, s.log, s.emptied_at IS NOT NULL, l.drop_unread,
       ARRAY(SELECT r.name FROM "mailroom".inbox_registry AS r WHERE r.log = s.log ORDER BY r.name)
FROM "mailroom".log_registry AS l JOIN "mailroom".log_segment AS s ON s.log = l.name
JOIN LATERAL (SELECT n.opened_at FROM "mailroom".log_segment AS n
              WHERE n.log = s.log AND n.segment > s.segment ORDER BY n.segment LIMIT 1) AS n ON true
WHERE n.opened_at < coalesce($1::timestamptz, statement_timestamp()) - l.keep_days::float8 * interval '1 day' ORDER BY s.segment
