-- HEAL in inbox/by_key/due.py
-- $1 key, $2 clock
WITH healed AS (
    UPDATE "mailroom".my_key_state SET deleted = true WHERE inbox = 'shipping' AND key = $1::text
        AND clock <= $2::bigint AND alone_to <= $2::bigint AND paused_at IS NULL)
UPDATE "mailroom".my_key_state AS s SET retry_at = greatest(clock_timestamp(), (
    SELECT retry_at FROM "mailroom".my_attempt
    WHERE inbox = 'shipping' AND key = $1::text
      AND clock = (SELECT min(clock) FROM "mailroom".inbox_shipping
                   WHERE key = $1::text AND clock > $2::bigint)
    ORDER BY id DESC LIMIT 1))
WHERE s.inbox = 'shipping' AND s.key = $1::text AND s.retry_at < 'infinity'
  AND (s.clock > $2::bigint OR s.alone_to > $2::bigint)
