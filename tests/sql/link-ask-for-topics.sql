-- ASK in mailroom/links/handshake/hello.py
-- $1 link, $2 run, $3 topics
SELECT "mailroom".link_ask($1::bigint, $2::uuid, $3::text[])
