-- ANSWER in dispatcher/refusal.py
SELECT current_setting('mailroom.refused')
