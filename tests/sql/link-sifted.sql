-- ANSWER in dispatcher/links/refusal.py
SELECT current_setting('mailroom.refused')
