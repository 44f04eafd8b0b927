-- FETCH in dispatcher/links/at_source/fetch.py
-- $1 link, $2 after, $3 to
SELECT count(*), pg_catalog.array_agg(seq), pg_catalog.array_agg(sent_clock), pg_catalog.array_agg(stamped_at), pg_catalog.array_agg(message_id), pg_catalog.array_agg(topic), pg_catalog.array_agg(key), pg_catalog.array_agg(kind::text), pg_catalog.array_agg(message_type::text), pg_catalog.array_agg(event_type::text), pg_catalog.array_agg(value), pg_catalog.array_agg(value_json::text), pg_catalog.array_agg(headers::text), pg_catalog.array_agg(expires_at), pg_catalog.array_agg(after_clock), pg_catalog.array_agg(source), pg_catalog.array_agg(sent_at)
FROM (SELECT seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, after_clock, source, sent_at FROM "mailroom".transit
      WHERE link = $1::bigint AND seq > $2::bigint AND seq <= $3::bigint ORDER BY seq) AS t
