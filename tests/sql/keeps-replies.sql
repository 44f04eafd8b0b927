-- KEPT in inbox/replies.py
SELECT keep_s FROM "mailroom".inbox_registry WHERE name = 'shipping'
