-- CEILING in mailroom/order/clock.py
-- $1 ceiling
UPDATE "mailroom".node SET clock_ceiling = greatest(clock_ceiling, $1::bigint) RETURNING clock_ceiling
