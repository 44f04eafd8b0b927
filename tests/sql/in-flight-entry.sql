-- ADD in inbox/worker/in_flight.py
-- $1 id, $2 host, $3 pid, $4 messages, $5 keys, $6 clocks, $7 number
INSERT INTO "mailroom".my_worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number, xact)
VALUES ($1::uuid, 'shipping', $2::text, $3::bigint, clock_timestamp(), $4::bigint,
        $5::text[], $6::bigint[], $7::integer,
        (SELECT nullif(greatest(0, n - ((n - x) & 4294967295)), 0) FROM (
            SELECT xmax::text::bigint AS x, pg_current_xact_id()::text::bigint AS n FROM "mailroom".inbox_shipping
            WHERE key = ($5::text[])[1] AND clock = ($6::bigint[])[1] AND xmax <> '0') AS h))
ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at, messages = excluded.messages, keys = excluded.keys,
                               clocks = excluded.clocks, process_number = excluded.process_number, xact = excluded.xact
