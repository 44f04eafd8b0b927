-- ASK in dispatcher/delivery/refusal.py
-- $1 start, $2 gaps, $3 writers, $4 bytes, $5 rows, $6 now
WITH 
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), $1::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest($2::bigint[], $3::text[]) AS g (gap, writer)) AS g)
SELECT count(*), set_config('mailroom.asked', coalesce(pg_catalog.array_agg(position ORDER BY position) FILTER (
    WHERE (deliver_at <= now) IS NOT FALSE AND (expires_at > now) IS NOT FALSE), '{}')::text, true)
FROM (
    SELECT position, after_clock, deliver_at, expires_at, row_number() OVER oldest = 1 OR $4::bigint >=
           sum(coalesce(octet_length(value), pg_catalog.pg_column_size(value_json))) OVER oldest AS fits
    FROM "mailroom".outbox WHERE position > (SELECT position FROM start)
    WINDOW oldest AS (ORDER BY position ROWS UNBOUNDED PRECEDING)
    ORDER BY position LIMIT $5::bigint) AS o, (SELECT coalesce($6::timestamptz, clock_timestamp())) AS m (now)
WHERE fits
