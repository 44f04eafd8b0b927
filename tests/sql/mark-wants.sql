-- WANTS in mailroom/links/marks.py
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
shown AS MATERIALIZED (SELECT *, greatest(started, since, received) AS clock FROM origins)
SELECT inbox, stable, number, received, clock, greatest(started, joined, stable * (clock < stable)::integer)
FROM shown WHERE state = 'open' ORDER BY inbox, number
