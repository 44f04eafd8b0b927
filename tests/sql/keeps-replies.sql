-- KEPT in inbox/asking/replies.py
SELECT keep_s FROM "mailroom".inbox_registry WHERE name = 'shipping'
