-- ANSWER in dispatcher/delivery/sift.py
SELECT current_setting('mailroom.refused')
