-- HAS_MORE in inbox/by_key/claim.py
-- $1 key
WITH bound AS MATERIALIZED (SELECT floor FROM "mailroom".inbox_registry WHERE name = 'shipping')
SELECT CASE WHEN EXISTS (SELECT FROM bound) THEN
           EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE key = $1::text AND clock > (SELECT floor FROM bound))
           AND (SELECT s.clock FROM "mailroom".my_key_state s WHERE s.inbox = 'shipping' AND s.key = $1::text AND s.retry_at > now()) IS NULL END, (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL)
