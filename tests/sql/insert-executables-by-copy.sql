-- INSERT.copy in outbox/store.py
COPY "mailroom".outbox_executable (message_id, version, operation, target, key, end_key, value, amount, bytes, expected, arguments, at, row_limit, notify, headers, after_clock) FROM STDIN (FORMAT binary)
