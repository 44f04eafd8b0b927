-- READ_SINCE in mailroom/logs/segments.py
-- $1 lanes, $2 clocks
SELECT coalesce(sum((
    SELECT count(*) FROM "mailroom".log AS o
    WHERE o.log = 'orders' AND o.segment = 1 AND o.lane = at.lane AND o.clock > was.clock
      AND o.clock <= at.clock)), 0::numeric)::bigint
FROM (SELECT DISTINCT ON (lane) lane, clock FROM "mailroom".log_receipt WHERE inbox = 'shipping'
      ORDER BY lane, epoch DESC, clock DESC) AS at
JOIN ROWS FROM (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bigint[])) AS was (lane, clock)
  ON was.lane = at.lane
