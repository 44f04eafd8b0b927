-- BOUNDS in dispatcher/links/at_source/bounds.py
-- $1 bytes, $2 link, $3 seq, $4 rows, $5 last_id, $6 stamped_at
WITH ahead AS MATERIALIZED (
    SELECT seq, size, nth = 1 OR $1::bigint >= size AS fits FROM (
        SELECT seq, row_number() OVER next AS nth, sum(
            coalesce(octet_length(value), octet_length(value_json::text), 0) + octet_length(topic) + octet_length(key) +
            CASE WHEN pg_catalog.pg_column_compression(headers) IS NULL
                 THEN coalesce(pg_catalog.pg_column_size(headers), 0)
                 ELSE octet_length(headers::text) END + 100) OVER next AS size
        FROM "mailroom".transit WHERE link = $2::bigint AND seq > $3::bigint
        WINDOW next AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)
        ORDER BY seq LIMIT $4::bigint) AS next)
SELECT max(seq) FILTER (WHERE fits), count(*) = $4::bigint OR NOT bool_and(fits), min(seq),
       EXISTS (SELECT FROM "mailroom".transit WHERE link = $2::bigint AND seq = $3::bigint),
       EXISTS (SELECT FROM "mailroom".transit WHERE link = $2::bigint AND seq = $3::bigint
               AND message_id = $5::uuid AND stamped_at = $6::timestamptz),
       (SELECT seq FROM "mailroom".transit WHERE link = $2::bigint ORDER BY seq DESC LIMIT 1),
       coalesce(max(size) FILTER (WHERE fits), 0)
FROM ahead
