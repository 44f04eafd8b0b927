-- A message has these columns in every table, so that every move is a plain INSERT .. SELECT.
    message_id   uuid        NOT NULL,              -- The message's id, which never changes; an idempotency key for effects outside the database.
    topic        text        COLLATE "C" NOT NULL,  -- What the message is addressed to.
    key          text        COLLATE "C" NOT NULL,  -- Ordering key within an inbox. An unordered message has its id as key.
    kind         "char"      NOT NULL,              -- M message, E event, C command, R reply.
    message_type "char"      NOT NULL,              -- O object, D database, C collection, U user-defined.
    event_type   "char",                            -- C created, U updated, D deleted.
    value        bytea,                             -- The value as CBOR; exactly one of value and value_json is set.
    value_json   jsonb,                             -- The value as JSON, for writers that have no CBOR.
    headers      jsonb,                             -- Flat map of text to text.
    expires_at   timestamptz,                       -- If not delivered before this time, the message is dropped.
    after_clock  bigint,                            -- The stamp is later than this clock: that of a cause on another node.
    source       text        COLLATE "C",           -- Who sent it: the writer's application_name.
    sent_at      timestamptz                        -- Physical time of the send; order never rests on it.
                 NOT NULL
