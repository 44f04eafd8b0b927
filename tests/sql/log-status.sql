-- UNREAD in mailroom/figures/inboxes.py
WITH at AS MATERIALIZED (
    SELECT DISTINCT ON (lane) lane, clock FROM "mailroom".log_receipt WHERE inbox = 'shipping'
    ORDER BY lane, epoch DESC, clock DESC)
SELECT 'shipping', coalesce(sum(n.messages), 0)::bigint,
       extract(epoch FROM clock_timestamp() - min(oldest.sent_at))::float8,
       extract(epoch FROM clock_timestamp() - min(oldest.delivered_at))::float8
FROM at CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM "mailroom".log AS o
    WHERE o.log = 'orders' AND o.lane = at.lane AND o.clock > at.clock AND (NOT EXISTS (SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p) OR EXISTS (
        SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)))) AS n
LEFT JOIN LATERAL (
    SELECT o.sent_at, o.delivered_at FROM "mailroom".log AS o
    WHERE o.log = 'orders' AND o.lane = at.lane AND o.clock > at.clock AND (NOT EXISTS (SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p) OR EXISTS (
        SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = 'shipping') AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits)))
    ORDER BY o.clock LIMIT 1) AS oldest ON true
