-- ANSWER in dispatcher/fan_out.py
SELECT current_setting('mailroom.refused')
