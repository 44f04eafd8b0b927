-- Logs: what is sent to one is written once, kept for a time, and read by many inboxes. `mailroom.logs` makes them.

CREATE TABLE log_registry (  -- The logs and their settings. No inbox has the name of one.
    name        text        COLLATE "C" PRIMARY KEY CHECK (name ~ '^[a-z][a-z0-9_]{0,40}$'),  -- The log's name; its table is log_<name>.
    lanes       integer     NOT NULL CHECK (lanes BETWEEN 1 AND 256),       -- How many lanes it has. It never changes, since it decides the lane of a key.
    keep_days   integer     NOT NULL CHECK (keep_days BETWEEN 1 AND 366),   -- How many days a message is kept at least.
    drop_unread boolean     NOT NULL DEFAULT false,                         -- Whether what is older goes though an inbox has not read it.
    created_at  timestamptz NOT NULL DEFAULT now()                          -- When it was created.
);

-- By logs, so that a role may read one of them, and those by segments: what is over is a whole partition. Rows are
-- inserted once and never changed, so VACUUM has nothing to do before they are dropped, but for the age of transactions.
CREATE TABLE log (  -- Messages of logs: a partition per log, and in that one per segment.
    log          text        COLLATE "C" NOT NULL,  -- The log.
    segment      bigint      NOT NULL,              -- The segment.
    lane         smallint    NOT NULL,              -- The lane, which the key decides (lane_of).
    clock        bigint      NOT NULL,              -- Lamport clock of this node's stamp: unique in the log, and rising.
    sent_clock   bigint      NOT NULL,              -- Lamport clock of the origin's send event.
    origin       uuid        NOT NULL,              -- The node that sent it.
    delivered_at timestamptz NOT NULL DEFAULT clock_timestamp(),  -- Physical time of the delivery.
    {message}
) PARTITION BY LIST (log);

-- A delivery writes into the newest segment of a log, so none fails for lack of one, however long no daemon has made any.
CREATE TABLE log_segment (  -- The segments of logs; the partition is log_<segment>.
    segment     bigint      PRIMARY KEY,                -- Its number.
    log         text        COLLATE "C" NOT NULL,       -- The log.
    first_clock bigint      NOT NULL,                   -- No message here has a smaller clock, and none of an older segment a larger one.
    opened_at   timestamptz NOT NULL,                   -- When it was made: what is in older segments was delivered before.
    emptied_at  timestamptz                             -- When the janitor emptied it, since it was over; null before.
);
CREATE INDEX log_segment_newest ON log_segment (log, segment DESC);

CREATE TABLE log_tick (  -- What each delivery wrote into a log: where there is news, and which clock belongs to a time.
    log   text        COLLATE "C" NOT NULL,                   -- The log.
    clock bigint      NOT NULL,                               -- No message of the delivery has a larger clock, and none of a later one a smaller.
    lanes smallint[]  NOT NULL,                               -- The lanes that got messages.
    rows  bigint      NOT NULL,                               -- How many messages.
    at    timestamptz NOT NULL DEFAULT clock_timestamp(),     -- When it was.
    PRIMARY KEY (log, clock)
);

CREATE TABLE log_topic (  -- Which topics an inbox reads of its log, where it does not read all.
    inbox text COLLATE "C" NOT NULL,  -- The inbox.
    topic text COLLATE "C" NOT NULL   -- The topic, or a pattern of topics as a subscription has it.
        CONSTRAINT log_topic_topic CHECK ({is_topic_or_pattern}),
    {fits_and_words},
    PRIMARY KEY (inbox, topic)
);

-- What follows is by inbox, as messages are: a role has rights to what belongs to its own inboxes, and no condition is
-- looked at for each row. The partitions are lanes_<inbox> and receipts_<inbox>.
-- D-logs-8: Lanes and receipts are tables per inbox.
CREATE TABLE log_lane (  -- The lanes of each inbox that reads a log. A claim locks the rows of the lanes that it reads; they never change.
    inbox text     COLLATE "C" NOT NULL,  -- The inbox.
    lane  smallint NOT NULL               -- The lane.
) PARTITION BY LIST (inbox);

-- Appended and never changed, so a position costs the same however long a snapshot keeps old rows from being removed.
-- D-logs-2: A position is appended, never updated.
CREATE TABLE log_receipt (  -- How far each inbox has read each lane: the largest clock of the largest epoch counts.
    inbox text     COLLATE "C" NOT NULL,  -- The inbox.
    lane  smallint NOT NULL,              -- The lane.
    epoch bigint   NOT NULL,              -- inbox_registry.epoch by then.
    clock bigint   NOT NULL               -- All messages of the lane up to this clock were handed out, or diverted into the inbox's own table.
) PARTITION BY LIST (inbox);

-- A function of PostgreSQL's that hashes may change with its version; this one never does, nor with the encoding of the
-- database. STABLE, as convert_to is: so it is expanded where it is called.
-- D-logs-1: A lane is computed by a function of the schema, from SHA-256.
CREATE FUNCTION lane_of(key text, lanes integer)  -- The lane of a key in a log that has so many.
RETURNS smallint LANGUAGE sql STABLE
RETURN ((get_byte(sha256(convert_to(key, 'UTF8')), 0) * 256 + get_byte(sha256(convert_to(key, 'UTF8')), 1)) % lanes)::smallint;

-- With the rights of the owner, as the days of the archive are made. CREATE and then ATTACH, and not PARTITION OF, which
-- waits for open claims. The caller has the lock of changes of the schema, and the dispatch lock, so no delivery is under
-- way: what was delivered has smaller clocks than the new segment, and what will be has larger ones.
CREATE FUNCTION make_log_segment(of_log text, at timestamptz)  -- Makes a new segment of a log, and returns its number.
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number CONSTANT bigint := (SELECT coalesce(max(segment), 0) + 1 FROM {schema}.log_segment);
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.log_registry WHERE name = of_log) THEN RETURN NULL; END IF;
    EXECUTE format(
        'CREATE TABLE {schema}.log_%s (LIKE {schema}.log INCLUDING DEFAULTS INCLUDING COMMENTS) '
        'WITH (autovacuum_enabled = off)', number);
    EXECUTE format('CREATE UNIQUE INDEX log_%1$s_lane ON {schema}.log_%1$s (lane, clock)', number);
    EXECUTE format(
        'ALTER TABLE {schema}.log_%s ATTACH PARTITION {schema}.log_%2$s FOR VALUES IN (%2$s)', of_log, number);
    INSERT INTO {schema}.log_segment (segment, log, first_clock, opened_at)
    SELECT number, of_log, last_value + 1, at FROM {schema}.clock;
    RETURN number;
END $$;

-- What is unread is counted before, and what was read meanwhile is taken off under this lock.
CREATE FUNCTION lock_log_segment(number bigint)  -- Keeps readers out of a segment that is to be emptied though it is unread.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.log_segment WHERE segment = number AND emptied_at IS NULL) THEN
        RETURN false;
    END IF;
    EXECUTE format('LOCK TABLE {schema}.log_%s', number);
    RETURN true;
END $$;

-- TRUNCATE locks this partition only. The caller has found out whether it may go.
CREATE FUNCTION empty_log_segment(number bigint, at timestamptz)  -- Empties a segment that is over: there is a newer one, and no older one that is not empty.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.log_segment AS s SET emptied_at = at
    WHERE segment = number AND emptied_at IS NULL
      AND EXISTS (SELECT FROM {schema}.log_segment AS n WHERE n.log = s.log AND n.segment > s.segment)
      -- In their order: a log has everything since its oldest message, without a gap that nobody would see.
      AND NOT EXISTS (SELECT FROM {schema}.log_segment AS o
                      WHERE o.log = s.log AND o.segment < s.segment AND o.emptied_at IS NULL);
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('TRUNCATE {schema}.log_%s', number);
    RETURN true;
END $$;

-- DROP locks all of the log for a moment. A claim that chose the segment before it was emptied has ended a minute later.
CREATE FUNCTION drop_log_segment(number bigint, at timestamptz)  -- Drops a segment that was emptied more than a minute ago.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {schema}.log_segment WHERE segment = number AND emptied_at < at - interval '1 minute';
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('DROP TABLE {schema}.log_%s', number);
    RETURN true;
END $$;
REVOKE ALL ON FUNCTION make_log_segment, lock_log_segment, empty_log_segment, drop_log_segment FROM PUBLIC;
