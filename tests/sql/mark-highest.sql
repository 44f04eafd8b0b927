-- HIGHEST in mailroom/links/marks.py
-- $1 stable
SELECT sent_clock FROM "mailroom".inbox_shipping WHERE (sent_clock + 0) > $1::bigint ORDER BY (sent_clock + 0) DESC LIMIT 1
