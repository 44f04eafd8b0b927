-- LOCK in mailroom/clock.py
SELECT "mailroom".take_dispatch_turn() IS NULL
