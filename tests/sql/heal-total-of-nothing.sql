-- HEAL_GONE in inbox/total_order/total_claim.py
UPDATE "mailroom".my_key_state AS s SET deleted = true
WHERE s.inbox = 'shipping' AND s.key = '' AND s.retry_at <= (SELECT clock_timestamp())
  AND NOT EXISTS (SELECT FROM "mailroom".inbox_shipping WHERE (sent_clock + 0) <= s.suspect_to)
