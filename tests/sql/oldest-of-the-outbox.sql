-- OLDEST in dispatcher/delivery/deliver.py
SELECT min(position) FROM "mailroom".outbox
