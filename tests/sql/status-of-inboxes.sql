-- INBOXES in mailroom/figures/inboxes.py
SELECT r.name, i.messages, extract(epoch FROM clock_timestamp() - oldest.sent_at)::float8,
       extract(epoch FROM clock_timestamp() - oldest.delivered_at)::float8,
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at > clock_timestamp() AND k.retry_at < 'infinity'),
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.parked_at IS NOT NULL),
       (SELECT count(*) FROM "mailroom".parked AS p WHERE p.inbox = r.name), r.expired, r.paused_at, r.paused_by,
       (SELECT count(*) FROM "mailroom".key_state AS k
        WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.paused_at IS NOT NULL),
       b.opened_at, b.why
FROM "mailroom".inbox_registry AS r
CROSS JOIN LATERAL (
    SELECT min(o.opened_at) AS opened_at,
           string_agg(o.why, '; ' ORDER BY o.nth) FILTER (WHERE o.nth <= 3)
           || CASE WHEN count(*) > 3 THEN pg_catalog.format('; and %s more', count(*) - 3) ELSE '' END AS why
    FROM (SELECT u.opened_at, u.why, row_number() OVER (ORDER BY u.opened_at, u.why) AS nth
          FROM (SELECT opened_at, opened_why AS why FROM "mailroom".limits
                WHERE inbox = r.name AND opened_at IS NOT NULL
                UNION ALL
                SELECT opened_at, pg_catalog.format('prefix %s: %s', prefix, opened_why)
                FROM "mailroom".breaker WHERE inbox = r.name) AS u) AS o) AS b
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM "mailroom".inbox
    WHERE inbox = r.name AND inbox IN ('shipping') AND clock + 0 > r.floor) AS i
LEFT JOIN LATERAL (
    SELECT sent_at, delivered_at FROM "mailroom".inbox
    WHERE inbox = r.name AND inbox IN ('shipping') AND clock + 0 > r.floor ORDER BY clock + 0 LIMIT 1) AS oldest ON true
WHERE r.name IN ('shipping') ORDER BY r.name
