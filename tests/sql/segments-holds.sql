-- HOLDS in mailroom/logs/segments.py
SELECT EXISTS (
    SELECT FROM (SELECT DISTINCT ON (lane) lane, clock FROM "mailroom".log_receipt WHERE inbox = 'shipping'
                 ORDER BY lane, epoch DESC, clock DESC) AS at, LATERAL (
        SELECT FROM "mailroom".log AS o
        WHERE o.log = 'orders' AND o.segment = 1 AND o.lane = at.lane AND o.clock > at.clock
        ORDER BY o.clock LIMIT 1) AS unread)
