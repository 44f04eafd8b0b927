-- BACKLOG in inbox/by_key/peek.py
SELECT count(*) FROM "mailroom".inbox_shipping
