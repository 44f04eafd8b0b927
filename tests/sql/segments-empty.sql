-- EMPTY in mailroom/logs/segments.py
-- $1 now
SELECT "mailroom".empty_log_segment(1, coalesce($1::timestamptz, statement_timestamp()))
