-- RECORD in inbox/by_key/failure.py
-- $1 clock, $2 key, $3 failure, $4 after_s, $5 error, $6 id, $7 error_class, $8 process
WITH tried AS MATERIALIZED (
    SELECT r.*,
           $1::bigint = (SELECT min(clock) FROM "mailroom".inbox_shipping WHERE key = $2::text) AS is_head,
           1 + greatest(0, (SELECT attempt FROM "mailroom".my_attempt
                            WHERE inbox = 'shipping' AND key = $2::text AND clock = $1::bigint
                            ORDER BY id DESC LIMIT 1),
                        (SELECT attempts FROM "mailroom".my_key_state
                         WHERE inbox = 'shipping' AND key = $2::text AND clock = $1::bigint)) AS attempt
    FROM "mailroom".inbox_registry AS r
    WHERE name = 'shipping'
      AND EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE key = $2::text AND clock = $1::bigint)
      AND NOT EXISTS (SELECT FROM "mailroom".my_key_state
                      WHERE inbox = 'shipping' AND key = $2::text AND parked_at IS NOT NULL)),
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
    SELECT name, $2::text, $1::bigint, attempt,
           CASE WHEN is_head AND outcome = 'retry' THEN retry_at ELSE clock_timestamp() END, $5::text,
           $1::bigint, $1::bigint
    FROM decided
    ON CONFLICT (inbox, key) DO UPDATE SET
        clock = excluded.clock, attempts = excluded.attempts,
        retry_at = CASE WHEN s.paused_at IS NULL THEN excluded.retry_at ELSE s.retry_at END,
        resume_at = CASE WHEN s.paused_at IS NOT NULL THEN excluded.retry_at END,
        last_error = excluded.last_error, alone_to = greatest(s.alone_to, s.clock, excluded.alone_to),
        suspect_to = greatest(s.suspect_to, s.clock, excluded.suspect_to)
        WHERE s.parked_at IS NULL
    RETURNING extract(epoch FROM nullif(retry_at, 'infinity') - clock_timestamp())::float8 AS due_in_s),
history AS (
    INSERT INTO "mailroom".my_attempt (inbox, key, clock, message_id, attempt, outcome, retry_at, error, error_class,
                                     worker)
    SELECT name, $2::text, $1::bigint, $6::uuid, attempt, outcome,
           CASE outcome WHEN 'retry' THEN retry_at END, $5::text, $7::text,
           pg_catalog.ltrim(pg_catalog.concat(
               CASE WHEN application ^@ 'mailroom worker' THEN 'mailroom worker' ELSE application END,
               $8::text))
    FROM decided CROSS JOIN pg_catalog.current_setting('application_name'::text) AS s (application))
SELECT outcome, attempt::bigint, (SELECT due_in_s FROM changed), max_attempts::bigint FROM decided
