-- ASK in dispatcher/delivery/fan_out.py
-- $1 partitions
SELECT set_config('mailroom.asked', (coalesce($1::bigint, greatest(8::bigint,
        current_setting('max_locks_per_transaction')::bigint
        * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 32)))::text, true)
