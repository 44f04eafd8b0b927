-- BACKLOG in inbox/peek.py
SELECT count(*) FROM "mailroom".inbox_shipping
