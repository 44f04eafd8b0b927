-- MATCH in mailroom/links/handshake/hello.py
-- $1 link, $2 run
SELECT "mailroom".link_match($1::bigint, $2::uuid)
