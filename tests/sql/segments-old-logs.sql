-- OLD_LOGS in mailroom/logs/segments.py
-- $1 now
SELECT name FROM "mailroom".log_registry AS l WHERE NOT EXISTS (
    SELECT FROM "mailroom".log_segment AS s WHERE s.log = l.name AND s.opened_at > coalesce($1::timestamptz, statement_timestamp()) - interval '1 day') ORDER BY name
