-- LOCK in inbox/total_order/total_claim.py
WITH bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL THEN r.sent_floor ELSE 9223372036854775807 END AS low, r.paused_at IS NULL AS is_open, r.keep_reaped_days IS NOT NULL AS keeps, (
        SELECT s.clock FROM "mailroom".stable AS s WHERE s.inbox = 'shipping' ORDER BY s.clock DESC LIMIT 1) AS top
    FROM "mailroom".inbox_registry AS r WHERE r.name = 'shipping'),
head AS MATERIALIZED (SELECT clock, xmax FROM "mailroom".inbox_shipping
        WHERE (sent_clock + 0) > (SELECT low FROM bound) AND (sent_clock + 0) <= (SELECT top FROM bound)
        ORDER BY (sent_clock + 0), origin LIMIT 1),
mine AS MATERIALIZED (
    SELECT FROM head, LATERAL (
        SELECT FROM "mailroom".inbox_shipping AS i WHERE (clock + 0) = head.clock FOR UPDATE SKIP LOCKED) AS i)
SELECT CASE WHEN EXISTS (SELECT FROM bound) THEN EXISTS (SELECT FROM head) END, EXISTS (SELECT FROM mine),
    EXISTS (SELECT FROM head WHERE xmax <> '0'), (
    SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_key_state
    WHERE inbox = 'shipping' AND key = '' AND retry_at < 'infinity' AND (SELECT is_open FROM bound)),
    (SELECT keeps FROM bound), CASE WHEN NOT EXISTS (SELECT FROM mine) THEN (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) END
