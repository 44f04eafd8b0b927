-- DISPATCH_LOCK in mailroom/order/clock.py
SELECT "mailroom".take_dispatch_turn() IS NULL
