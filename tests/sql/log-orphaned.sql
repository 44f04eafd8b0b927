-- ORPHANED in inbox/by_log/log_claim.py
-- $1 mine
SELECT DISTINCT "mailroom".lane_of(o.key, 64)::bigint
FROM "mailroom".orphaned_keys('shipping', $1::uuid[]) AS o (key)
