-- ACKNOWLEDGE in dispatcher/links/at_source/acknowledge.py
-- $1 link, $2 run, $3 seq
SELECT "mailroom".link_acknowledge($1::bigint, $2::uuid, $3::bigint)
