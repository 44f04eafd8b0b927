-- ANSWER in dispatcher/executor/guarded.py
SELECT current_setting('mailroom.applied')::bigint
