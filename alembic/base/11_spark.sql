-- Spark: what it has committed and is about to, and what it reads and drains.

CREATE TABLE spark_batch (  -- What Spark has committed: each batch once, in the transaction that sent its messages.
    name     text        COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 100),  -- The stream's name, or its query's id; the idempotency key of a job.
    batch    bigint      NOT NULL,     -- The number of the micro-batch; -1 for a job.
    query    text        COLLATE "C",  -- The id of the streaming query; a new checkpoint brings a new one.
    messages bigint      NOT NULL,     -- How many messages it sent. Their source is mailroom spark <name> <batch>.
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When.
    digest   bytea       CHECK (octet_length(digest) = 16),  -- The sum of its rows' hashes, their ids left out, whatever their order.
    PRIMARY KEY (name, batch)
);
CREATE INDEX spark_batch_at ON spark_batch (at);

CREATE TABLE spark_staging (  -- Staging tables of Spark's tasks that are not dropped yet: staging_<token>.
    token    uuid        PRIMARY KEY,              -- The task attempt's token; it begins with the time, in milliseconds.
    name     text        COLLATE "C" NOT NULL,     -- The batch's name in spark_batch.
    batch    bigint      NOT NULL,                 -- The batch's number in spark_batch.
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When it was created.
    schema   text        COLLATE "C" CHECK (schema ~ '^[a-z][a-z0-9_]*$'),  -- The schema that its table stands in, if that is not this one.
    part     integer,                              -- Its place in a decided large batch that still moves; otherwise null.
    messages bigint,                               -- How many messages that part has.
    moved    bigint      NOT NULL DEFAULT 0,       -- How many of them were moved into the outbox: those with the numbers up to this.
    deleted  boolean     NOT NULL DEFAULT false    -- Set to have the row deleted (delete_marked).
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE TABLE spark_bulk (  -- Large batches of Spark that are decided, and of which messages are still to be moved into the outbox.
    name      text        COLLATE "C" NOT NULL,  -- The batch's name in spark_batch.
    batch     bigint      NOT NULL,              -- The batch's number in spark_batch.
    source    text        NOT NULL,              -- The source of its messages.
    constants jsonb       NOT NULL,              -- Common to all of its messages: topic, kind, message_type, event_type.
    messages  bigint      NOT NULL,              -- How many messages it has.
    moved     bigint      NOT NULL DEFAULT 0,    -- How many of them were moved into the outbox.
    first     bigint,                            -- The position of the first message of its last chunk.
    last      bigint,                            -- The position of the last message of its last chunk.
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When it was decided, or its last chunk was moved.
    deleted   boolean     NOT NULL DEFAULT false,  -- Set to have the row deleted (delete_marked).
    PRIMARY KEY (name, batch)
);

CREATE TABLE spark_stream (  -- The batches that Spark's stream of an inbox has given out and not all deleted, and the last one.
    inbox      text           COLLATE "C" NOT NULL,   -- The inbox.
    checkpoint text           COLLATE "C" NOT NULL,   -- The id that the stream's checkpoint got when it began. One for all rows of an inbox.
    batch      bigint         NOT NULL,               -- The number of the batch of that checkpoint, from 1.
    above      bigint         NOT NULL,               -- The clock above which it begins.
    upto       bigint         NOT NULL CHECK (upto > above),  -- The clock of its last message; of a log the one up to which it goes.
    message_id text           NOT NULL,               -- The id of its last message; of a log its lane, clock and id.
    messages   bigint         NOT NULL,               -- How many messages it has.
    digest     bigint         NOT NULL,               -- The hashes of its messages' clocks and ids, combined by exclusive or.
    read       int8multirange NOT NULL DEFAULT '{}',  -- The clocks that tasks have read, of a log the lanes: all that was planned of them.
    deleted    boolean        NOT NULL DEFAULT false,  -- Set to have the row deleted (delete_marked).
    at         timestamptz    NOT NULL DEFAULT clock_timestamp(),  -- When it was first given out.
    number     bigint,                                -- The number of Spark's under which it was first read.
    used       bigint,                                -- The last number of Spark's that is known to be used: for it, or after it without data of this inbox.
    PRIMARY KEY (inbox, batch)
);

CREATE TABLE spark_drain (  -- How far inboxes have been drained into files: a row per shard, locked by the drainer of the shard.
    inbox     text        COLLATE "C" NOT NULL,   -- The inbox.
    shard     integer     NOT NULL CHECK (shard BETWEEN 0 AND 999),  -- The number of the drain, of those that run side by side.
    segment   bigint      NOT NULL DEFAULT 0,     -- The last segment: one transaction and one file with its messages.
    file      text,                               -- The hidden name of that file before it is finished.
    directory text        NOT NULL,               -- The directory of that file.
    finished  boolean     NOT NULL DEFAULT true,  -- Whether the file has its final name. If not, the next drain renames it.
    messages  bigint      NOT NULL DEFAULT 0,     -- How many messages the shard has drained in total.
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),  -- When the last segment was committed.
    PRIMARY KEY (inbox, shard)
);
