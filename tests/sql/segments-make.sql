-- MAKE in mailroom/logs/segments.py
-- $1 now
SELECT "mailroom".make_log_segment('orders', coalesce($1::timestamptz, statement_timestamp()))
