-- MARK in mailroom/links/marks.py
-- $1 clock
WITH wanted AS MATERIALIZED (
    SELECT l.number, l.wanted_clock, coalesce(n.seq, 0) AS seq FROM "mailroom".link AS l LEFT JOIN LATERAL (
        SELECT t.seq, t.sent_clock FROM "mailroom".transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n
        ON true
    WHERE l.state = 'open' AND l.wanted_clock > coalesce(n.sent_clock, 0)),
marked AS (
    INSERT INTO "mailroom".transit (
        link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, sent_at)
    SELECT number, seq + 1, $1::bigint, clock_timestamp(), gen_random_uuid(), '', '', 'H'::"char", 'U'::"char",
           clock_timestamp()
    FROM wanted ORDER BY number RETURNING link),
rung AS MATERIALIZED (
    SELECT pg_catalog.count(pg_notify('mailroom:' || '"mailroom".transit'::regclass::oid::text || ':' || link::text, '')) FROM marked)
SELECT (SELECT count(*) FROM marked), setval('"mailroom".clock'::regclass, $1::bigint), (SELECT count FROM rung)
