-- ASK in mailroom/links/marks.py
-- $1 run, $2 clock, $3 link
SELECT "mailroom".link_want(l.number, $1::uuid, $2::bigint), pg_notify('mailroom:' || '"mailroom".outbox'::regclass::oid::text, '') IS NULL
FROM "mailroom".link AS l
WHERE l.number = $3::bigint AND l.run = $1::uuid AND coalesce((
    SELECT t.sent_clock FROM "mailroom".transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1), 0)
    < $2::bigint
