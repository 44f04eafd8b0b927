-- LOCK in inbox/by_log/lanes.py
-- $1 seen, $2 lanes, $3 but, $4 first, $5 most
WITH bound AS MATERIALIZED (
    SELECT paused_at IS NULL AS is_open, log, epoch, s.segment, s.first_clock
    FROM "mailroom".inbox_registry LEFT JOIN LATERAL (
        SELECT segment, first_clock FROM "mailroom".log_segment
        WHERE log = 'orders' ORDER BY segment DESC LIMIT 1) AS s ON true
    WHERE name = 'shipping'),
tick AS MATERIALIZED (
    SELECT clock, lanes FROM "mailroom".log_tick
    WHERE log = 'orders' AND clock > $1::bigint ORDER BY clock LIMIT 1000),
news AS MATERIALIZED (
    SELECT DISTINCT lane FROM tick, LATERAL pg_catalog.unnest(lanes) AS lane),
mine AS MATERIALIZED (
    SELECT l.lane, l.holder FROM (
        SELECT lane FROM (SELECT lane FROM pg_catalog.unnest($2::bigint[]) AS lane
                          UNION SELECT lane FROM news) AS either
        WHERE (SELECT is_open AND log = 'orders' FROM bound) AND lane <> ALL ($3::bigint[])
          AND current_setting('transaction_isolation') = 'read committed'
        ORDER BY (lane < $4::bigint), lane OFFSET 0) AS wanted, LATERAL (
        SELECT lane, xmax::text::bigint AS holder FROM "mailroom".lanes_shipping AS l
        WHERE l.lane = wanted.lane::smallint FOR UPDATE SKIP LOCKED) AS l
    LIMIT $5::bigint)
SELECT ARRAY(SELECT lane::bigint FROM mine), ARRAY(SELECT lane::bigint FROM news),
       coalesce((SELECT max(clock) FROM tick), $1::bigint), (SELECT count(*) = 1000 FROM tick),
       (SELECT max(clock) FROM "mailroom".log_tick WHERE log = 'orders'),
       EXISTS (SELECT FROM mine, LATERAL (SELECT pg_current_xact_id()::text::bigint) AS x (now)
               WHERE holder <> 0 AND pg_xact_status((now + 2147483648::bigint - ((now + 2147483648::bigint - holder) & 4294967295))::text::xid8) IS DISTINCT FROM 'committed'
                 AND now + 2147483648::bigint - ((now + 2147483648::bigint - holder) & 4294967295) <> now),
       CASE WHEN EXISTS (SELECT FROM mine) THEN pg_current_xact_id()::text::bigint END,
       current_setting('transaction_isolation'), log = 'orders', epoch, segment, first_clock,
       CASE WHEN is_open THEN (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due WHERE inbox = 'shipping' AND retry_at < 'infinity' LIMIT 1) END,
       CASE WHEN NOT EXISTS (SELECT FROM mine) THEN (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) END, EXISTS (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping')
FROM bound
