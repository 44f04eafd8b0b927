-- RAISE in mailroom/order/total.py
-- $1 touched
WITH total AS MATERIALIZED (
    SELECT r.name AS inbox, coalesce((
        SELECT s.clock FROM "mailroom".stable AS s WHERE s.inbox = r.name ORDER BY s.clock DESC LIMIT 1), 0) AS stable
    FROM "mailroom".inbox_registry AS r WHERE r."order" = 'total'),
origins AS MATERIALIZED (
    SELECT t.inbox, t.stable, o.number, o.name, o.state, o.shown AS started, min(s.since) AS since,
           max(s.since) AS joined, coalesce((
        SELECT r.sent_clock FROM "mailroom".receipt AS r WHERE r.origin = o.number ORDER BY r.last DESC LIMIT 1), 0) AS received
    FROM total AS t JOIN "mailroom".subscription AS s ON s.inbox = t.inbox
         JOIN "mailroom".origin AS o ON s.origin IN (o.name, '*')
    WHERE o.state <> 'excluded' GROUP BY t.inbox, t.stable, o.number),
shown AS MATERIALIZED (SELECT *, greatest(started, since, received) AS clock FROM origins),
bound AS MATERIALIZED (
    SELECT t.inbox, t.stable, CASE WHEN bool_or(s.number IS NOT NULL) THEN min(s.clock)
                                   WHEN $1::text[] IS NULL OR t.inbox = ANY ($1::text[])
                                   THEN (SELECT last_value FROM "mailroom".clock) END AS clock
    FROM total AS t LEFT JOIN shown AS s ON s.inbox = t.inbox
    WHERE (SELECT incarnation <= resumed FROM "mailroom".node) AND NOT EXISTS (SELECT FROM "mailroom".fan_out)
    GROUP BY t.inbox, t.stable),
raised AS (
    INSERT INTO "mailroom".stable (inbox, clock) SELECT inbox, clock FROM bound WHERE clock > stable RETURNING inbox),
touched AS MATERIALIZED (SELECT to_regclass('"mailroom".inbox_' || inbox) AS partition FROM raised)
SELECT (SELECT count(*) FROM raised), (SELECT pg_catalog.count(pg_notify('mailroom:' || partition::oid::text, '')) FILTER (WHERE NOT pg_try_advisory_xact_lock(1835100527, (partition::oid::bigint - 2147483648)::integer)) FROM touched)
