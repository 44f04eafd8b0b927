-- DELETE in dispatcher/executor/applying/delete_range.py
-- $1 start, $2 end, $3 rows
WITH doomed AS MATERIALIZED (
    SELECT t.key AS key FROM "mailroom".store AS t WHERE true  AND t.key >= $1::text::text AND t.key < $2::text::text ORDER BY t.key LIMIT $3::bigint ),
gone AS (
    DELETE FROM "mailroom".store WHERE key = ANY(ARRAY(SELECT key FROM doomed)) RETURNING 1)
SELECT count(*), (SELECT count(*) FROM doomed), (SELECT key::text FROM doomed ORDER BY doomed.key DESC LIMIT 1)
FROM gone
