-- WAS_IN_BATCH in inbox/by_key/failure.py
-- $1 error, $2 key, $3 clock
SELECT EXISTS (
    SELECT FROM "mailroom".inbox_shipping AS i, LATERAL (
        SELECT FROM "mailroom".my_key_state AS s
        WHERE s.inbox = 'shipping' AND s.key = '' AND s.last_error = $1::text AND s.suspect_to >= i.sent_clock
          AND NOT EXISTS (SELECT FROM "mailroom".my_attempt AS a
                          WHERE a.inbox = 'shipping' AND a.key = '' AND a.clock = i.clock)) AS s
    WHERE i.key = $2::text AND i.clock = $3::bigint)
