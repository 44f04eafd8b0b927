-- REPLAY in inbox/total_order/total_parked.py
-- $1 why
WITH restarted AS (
    INSERT INTO "mailroom".attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT 'shipping', '', f.clock, f.message_id, 0, 'replay', coalesce($1::text, 'replayed')
    FROM (SELECT clock, message_id FROM "mailroom".inbox_shipping ORDER BY (sent_clock + 0), origin LIMIT 1) AS f
    WHERE EXISTS (SELECT FROM "mailroom".attempt AS a WHERE a.inbox = 'shipping' AND a.key = '' AND a.clock = f.clock)),
freed AS (
    DELETE FROM "mailroom".key_state WHERE inbox = 'shipping' AND key = '')
SELECT count(*) FROM "mailroom".inbox_shipping
