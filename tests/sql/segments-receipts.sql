-- RECEIPTS in mailroom/logs/segments.py
-- $1 rows
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (lane) lane, epoch, clock FROM "mailroom".log_receipt WHERE inbox = 'shipping'
    ORDER BY lane, epoch DESC, clock DESC),
old AS MATERIALIZED (
    SELECT r.lane, r.epoch, r.clock FROM newest AS n, LATERAL (
        SELECT r.lane, r.epoch, r.clock FROM "mailroom".log_receipt AS r
        WHERE r.inbox = 'shipping' AND r.lane = n.lane AND (r.epoch, r.clock) < (n.epoch, n.clock)
        LIMIT $1::bigint) AS r),
gone AS (
    DELETE FROM "mailroom".log_receipt AS r USING old
    WHERE r.inbox = 'shipping' AND r.lane = old.lane AND r.epoch = old.epoch AND r.clock = old.clock RETURNING 1)
SELECT count(*) FROM gone
