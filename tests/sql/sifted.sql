-- ANSWER in dispatcher/delivery/refusal.py
SELECT current_setting('mailroom.refused')
