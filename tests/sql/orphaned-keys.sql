-- ORPHANED in inbox/by_key/claim.py
-- $1 mine
SELECT key FROM "mailroom".orphaned_keys('shipping', $1::uuid[]) AS o (key)
