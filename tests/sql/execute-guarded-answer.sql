-- ANSWER in dispatcher/executor/applying/guarded.py
SELECT current_setting('mailroom.applied')::bigint
