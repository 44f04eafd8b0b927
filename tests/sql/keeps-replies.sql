-- KEPT in inbox/asking/replies.py
SELECT expire_s FROM "mailroom".inbox_registry WHERE name = 'shipping'
