-- Links, at the reader: which nodes are read, and what was received from them.

-- Beside `state`, which says what may be received, `trouble`: a source that is not reached now is open, and what was
-- fetched before may come in.
CREATE TABLE origin (  -- The nodes that this one reads: a row per link, on the reader's side.
    number      bigint           GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,  -- Its number here; never used again.
    name        text             COLLATE "C" NOT NULL UNIQUE CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'),  -- The source's name.
    service     text,                                     -- The entry of libpq's service file that leads there; null: the environment says it. No password.
    schema      text             COLLATE "C" NOT NULL DEFAULT 'mailroom' CHECK (schema ~ '^[a-z][a-z0-9_]{0,40}$'),  -- The source's schema there.
    reader      text             COLLATE "C",             -- The name under which the source knows this node; null: the node's own name.
    id          uuid,                                     -- The source's node id, pinned at the first hello: the origin of its messages.
    incarnation bigint,                                   -- The source's incarnation of which messages were received last.
    system_id   bigint,                                   -- The system identifier of the source's server.
    timeline    bigint,                                   -- The highest timeline seen of that server.
    link        bigint,                                   -- The link's number at the source.
    shown       bigint           NOT NULL DEFAULT 0,      -- Everything of the source up to this clock is here, or will never be wanted; see also receipt.
    state       text             COLLATE "C" NOT NULL DEFAULT 'open'  -- The state: open, stopped (for the reason in why), or excluded by hand.
        CHECK (state IN ('open', 'stopped', 'excluded')),
    why         text,                                     -- Why it is not read, and what to do.
    created_at  timestamptz      NOT NULL DEFAULT now(),  -- When it was added.
    keep_s      double precision NOT NULL DEFAULT 172800 CHECK (keep_s >= 0),  -- How many seconds the source keeps rows that were acknowledged, as it said at the last hello.
    trouble     text             COLLATE "C" CHECK (trouble IN ('unreachable', 'failing')),  -- Why it is not read now, though it is tried again: unreachable, or failing; null while neither.
    since       timestamptz,                              -- Since when it is not read; null while it is.
    told        uuid[]           NOT NULL DEFAULT '{}',   -- The subscriptions that the source has, by their ids.
    refused     uuid[]           NOT NULL DEFAULT '{}'    -- The subscriptions that the source was told of and does not allow.
) WITH ({busy});

CREATE TABLE receipt (  -- What was received: a row per batch. The newest row of an origin is the position, and stays.
    origin      bigint      NOT NULL,  -- The number of the origin.
    last        bigint      NOT NULL,  -- The last seq of the batch.
    first       bigint      NOT NULL,  -- The first seq of the batch.
    last_id     uuid        NOT NULL,  -- The message_id of the last row.
    stamped_at  timestamptz NOT NULL,  -- The stamped_at of the last row.
    sent_clock  bigint      NOT NULL,  -- The sent_clock of the last row.
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When it was received.
    ids         uuid[]      NOT NULL,  -- The message ids of the batch, by seq; emptied after a while.
    PRIMARY KEY (origin, last)
) WITH ({hot});
-- EXTERNAL: ids are random, and compressing them in vain costs time.
ALTER TABLE receipt ALTER ids SET STORAGE EXTERNAL;

CREATE TABLE known (  -- Messages that a source may send again though they were received. They are not taken twice.
    origin     bigint NOT NULL,  -- The number of the origin.
    message_id uuid   NOT NULL,  -- The message.
    link       bigint,           -- The earlier link by which it came; null: it is of a history which the source has lost.
    PRIMARY KEY (origin, message_id)
);
