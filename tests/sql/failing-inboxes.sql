-- FAILING in dispatcher/housekeeping/janitor.py
WITH RECURSIVE failing AS (
    SELECT min(inbox) AS inbox FROM "mailroom".key_state
    UNION ALL
    SELECT (SELECT min(inbox) FROM "mailroom".key_state AS k WHERE k.inbox > t.inbox) FROM failing AS t
    WHERE t.inbox IS NOT NULL)
SELECT r.name, EXISTS (SELECT FROM "mailroom".key_state AS k
                       WHERE k.inbox = r.name AND k.retry_at = 'infinity' AND k.parked_at IS NOT NULL),
       r.log, (SELECT l.lanes::bigint FROM "mailroom".log_registry AS l WHERE l.name = r.log)
FROM failing AS t JOIN "mailroom".inbox_registry AS r ON r.name = t.inbox ORDER BY r.name
