-- RECORD in inbox/total_order/total_failure.py
-- $1 clock, $2 key, $3 failure, $4 after_s, $5 error, $6 id, $7 error_class, $8 process
WITH tried AS MATERIALIZED (
    SELECT r.*, i.sent_clock, $1::bigint = (
               SELECT clock FROM "mailroom".inbox_shipping WHERE (sent_clock + 0) > r.sent_floor
               ORDER BY (sent_clock + 0), origin LIMIT 1) AS is_head,
           1 + greatest(0, (SELECT attempt FROM "mailroom".my_attempt
                            WHERE inbox = 'shipping' AND key = '' AND clock = $1::bigint
                            ORDER BY id DESC LIMIT 1),
                        (SELECT attempts FROM "mailroom".my_key_state
                         WHERE inbox = 'shipping' AND key = '' AND clock = $1::bigint)) AS attempt
    FROM "mailroom".inbox_registry AS r, LATERAL (
        SELECT sent_clock FROM "mailroom".inbox_shipping WHERE key = $2::text AND clock = $1::bigint) AS i
    WHERE r.name = 'shipping' AND NOT EXISTS (
        SELECT FROM "mailroom".my_key_state WHERE inbox = 'shipping' AND key = '' AND retry_at = 'infinity')),
decided AS MATERIALIZED (
    SELECT *, CASE WHEN $3::text IN ('park', 'skip') THEN $3::text
                   WHEN $3::text = 'fatal' OR attempt >= max_attempts THEN on_failure
                   ELSE 'retry' END AS outcome,
           clock_timestamp() + interval '1 s' * coalesce(
               $4::float8, (0.5::float8 + random() / 2::float8)
               * least(backoff_max_s, backoff_s * 2::float8 ^ least(attempt - 1, 30)::float8)) AS retry_at
    FROM tried),
changed AS (
    INSERT INTO "mailroom".my_key_state AS s (inbox, key, clock, attempts, retry_at, last_error, alone_to, suspect_to)
    SELECT name, '', $1::bigint, attempt,
           CASE WHEN is_head AND outcome = 'retry' THEN retry_at ELSE clock_timestamp() END, $5::text,
           sent_clock, sent_clock
    FROM decided
    ON CONFLICT (inbox, key) DO UPDATE SET
        clock = excluded.clock, attempts = excluded.attempts, retry_at = excluded.retry_at,
        last_error = excluded.last_error, alone_to = greatest(s.alone_to, excluded.alone_to),
        suspect_to = greatest(s.suspect_to, excluded.suspect_to)
        WHERE s.retry_at < 'infinity'
    RETURNING extract(epoch FROM retry_at - clock_timestamp())::float8 AS due_in_s),
history AS (
    INSERT INTO "mailroom".my_attempt (inbox, key, clock, message_id, attempt, outcome, retry_at, error, error_class,
                                     worker)
    SELECT name, '', $1::bigint, $6::uuid, attempt, outcome,
           CASE outcome WHEN 'retry' THEN retry_at END, $5::text, $7::text,
           pg_catalog.ltrim(pg_catalog.concat(
               CASE WHEN application ^@ 'mailroom worker' THEN 'mailroom worker' ELSE application END,
               $8::text))
    FROM decided CROSS JOIN pg_catalog.current_setting('application_name'::text) AS s (application))
SELECT outcome, attempt::bigint, (SELECT due_in_s FROM changed), max_attempts::bigint FROM decided
