-- OLD in dispatcher/housekeeping/total_floor.py
-- $1 rows
WITH old AS MATERIALIZED (
    SELECT clock FROM "mailroom".stable WHERE inbox = 'shipping' AND clock < (
        SELECT clock FROM "mailroom".stable WHERE inbox = 'shipping' ORDER BY clock DESC LIMIT 1)
    ORDER BY clock LIMIT $1::bigint),
gone AS (
    DELETE FROM "mailroom".stable WHERE inbox = 'shipping' AND clock <= (SELECT max(clock) FROM old) RETURNING 1)
SELECT count(*) FROM gone
