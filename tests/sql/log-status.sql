-- UNREAD in mailroom/figures/inboxes.py
WITH reader AS MATERIALIZED (
    SELECT r.name AS inbox, r.paused_at IS NOT NULL AS is_paused, r.lost, r.lost_since, r.lost_at,
           EXISTS (SELECT FROM "mailroom".log_topic AS p WHERE p.inbox = r.name) AS has_topics
    FROM "mailroom".inbox_registry AS r WHERE r.name IN ('shipping')),
at AS MATERIALIZED (
    SELECT i.inbox, i.has_topics, l.lane::smallint AS lane, r.clock
    FROM reader AS i, pg_catalog.generate_series(0, 64 - 1) AS l (lane), LATERAL (
        SELECT r.clock FROM "mailroom".log_receipt AS r
        WHERE r.inbox = i.inbox AND r.inbox IN ('shipping') AND r.lane = l.lane::smallint
        ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r),
part AS MATERIALIZED (
    SELECT segment, lead(first_clock) OVER (ORDER BY segment) AS ended
    FROM "mailroom".log_segment WHERE log = 'orders' AND emptied_at IS NULL)
SELECT i.inbox, coalesce(sum(n.messages), 0::numeric)::bigint,
       extract(epoch FROM clock_timestamp() - min(n.sent_at))::float8,
       extract(epoch FROM clock_timestamp() - min(n.delivered_at))::float8
FROM at AS i, LATERAL (
    SELECT count(*) AS messages, min(o.sent_at) AS sent_at, min(o.delivered_at) AS delivered_at
    FROM (SELECT s.segment FROM part AS s WHERE s.ended > i.clock + 1 OR s.ended IS NULL ORDER BY s.segment OFFSET 0) AS s, LATERAL (
        SELECT o.sent_at, o.delivered_at FROM "mailroom".log AS o
        WHERE o.log = 'orders' AND o.segment = s.segment AND o.lane = i.lane AND o.clock > i.clock AND (NOT i.has_topics OR EXISTS (
        SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = i.inbox) AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)))
        OFFSET 0) AS o) AS n
GROUP BY i.inbox
