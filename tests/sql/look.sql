-- LOOK in dispatcher/delivery/deliver.py
-- $1 start, $2 gaps, $3 writers
WITH 
start AS MATERIALIZED (
    SELECT coalesce(min(gap) FILTER (WHERE has_ended), $1::bigint) AS position,
           coalesce(pg_catalog.array_agg(writer) FILTER (WHERE NOT has_ended), '{}'::text[]) AS running
    FROM (SELECT gap, writer, pg_visible_in_snapshot(writer::xid8, pg_current_snapshot()) AS has_ended
          FROM unnest($2::bigint[], $3::text[]) AS g (gap, writer)) AS g)
SELECT EXISTS (SELECT FROM "mailroom".outbox WHERE position > (SELECT position FROM start))
       OR EXISTS (SELECT FROM "mailroom".link) OR EXISTS (SELECT FROM "mailroom".fan_out)
