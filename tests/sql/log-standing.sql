-- READING in mailroom/figures/logs.py
-- $1 now
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
    SELECT s.segment, s.first_clock, lead(s.first_clock) OVER w AS ended,
           pg_catalog.to_regclass(pg_catalog.concat('"mailroom".log_', s.segment)) AS place,
           coalesce(lead(s.first_clock) OVER w, (
               SELECT max(clock) + 1 FROM "mailroom".log_tick WHERE log = 'orders'), s.first_clock) AS reached,
           CASE WHEN NOT l.drop_unread
                THEN lead(s.opened_at) OVER w + l.keep_days::float8 * interval '1 day' END AS over_at
    FROM "mailroom".log_segment AS s JOIN "mailroom".log_registry AS l ON l.name = s.log
    WHERE s.log = 'orders' AND s.emptied_at IS NULL WINDOW w AS (ORDER BY s.segment)),
share AS MATERIALIZED (
    SELECT lane, sum(rows) / sum(sum(rows)) OVER () AS of_all FROM (
        SELECT t.lanes, t.rows::float8 / pg_catalog.cardinality(t.lanes)::float8 AS rows FROM "mailroom".log_tick AS t
        WHERE t.log = 'orders' ORDER BY t.clock DESC LIMIT 1000) AS t, pg_catalog.unnest(t.lanes) AS lane
    GROUP BY lane),
unread AS MATERIALIZED (
    SELECT i.inbox, i.has_topics, max(i.clock) AS furthest,
           pg_catalog.array_agg(n.lane ORDER BY n.clock) FILTER (WHERE n.clock IS NOT NULL) AS lanes,
           pg_catalog.array_agg(n.clock ORDER BY n.clock) FILTER (WHERE n.clock IS NOT NULL) AS clocks,
           (pg_catalog.array_agg(n.delivered_at ORDER BY n.clock))[1] AS delivered_at
    FROM at AS i LEFT JOIN LATERAL (
        SELECT i.lane, o.clock, o.delivered_at FROM (SELECT s.segment FROM part AS s WHERE s.ended > i.clock + 1 OR s.ended IS NULL ORDER BY s.segment OFFSET 0) AS s, LATERAL (
            SELECT o.clock, o.delivered_at FROM "mailroom".log AS o
            WHERE o.log = 'orders' AND o.segment = s.segment AND o.lane = i.lane AND o.clock > i.clock
            ORDER BY o.clock LIMIT 1) AS o
        ORDER BY s.segment LIMIT 1) AS n ON true
    GROUP BY i.inbox, i.has_topics)
SELECT i.inbox, few.seen, few.wanted, CASE WHEN few.seen = 1001 THEN (
           SELECT coalesce(sum(pg_catalog.pg_stat_get_live_tuples(p.place)::float8 * s.of_all * least(
               greatest(p.reached - n.clock, 0)::float8 / greatest(p.reached - p.first_clock, 1)::float8, 1)), 0)
           FROM ROWS FROM (pg_catalog.unnest(i.lanes), pg_catalog.unnest(i.clocks)) AS n (lane, clock) JOIN share AS s ON s.lane = n.lane CROSS JOIN part AS p)::bigint ELSE 0::bigint END,
       coalesce(extract(epoch FROM coalesce($1::timestamptz, clock_timestamp()) - i.delivered_at)::float8, 0),
       coalesce(extract(epoch FROM (
           SELECT t.at FROM "mailroom".log_tick AS t
           WHERE t.log = 'orders' AND t.clock <= i.furthest ORDER BY t.clock DESC LIMIT 1) - i.delivered_at)::float8, 0),
       i.lanes[1]::bigint, h.segments, coalesce(h.bytes, 0::numeric)::bigint, h.since,
       r.is_paused, r.lost, r.lost_since, r.lost_at
FROM unread AS i JOIN reader AS r ON r.inbox = i.inbox, LATERAL (
    SELECT count(*) AS seen, count(*) FILTER (WHERE is_wanted) AS wanted FROM (
        SELECT (NOT i.has_topics OR EXISTS (
        SELECT FROM (SELECT topic, fits, words FROM "mailroom".log_topic WHERE inbox = i.inbox) AS p, LATERAL (
            SELECT o.topic || '.' AS ended,
                   pg_catalog.cardinality(pg_catalog.string_to_array(o.topic, '.')) AS words) AS t
        WHERE p.topic = o.topic OR ((p.words IS NULL OR p.words = t.words) AND t.ended LIKE p.fits))) AS is_wanted FROM ROWS FROM (pg_catalog.unnest(i.lanes), pg_catalog.unnest(i.clocks)) AS n (lane, clock), LATERAL (SELECT s.segment FROM part AS s WHERE s.ended > n.clock - 1 + 1 OR s.ended IS NULL ORDER BY s.segment OFFSET 0) AS s, LATERAL (
            SELECT o.topic FROM "mailroom".log AS o
            WHERE o.log = 'orders' AND o.segment = s.segment AND o.lane = n.lane AND o.clock >= n.clock
            LIMIT 1001) AS o LIMIT 1001) AS o) AS few, LATERAL (
    SELECT count(*) AS segments, sum(pg_catalog.pg_total_relation_size(p.place)) AS bytes, min(p.over_at) AS since
    FROM part AS p WHERE p.over_at < (SELECT coalesce($1::timestamptz, clock_timestamp())) AND EXISTS (
        SELECT FROM ROWS FROM (pg_catalog.unnest(i.lanes), pg_catalog.unnest(i.clocks)) AS n (lane, clock), LATERAL (
            SELECT FROM "mailroom".log AS o WHERE o.log = 'orders' AND o.segment = p.segment AND o.lane = n.lane
            AND o.clock >= n.clock LIMIT 1) AS o)) AS h
ORDER BY i.inbox
