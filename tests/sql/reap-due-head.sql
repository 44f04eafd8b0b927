-- LOCK_HEAD in inbox/by_key/due.py
-- $1 mine
WITH bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL THEN floor ELSE 9223372036854775807 END AS floor, paused_at IS NULL AS is_open, keep_reaped_days IS NOT NULL AS keeps FROM "mailroom".inbox_registry
    WHERE name = 'shipping'),
due_next AS MATERIALIZED (
    SELECT (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due
            WHERE inbox = 'shipping' AND retry_at < 'infinity' AND retry_at > (SELECT clock_timestamp() FROM bound WHERE is_open) LIMIT 1) AS in_s),
head AS MATERIALIZED (
    SELECT l.key, l.clock FROM (
        SELECT key FROM "mailroom".my_due
        WHERE inbox = 'shipping' AND retry_at <= (SELECT clock_timestamp() FROM bound WHERE is_open) AND key NOT IN (SELECT "mailroom".orphaned_keys('shipping', $1::uuid[])) ORDER BY retry_at, key) AS d, LATERAL (
        SELECT key, clock FROM "mailroom".inbox_shipping AS i
        WHERE i.key = d.key AND i.clock = (SELECT min(clock) FROM "mailroom".inbox_shipping
                                           WHERE key = d.key AND clock > (SELECT floor FROM bound))
        FOR UPDATE SKIP LOCKED) AS l
    LIMIT 1)
SELECT key, clock, (SELECT keeps FROM bound) AS keeps, NULL::float8 AS due_in_s, NULL::boolean FROM head
UNION ALL
SELECT NULL, NULL, NULL, (SELECT in_s FROM due_next),
       CASE WHEN NOT EXISTS (SELECT FROM head) THEN (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) END
ORDER BY clock
