-- Bridges: links and origins whose other end is a broker.

-- What a broker needs is in the environment of the dispatcher; nothing secret is here. Beside the link's `state`, as of
-- an origin.
CREATE TABLE bridge_out (  -- Links of which a broker is the reader.
    link     bigint      PRIMARY KEY,  -- The link.
    settings jsonb       NOT NULL,     -- Which broker, and how messages become records.
    state    text        COLLATE "C" NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'stopped')),  -- The state: open, or stopped (for the reason in why) until an operator acts; both are tried again.
    trouble  text        COLLATE "C" CHECK (trouble IN ('unreachable', 'refused', 'failing')),  -- Why something is not published now: the broker is unreachable, messages are refused, or it is failing; null while neither.
    why      text,                     -- Why, and what to do.
    since    timestamptz,              -- Since when nothing is published; null while it is.
    marked_at timestamptz,             -- When the mark at the broker was last set, if it keeps one.
    marked   bigint,                   -- The mark that it had then: the clock of the last message. One below it tells that the broker has lost records.
    lost     text,                     -- That the broker no longer has what it had acknowledged, and what to do. Nothing is published before it is resumed; null while that is not known.
    tried    text,                     -- What was sent last, and after which place of the broker's log, if records may be deleted there.
    skips    bigint      NOT NULL DEFAULT 0  -- How often a row was skipped by hand: a publishing daemon begins anew.
) WITH ({busy});

CREATE TABLE bridge_known (  -- Messages that a bridge has published in a history which this node has lost. They are not published again.
    link       bigint NOT NULL,  -- The link.
    message_id uuid   NOT NULL,  -- The message.
    PRIMARY KEY (link, message_id)
);

CREATE TABLE bridge_parts (  -- Over how many partitions of a topic a bridge spreads what it publishes: a repeat goes where the first try went.
    link  bigint NOT NULL,  -- The link.
    topic text   COLLATE "C" NOT NULL,  -- The topic at the broker.
    after bigint NOT NULL,  -- It holds for the rows of the link after this one, up to the next such row.
    parts bigint NOT NULL CHECK (parts > 0),  -- How many partitions.
    PRIMARY KEY (link, topic, after)
);


CREATE TABLE bridge_last (  -- The last record that a broker has acknowledged to a bridge, of each partition: one below it tells that the broker has lost records.
    link  bigint NOT NULL,  -- The link.
    topic text   COLLATE "C" NOT NULL,  -- The topic at the broker, or its stream.
    part  bigint NOT NULL,  -- The partition.
    last  bigint NOT NULL,  -- The record's number there.
    PRIMARY KEY (link, topic, part)
) WITH ({hot});

-- Its rows go as `acked` passes them.
CREATE TABLE bridge_done (  -- Rows above what a bridge has acknowledged that need no publishing: they are published, or skipped by an operator.
    link bigint NOT NULL,  -- The link.
    seq  bigint NOT NULL,  -- The row of transit.
    PRIMARY KEY (link, seq)
) WITH ({hot});

CREATE TABLE bridge_in (  -- Origins of which a broker is the source.
    origin   bigint PRIMARY KEY,  -- The number of the origin.
    settings jsonb  NOT NULL,     -- Which broker, and how records become messages.
    moves    bigint NOT NULL DEFAULT 0,  -- How often its position was set by hand, or it was resumed after a loss: a reading daemon begins anew.
    lost     text,                 -- That records are lost at the broker, and what to do. Nothing is taken in before it is resumed; null while none are known to be.
    history  text,                 -- In which history of this node it has taken from a queue, which deletes what is taken; null: from none.
    lacks_from timestamptz,        -- If that was another one than now: when it had last taken in before, as far as is known.
    lacks_to timestamptz           -- And until when it may have taken what this node has lost with that history.
);

CREATE TABLE bridge_position (  -- Up to where the log of a broker was taken in: a row per partition of a topic.
    origin       bigint NOT NULL,  -- The number of the origin.
    topic        text   COLLATE "C" NOT NULL,  -- The topic at the broker, or its stream.
    part         bigint NOT NULL,  -- The partition.
    next         bigint NOT NULL,  -- The offset of the next record.
    leader_epoch bigint,           -- The epoch of the partition's leader with the record before it, by which a truncated log is noticed.
    log          text,             -- Which log it is, where the broker tells: another one may get its name.
    last         bigint,           -- The offset of the last record that was taken in; null if none was, or the position was set by hand.
    digest       text COLLATE "C",  -- A hash of that record: before the log is read on, it is looked whether the record is still there.
    PRIMARY KEY (origin, topic, part)
) WITH ({hot});

CREATE TABLE bridge_mark (  -- Up to which clock the messages of a bridge of another node were taken in; repeats are not above it.
    origin bigint NOT NULL,  -- The number of the origin.
    topic  text   COLLATE "C" NOT NULL,  -- The topic at the broker, or its stream.
    part   bigint NOT NULL,  -- The partition.
    sender uuid   NOT NULL,  -- The id of the node that sent them.
    link   bigint NOT NULL,  -- The number of its link.
    clock  bigint NOT NULL,  -- The largest sent_clock of them.
    PRIMARY KEY (origin, topic, part, sender, link)
) WITH ({hot});
