-- INBOXES in mailroom/status.py
SELECT r.name, i.messages, extract(epoch FROM clock_timestamp() - oldest.sent_at)::float8,
       extract(epoch FROM clock_timestamp() - oldest.delivered_at)::float8,
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at > clock_timestamp() AND k.retry_at < 'infinity'),
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.parked_at IS NOT NULL),
       (SELECT count(*) FROM "mailroom".parked AS p WHERE p.inbox = r.name), r.dropped, r.paused_at, r.paused_by,
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.paused_at IS NOT NULL),
       l.opened_at, l.opened_why
FROM "mailroom".inbox_registry AS r
LEFT JOIN "mailroom".inbox_limit AS l ON l.inbox = r.name AND l.opened_at IS NOT NULL
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM "mailroom".inbox
    WHERE inbox = r.name AND inbox IN ('shipping') AND clock + 0 > r.floor) AS i
LEFT JOIN LATERAL (
    SELECT sent_at, delivered_at FROM "mailroom".inbox
    WHERE inbox = r.name AND inbox IN ('shipping') AND clock + 0 > r.floor ORDER BY clock + 0 LIMIT 1) AS oldest ON true
WHERE r.name IN ('shipping') ORDER BY r.name
