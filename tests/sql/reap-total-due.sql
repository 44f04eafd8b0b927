-- TAKE in inbox/total_order/total_claim.py
-- $1 mine
WITH failing AS MATERIALIZED (
    SELECT clock, suspect_to FROM "mailroom".my_key_state
    WHERE inbox = 'shipping' AND key = '' AND retry_at <= (SELECT clock_timestamp()) AND NOT EXISTS (SELECT FROM "mailroom".orphaned_keys('shipping', $1::uuid[]))),
bound AS MATERIALIZED (
    SELECT CASE WHEN paused_at IS NULL THEN r.sent_floor ELSE 9223372036854775807 END AS low, r.paused_at IS NULL AS is_open, r.keep_reaped_days IS NOT NULL AS keeps, (
        SELECT s.clock FROM "mailroom".stable AS s WHERE s.inbox = 'shipping' ORDER BY s.clock DESC LIMIT 1) AS top
    FROM "mailroom".inbox_registry AS r WHERE r.name = 'shipping'),
head AS MATERIALIZED (
    SELECT ctid AS place, clock FROM "mailroom".inbox_shipping
        WHERE (sent_clock + 0) > (SELECT low FROM bound) AND (sent_clock + 0) <= (SELECT top FROM bound)
        ORDER BY (sent_clock + 0), origin LIMIT (SELECT count(*) FROM failing)),
last AS MATERIALIZED (
    SELECT attempt, outcome, error, error_class FROM "mailroom".my_attempt
    WHERE inbox = 'shipping' AND key = '' AND clock = (SELECT clock FROM head) ORDER BY id DESC LIMIT 1),
kept AS (
    UPDATE "mailroom".inbox_shipping AS i SET inbox = i.inbox FROM head, last
    WHERE i.ctid = head.place AND last.outcome = 'park' RETURNING i.*),
parked AS (
    UPDATE "mailroom".my_key_state AS s
    SET clock = kept.clock, attempts = last.attempt, retry_at = 'infinity', parked_at = clock_timestamp(),
        last_error = last.error
    FROM kept, last WHERE s.inbox = 'shipping' AND s.key = ''),
gone AS (
    DELETE FROM "mailroom".inbox_shipping AS i USING head
    WHERE i.ctid = head.place AND (SELECT outcome FROM last) IS DISTINCT FROM 'park' RETURNING i.*),
dead AS (
    INSERT INTO "mailroom".dead_letter (stage, reason, inbox, clock, attempts, origin, sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
    SELECT 'reap', last.error, gone.inbox, gone.clock, last.attempt, gone.origin, gone.sent_clock, message_id, topic, key, kind, message_type, event_type, value, value_json, CASE WHEN (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200) AND (
    SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('"mailroom".outbox'::regclass, name, 'INSERT'::text))
    FROM pg_catalog.unnest(ARRAY['message_id'::text, 'topic'::text, 'key'::text, 'kind'::text, 'message_type'::text, 'event_type'::text, 'value'::text, 'headers'::text, 'deliver_at'::text, 'expires_at'::text, 'after_clock'::text]) AS name) THEN headers - 'reply_to'::text ELSE headers END, expires_at, after_clock, source, sent_at
    FROM gone, last WHERE last.outcome = 'skip'),
healed AS (
    UPDATE "mailroom".my_key_state AS s SET deleted = true
    WHERE s.inbox = 'shipping' AND s.key = '' AND EXISTS (SELECT FROM failing)
      AND (SELECT outcome FROM last) = 'skip' AND s.suspect_to <= (SELECT sent_clock FROM gone) AND (s.clock IN (SELECT clock FROM gone)
         OR NOT EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE (clock + 0) = s.clock)))
SELECT key, clock, sent_clock, origin, message_id, topic, kind::text, message_type::text, event_type::text, value, value_json::text, headers::text, source, sent_at AT TIME ZONE 'UTC', expires_at AT TIME ZONE 'UTC', delivered_at AT TIME ZONE 'UTC', (SELECT outcome FROM last WHERE outcome IN ('park', 'skip')),
       (SELECT coalesce(error_class, 'Skip') FROM last WHERE outcome = 'skip' AND (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)),
       (SELECT (
    SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('"mailroom".outbox'::regclass, name, 'INSERT'::text))
    FROM pg_catalog.unnest(ARRAY['message_id'::text, 'topic'::text, 'key'::text, 'kind'::text, 'message_type'::text, 'event_type'::text, 'value'::text, 'headers'::text, 'deliver_at'::text, 'expires_at'::text, 'after_clock'::text]) AS name) FROM last WHERE outcome = 'skip' AND (kind = 'C' AND (headers ->> 'reply_to'::text) COLLATE pg_catalog."C" ~ '^[A-Za-z][A-Za-z0-9_.-]*$'::text
           AND octet_length(headers ->> 'reply_to'::text) <= 200)), NULL::float8, NULL::boolean
FROM (SELECT * FROM gone UNION ALL SELECT * FROM kept) AS taken
UNION ALL
SELECT NULL::text, NULL::bigint, NULL::bigint, NULL::uuid, NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::timestamp, NULL::timestamp, NULL::timestamp, NULL, NULL, NULL,
       (SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM "mailroom".my_key_state
        WHERE inbox = 'shipping' AND key = '' AND retry_at < 'infinity'
          AND (retry_at > (SELECT clock_timestamp()) OR (SELECT max(sent_clock) FROM gone) < suspect_to)),
       (set_config('enable_seqscan', split_part(current_setting('mailroom.pinned'), ',', 1), true) IS NULL OR set_config('enable_bitmapscan', split_part(current_setting('mailroom.pinned'), ',', 2), true) IS NULL OR set_config('enable_hashjoin', split_part(current_setting('mailroom.pinned'), ',', 3), true) IS NULL OR set_config('enable_mergejoin', split_part(current_setting('mailroom.pinned'), ',', 4), true) IS NULL OR set_config('jit', split_part(current_setting('mailroom.pinned'), ',', 5), true) IS NULL OR set_config('plan_cache_mode', split_part(current_setting('mailroom.pinned'), ',', 6), true) IS NULL OR set_config('row_security', split_part(current_setting('mailroom.pinned'), ',', 7), true) IS NULL) OR (EXISTS (SELECT FROM gone) AND NOT EXISTS (SELECT FROM last WHERE outcome = 'skip') AND "mailroom".hold_batch())
ORDER BY sent_clock, origin
