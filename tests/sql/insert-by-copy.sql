-- INSERT.copy in mailroom/message/outgoing.py
COPY "mailroom".outbox (message_id, topic, key, kind, message_type, event_type, value, headers, deliver_at, expires_at, after_clock) FROM STDIN (FORMAT binary)
