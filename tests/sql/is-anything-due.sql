-- DUE in dispatcher/delivery/deliver.py
-- $1 now
SELECT EXISTS (SELECT FROM "mailroom".scheduled WHERE deliver_at <= coalesce($1::timestamptz, clock_timestamp()))
