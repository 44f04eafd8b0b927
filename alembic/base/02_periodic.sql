-- Messages that the dispatcher itself puts into the outbox, at the times of a cron expression.

-- Their times are computed in Python when a row moves on, and stored: a change of the time zone's rules, or two machines
-- with different ones, never make a time come twice.
CREATE TABLE periodic (  -- Messages that are sent at the times of a cron expression, a row each.
    name       text        COLLATE "C" PRIMARY KEY  -- Its name; a part of the ids of its messages.
        CONSTRAINT periodic_name CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'),
    cron       text        NOT NULL,  -- The cron expression: five fields, or a name such as @daily.
    time_zone  text        NOT NULL,  -- The time zone of its times, by its name.
    topic      text        COLLATE "C" NOT NULL,  -- The topic of its messages.
    key        text        COLLATE "C",           -- Their key; null for a key of its own for each of them.
    kind       "char"      NOT NULL               -- Their kind: M message, E event, C command.
        CONSTRAINT periodic_kind CHECK (kind IN ('M', 'E', 'C')),
    value      bytea       NOT NULL,              -- Their value as CBOR.
    headers    jsonb,                             -- Their headers, to which `periodic` and `due` are added.
    missed     text        COLLATE "C" NOT NULL   -- What is sent for times at which no dispatcher ran: skip, once or all.
        CONSTRAINT periodic_missed CHECK (missed IN ('skip', 'once', 'all')),
    jitter_s   float8      NOT NULL               -- The longest random delay of a send, in seconds.
        CONSTRAINT periodic_jitter CHECK (jitter_s >= 0 AND jitter_s <= 3600),
    due_at     timestamptz NOT NULL,              -- The next time for which a message is to be sent.
    next_at    timestamptz NOT NULL,              -- When it is to be sent: due_at, delayed by the jitter. It is late once this has passed.
    last_at    timestamptz,                       -- The last time for which a message was sent.
    paused     boolean     NOT NULL DEFAULT false,  -- Whether an operator has paused it.
    last_error text                               -- Why the last try to send failed; null if it did not.
) WITH ({busy});
CREATE INDEX periodic_next ON periodic (next_at) WHERE NOT paused;
