-- TAKE_HEAD in inbox/by_key/due.py
-- $1 key, $2 clock, $3 limit, $4 mine
WITH last AS MATERIALIZED (
    SELECT attempt, outcome, error, error_class FROM "mailroom".my_attempt
    WHERE inbox = 'shipping' AND key = $1::text AND clock = $2::bigint ORDER BY id DESC LIMIT 1),
share AS MATERIALIZED (
    SELECT CASE WHEN greatest(clock, suspect_to) < $2::bigint THEN $3::bigint ELSE 1 END AS rows
    FROM "mailroom".my_key_state
    WHERE inbox = 'shipping' AND key = $1::text AND retry_at <= (SELECT clock_timestamp()) AND key NOT IN (SELECT "mailroom".orphaned_keys('shipping', $4::uuid[]))),
picked AS MATERIALIZED (
    SELECT i.* FROM share, LATERAL (
        SELECT ctid AS place, clock, octet_length(value) AS bytes, value_json FROM "mailroom".inbox_shipping
        WHERE key = $1::text AND clock >= $2::bigint ORDER BY clock LIMIT share.rows) AS i),
fitting AS MATERIALIZED (
    SELECT place FROM picked WHERE clock < coalesce((
        SELECT clock FROM (SELECT clock, row_number() OVER oldest > 1 AND sum(coalesce(bytes, octet_length(value_json::text))) OVER oldest > 33554432 AS is_over
                           FROM picked WINDOW oldest AS (ORDER BY clock ROWS UNBOUNDED PRECEDING)) AS o
        WHERE is_over ORDER BY clock LIMIT 1), 9223372036854775807)),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING fitting WHERE i.ctid = fitting.place RETURNING i.*),
archived AS (
    INSERT INTO "mailroom".my_reaped (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, drop_on)
    SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at, (
        SELECT d.day FROM "mailroom".inbox_registry AS r, "mailroom".reaped_day AS d
        WHERE r.name = 'shipping' AND d.emptied_at IS NULL
          AND d.day <= (statement_timestamp() AT TIME ZONE 'UTC'::text)::date + r.keep_reaped_days + 1
        ORDER BY d.day DESC LIMIT 1)
    FROM gone WHERE (SELECT outcome IN ('park', 'skip') FROM last) IS NOT TRUE),
parked AS (
    INSERT INTO "mailroom".parked (inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at) SELECT inbox, clock, sent_clock, origin, delivered_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM gone WHERE (SELECT outcome = 'park' FROM last)),
held AS (
    UPDATE "mailroom".my_key_state AS s
    SET clock = gone.clock, attempts = last.attempt, retry_at = 'infinity', parked_at = clock_timestamp(),
        last_error = last.error
    FROM gone, last WHERE s.inbox = 'shipping' AND s.key = gone.key AND last.outcome = 'park'),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, inbox, clock, attempts, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'reap', last.error, gone.inbox, gone.clock, last.attempt, CASE WHEN gone.sent_clock <> gone.clock THEN gone.origin END, CASE WHEN gone.sent_clock <> gone.clock THEN gone.sent_clock END, message_id, topic, key, kind, message_type, event_type, value, value_json, CASE WHEN (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200) AND (
    SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('"mailroom".outbox'::regclass, name, 'INSERT'::text))
    FROM pg_catalog.unnest(ARRAY['message_id'::text, 'topic'::text, 'key'::text, 'kind'::text, 'message_type'::text, 'event_type'::text, 'value'::text, 'headers'::text, 'deliver_at'::text, 'expires_at'::text, 'after_clock'::text]) AS name) THEN headers - 'reply_to'::text ELSE headers END, expires_at, after_clock, source, sent_at
    FROM gone, last WHERE last.outcome = 'skip'),
healed AS (
    UPDATE "mailroom".my_key_state AS s SET deleted = true FROM gone, last
    WHERE s.inbox = 'shipping' AND s.key = gone.key AND last.outcome = 'skip' AND s.alone_to <= gone.clock
      AND s.paused_at IS NULL)
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', (SELECT outcome FROM last WHERE outcome IN ('park', 'skip')),
       (SELECT coalesce(error_class, 'Skip') FROM last WHERE outcome = 'skip' AND (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)),
       (SELECT (
    SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('"mailroom".outbox'::regclass, name, 'INSERT'::text))
    FROM pg_catalog.unnest(ARRAY['message_id'::text, 'topic'::text, 'key'::text, 'kind'::text, 'message_type'::text, 'event_type'::text, 'value'::text, 'headers'::text, 'deliver_at'::text, 'expires_at'::text, 'after_clock'::text]) AS name) FROM last WHERE outcome = 'skip' AND (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)), NULL::float8, NULL::boolean
FROM gone
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, NULL, NULL, NULL,
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_due AS d
        WHERE inbox = 'shipping' AND retry_at < 'infinity' AND (retry_at > now() OR EXISTS (SELECT FROM gone WHERE gone.key <> d.key) OR (SELECT max(clock) FROM gone) < greatest(d.clock, d.alone_to)) LIMIT 1),
       (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (EXISTS (SELECT FROM gone) AND NOT EXISTS (SELECT FROM last WHERE outcome IN ('park', 'skip')) AND "mailroom".hold_batch())
ORDER BY clock
