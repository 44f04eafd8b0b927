-- LOSE in mailroom/logs/segments.py
-- $1 messages, $2 now
UPDATE "mailroom".inbox_registry SET lost = lost + $1::bigint, lost_at = coalesce($2::timestamptz, statement_timestamp()),
    lost_since = coalesce(lost_since, coalesce($2::timestamptz, statement_timestamp())), lost_to = greatest(lost_to, (
        SELECT n.first_clock - 1 FROM "mailroom".log_segment AS n
        WHERE n.log = 'orders' AND n.segment > 1 ORDER BY n.segment LIMIT 1))
WHERE name = 'shipping'
