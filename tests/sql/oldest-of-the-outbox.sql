-- OLDEST in dispatcher/deliver.py
SELECT min(position) FROM "mailroom".outbox
