-- SEND in dispatcher/housekeeping/periodic.py
-- $1 names, $2 ids, $3 dues
INSERT INTO "mailroom".outbox (message_id, topic, key, kind, value, headers)
SELECT s.id, p.topic, coalesce(p.key, s.id::text), p.kind, p.value,
       coalesce(p.headers, '{}'::jsonb) || pg_catalog.jsonb_build_object('periodic', p.name, 'due', s.due)
FROM unnest($1::text[], $2::uuid[], $3::text[]) WITH ORDINALITY AS s (name, id, due, nth)
JOIN "mailroom".periodic AS p ON p.name = s.name ORDER BY s.nth
