-- ASK in mailroom/links/handshake/hello.py
-- $1 link, $2 run, $3 topics
WITH held AS MATERIALIZED (
    SELECT number FROM "mailroom".link WHERE number = $1::bigint AND run = $2::uuid FOR NO KEY UPDATE),
gone AS (
    DELETE FROM "mailroom".link_topic AS t USING held AS h
    WHERE t.link = h.number AND t.topic <> ALL ($3::text[])),
come AS (
    INSERT INTO "mailroom".link_topic (topic, link)
    SELECT u.topic, h.number FROM held AS h, pg_catalog.unnest($3::text[]) AS u (topic) ON CONFLICT DO NOTHING)
SELECT count(*) FROM held
