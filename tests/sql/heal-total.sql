-- HEAL in inbox/total_order/total_claim.py
-- $1 clock, $2 sent_clock
WITH gone AS (SELECT $1::bigint AS clock),
healed AS (
    UPDATE "mailroom".my_key_state AS s SET deleted = true
    WHERE s.inbox = 'shipping' AND s.key = '' AND s.suspect_to <= $2::bigint AND (s.clock IN (SELECT clock FROM gone)
         OR NOT EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE (clock + 0) = s.clock)))
UPDATE "mailroom".my_key_state AS s SET retry_at = greatest(clock_timestamp(), (
    SELECT retry_at FROM "mailroom".attempt
    WHERE inbox = 'shipping' AND key = '' AND clock = (
        SELECT clock FROM "mailroom".inbox_shipping
        WHERE (sent_clock + 0) > (SELECT sent_floor FROM "mailroom".inbox_registry WHERE name = 'shipping')
        ORDER BY (sent_clock + 0), origin LIMIT 1)
    ORDER BY id DESC LIMIT 1))
WHERE s.inbox = 'shipping' AND s.key = '' AND s.retry_at < 'infinity'
  AND NOT (s.suspect_to <= $2::bigint AND (s.clock IN (SELECT clock FROM gone)
         OR NOT EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE (clock + 0) = s.clock)))
