-- UNREAD in mailroom/logs/segments.py
SELECT at.lane::bigint, at.clock, (
    SELECT count(*) FROM "mailroom".log AS o
    WHERE o.log = 'orders' AND o.segment = 1 AND o.lane = at.lane AND o.clock > at.clock)
FROM (SELECT DISTINCT ON (lane) lane, clock FROM "mailroom".log_receipt WHERE inbox = 'shipping'
      ORDER BY lane, epoch DESC, clock DESC) AS at ORDER BY at.lane
