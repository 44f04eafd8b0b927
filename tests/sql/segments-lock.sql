-- LOCK in mailroom/logs/segments.py
SELECT "mailroom".lock_log_segment(1)
