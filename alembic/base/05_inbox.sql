-- Where a message waits for its consumer. `mailroom.schema.inboxes` makes the partitions, with their keys and indexes.

CREATE TABLE inbox (  -- Delivered messages, one partition per inbox; a key is reaped in clock order.
    inbox        text        COLLATE "C" NOT NULL,  -- The inbox's name.
    clock        bigint      NOT NULL,              -- Lamport clock of this node's stamp: unique and rising.
    sent_clock   bigint      NOT NULL,              -- Lamport clock of the origin's send event.
    origin       uuid        NOT NULL,              -- The node that sent it.
    delivered_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- Physical time of the delivery.
    {message}
) PARTITION BY LIST (inbox);

-- D-workers-2: By default the attempts last about three hours.
CREATE TABLE inbox_registry (  -- The inboxes and their settings.
    name          text             COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$'),  -- The inbox's name; its partition is inbox_<name>.
    backoff_s     double precision NOT NULL DEFAULT 1 CHECK (backoff_s >= 0),  -- Wait after a key's first failure, in seconds; each further failure doubles it.
    backoff_max_s double precision NOT NULL DEFAULT 3600 CHECK (backoff_max_s >= backoff_s),  -- The longest wait, in seconds.
    floor         bigint           NOT NULL DEFAULT 0,      -- No message has a clock at or below it, so claims start their scans here. It only saves time.
    created_at    timestamptz      NOT NULL DEFAULT now(),  -- When it was created.
    on_failure    text             COLLATE "C" NOT NULL DEFAULT 'park' CHECK (on_failure IN ('park', 'skip')),  -- When no attempt is left: park the key, or skip the message into dead_letter.
    max_attempts  integer          NOT NULL DEFAULT 16 CHECK (max_attempts >= 1),  -- How often a message is tried.
    healthy_floor bigint           NOT NULL DEFAULT 0,      -- All messages up to this clock are of failing keys, which stay failing up to it.
    expire_s      double precision CHECK (expire_s > 0),    -- How many seconds a delivered message may wait before the janitor removes it; null for ever.
    expired       bigint           NOT NULL DEFAULT 0,      -- How many messages have expired here.
    "order"       text             COLLATE "C" NOT NULL DEFAULT 'key' CHECK ("order" IN ('key', 'total', 'log')),  -- The order in which messages are reaped: key, or total, by sent_clock and origin, or log, by the lanes of a log.
    sent_floor    bigint           NOT NULL DEFAULT 0,      -- Of a total inbox: no message has a sent_clock at or below it, nor will have one. It saves time.
    paused_at     timestamptz,                              -- Since when it is paused: claims give nothing, deliveries go on. Null if it is not.
    paused_by     text,                                     -- Who paused it, and why.
    keep_reaped_days integer CHECK (keep_reaped_days >= 1),  -- How many days what was reaped is kept in `reaped`; null if it is not.
    log           text             COLLATE "C",             -- The log that it reads; null if messages are delivered to it.
    epoch         bigint           NOT NULL DEFAULT 0,      -- Of an inbox that reads a log: another number once it was made anew, and a larger one once it was set back.
    lost          bigint           NOT NULL DEFAULT 0,      -- How many messages its log dropped before it had read them (log_registry.drop_unread).
    lost_to       bigint           NOT NULL DEFAULT 0,      -- No message with a larger clock was among them.
    lost_since    timestamptz,                              -- When that was for the first time; null if it never was.
    lost_at       timestamptz,                              -- When it was last.
    CHECK (("order" = 'log') = (log IS NOT NULL))
) WITH ({busy});
-- Most nodes have no total inbox, and each delivery asks.
CREATE INDEX registry_total ON inbox_registry (name) WHERE "order" = 'total';

CREATE TABLE stable (  -- How far a total inbox may be given out; the newest row counts.
    inbox text   COLLATE "C" NOT NULL,  -- The inbox.
    clock bigint NOT NULL,              -- Every message with a sent_clock up to this one has been received.
    PRIMARY KEY (inbox, clock)
) WITH ({hot});

CREATE TABLE limits (  -- Limits of the workers of an inbox, and how they stand. An inbox that never had any has no row.
    inbox           text             COLLATE "C" PRIMARY KEY,                -- The inbox.
    rate_per_s      double precision CHECK (rate_per_s > 0),                 -- How many messages a second all its workers may claim; null for no limit.
    burst           integer          NOT NULL DEFAULT 1 CHECK (burst >= 1),  -- How many tokens the bucket holds, each for a message.
    concurrency     integer          CHECK (concurrency >= 1),               -- How many batches all its workers may have in hand; null for no limit.
    breaker_percent integer          CHECK (breaker_percent BETWEEN 1 AND 100),  -- The breaker opens when this share of attempts fails; null for none.
    breaker_by      text             COLLATE "C" CHECK (breaker_by ~ '^[!-~]$'),  -- There is a breaker for each prefix of a key, up to the first of this character; null for one of the whole inbox.
    tokens          double precision NOT NULL DEFAULT 0,                     -- Tokens in the bucket at filled_at.
    filled_at       timestamptz      NOT NULL DEFAULT clock_timestamp(),     -- When tokens were taken last.
    opened_at       timestamptz,                                             -- Since when the breaker is open: workers claim nothing. Null if it is closed.
    opened_why      text,                                                    -- What share of attempts had failed.
    try_at          timestamptz,                                             -- When one message is tried while the breaker is open.
    tries           integer          NOT NULL DEFAULT 0                      -- How many of these have failed.
) WITH ({hot});

-- A row is locked by the transaction of a batch, so it is free as soon as that has ended, however it ends.
CREATE TABLE slot (  -- Slots of the batches that workers have in hand, of an inbox with limits.
    inbox text    COLLATE "C" NOT NULL,  -- The inbox.
    slot  integer NOT NULL,              -- Its number, from 1; 0 is the one for the message that is tried while the breaker is open.
    PRIMARY KEY (inbox, slot)
);

-- The keys of an open prefix wait by rows of `key_state`. Making more of them wait, having one tried,
-- and closing it lock this row, before any of those rows.
CREATE TABLE breaker (  -- The open breakers of prefixes of keys; a closed one has no row.
    inbox      text        COLLATE "C" NOT NULL,  -- The inbox.
    prefix     text        COLLATE "C" NOT NULL,  -- What its keys have before the first separator.
    separator  text        COLLATE "C" NOT NULL,  -- The separator: limits.breaker_by when it opened.
    opened_at  timestamptz NOT NULL,              -- Since when it is open.
    opened_why text        NOT NULL,              -- What share of attempts had failed.
    try_at     timestamptz NOT NULL,              -- When the next message is tried.
    tries      integer     NOT NULL DEFAULT 0,    -- How many were given to be tried.
    trying     text        COLLATE "C",           -- The key that was given last to be tried; null once that has failed.
    deleted    boolean     NOT NULL DEFAULT false,  -- Set to have the row deleted (delete_marked).
    PRIMARY KEY (inbox, prefix)
) WITH ({hot});
