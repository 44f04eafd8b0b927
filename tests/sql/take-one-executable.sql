-- NEXT in dispatcher/executor/batch/take.py
-- $1 start, $2 gaps, $3 writers
WITH 
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), $1::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest($2::bigint[], $3::text[]) AS g (gap, writer)) AS g)
SELECT position, message_id, version::bigint, operation, target, key, end_key, value, amount, bytes, expected, arguments::text, CASE WHEN at IS NOT NULL THEN least(greatest(at, '0001-01-01 UTC'::timestamptz), '9998-12-31 23:59:59.999999 UTC'::timestamptz) END, row_limit, notify, headers::text, after_clock, source, least(greatest(sent_at, '0001-01-01 UTC'::timestamptz), '9998-12-31 23:59:59.999999 UTC'::timestamptz), CASE WHEN NOT (CASE WHEN version <> 1 THEN true ELSE CASE operation
        WHEN 'put'          THEN key <> '' AND value IS NOT NULL AND pg_catalog.num_nonnulls(
                                 end_key, amount, bytes, arguments, at, row_limit) = 0
        WHEN 'increment'    THEN key <> '' AND amount IS NOT NULL AND pg_catalog.num_nonnulls(
                                 end_key, value, bytes, expected, arguments, at,
                                 row_limit) = 0
        WHEN 'delete'       THEN key <> '' AND pg_catalog.num_nonnulls(
                                 end_key, value, amount, bytes, expected, arguments, at,
                                 row_limit) = 0
        WHEN 'delete_range' THEN pg_catalog.num_nonnulls(
                                 value, amount, bytes, expected, arguments, at) = 0
        WHEN 'account'      THEN key <> '' AND pg_catalog.num_nonnulls(amount, bytes) = 2
                                 AND target = 'accounting' AND pg_catalog.num_nonnulls(
                                 end_key, value, expected, arguments, row_limit) = 0
        WHEN 'call'         THEN pg_catalog.num_nonnulls(
                                 end_key, value, amount, bytes, expected, at,
                                 row_limit) = 0
        ELSE false END END) THEN 'operation'
WHEN NOT (octet_length(operation) <= 41) THEN 'length'
WHEN NOT (target ~ '^[a-z][a-z0-9_]*$' AND octet_length(target) <= 41) THEN 'target'
WHEN NOT (octet_length(key) <= 1024) THEN 'key'
WHEN NOT (operation <> 'account' OR key !~ '^(?:[^/]*/){32}') THEN 'levels'
WHEN NOT (octet_length(end_key) BETWEEN 1 AND 1024) THEN 'end_key'
WHEN NOT (octet_length(value) <= 4194304) THEN 'value'
WHEN NOT (octet_length(expected) <= 4194304) THEN 'expected'
WHEN NOT (octet_length(arguments::text) <= 4194304) THEN 'arguments'
WHEN NOT (at >= '0001-01-01 UTC' AND at < '9999-01-01 UTC') THEN 'at'
WHEN NOT (row_limit >= 1) THEN 'row_limit'
WHEN NOT (notify ~ '^[A-Za-z][A-Za-z0-9_.-]*$' AND octet_length(notify) <= 200) THEN 'notify'
WHEN NOT (jsonb_typeof(headers) = 'object' AND octet_length(headers::text) <= 8192 AND NOT pg_catalog.jsonb_path_exists(headers, 'strict $.* ? (@.type() <> "string")')) THEN 'headers'
WHEN NOT (after_clock BETWEEN 0 AND 4611686018427387904) THEN 'after_clock'
WHEN NOT (octet_length(source) <= 200) THEN 'source'
WHEN NOT (sent_at >= '0001-01-01 UTC' AND sent_at < '9999-01-01 UTC') THEN 'sent_at'
WHEN after_clock > 4294967296 AND after_clock > "mailroom".clock_reach() THEN 'after_clock' END FROM "mailroom".outbox_executable WHERE position = coalesce((
    SELECT c.position FROM "mailroom".executable_cursor AS c JOIN "mailroom".outbox_executable AS o USING (position)
    ORDER BY c.position LIMIT 1
), (
    SELECT position FROM "mailroom".outbox_executable WHERE position > (SELECT position FROM start)
    ORDER BY position LIMIT 1))
