-- Links, at the source: who reads this node, what they may ask for, and what waits for them.

-- An identity never gives out a number twice, so a link that was removed and allowed again is another link. A name is
-- also part of MAILROOM_DSN_<NAME>, and of what people type.
CREATE TABLE link (  -- Who reads messages of this node: a row per reader.
    number              bigint           GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,  -- The link's number; never used again.
    name                text             COLLATE "C" NOT NULL UNIQUE CHECK (name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$'),  -- The reader's name.
    reader_id           uuid             UNIQUE,  -- The reader's node id, from its first hello on.
    reader_system_id    bigint,                   -- The system identifier of the reader's server.
    reader_database_oid bigint,                   -- The oid of the reader's database.
    reader_origin       bigint,                   -- The number that the reader gives this node. With a higher one it has forgotten the old.
    run                 uuid,                     -- Which daemon of the reader has the link: the one that said hello last.
    acked               bigint           NOT NULL DEFAULT 0,  -- Up to this seq the reader has received everything durably.
    matched             uuid,                     -- The life of this node in which the reader last found its own position here.
    wanted_clock        bigint           NOT NULL DEFAULT 0 CHECK (wanted_clock >= 0),  -- The reader wants a mark with at least this clock.
    claim_seq           bigint,                   -- What a reader that has diverged has received of this node: the last seq.
    claim_clock         bigint,                   -- The largest sent_clock of it.
    seen_at             timestamptz,              -- When the reader was last here.
    keep_s              double precision NOT NULL DEFAULT 172800 CHECK (keep_s >= 0),  -- How many seconds rows of transit are kept after they were acknowledged.
    max_rows            bigint           CHECK (max_rows > 0),  -- With more rows than that waiting in transit the link is cut; null for no limit.
    state               text             COLLATE "C" NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'cut')),  -- The state: open, or cut, when nothing is stamped for it any more.
    created_at          timestamptz      NOT NULL DEFAULT now(),  -- When it was allowed.
    acks                bigint[]         NOT NULL DEFAULT '{}',  -- Some of what acked has been, ascending: rows below one of them stay for keep_s after its acked_at.
    acked_at            timestamptz[]    NOT NULL DEFAULT '{}',  -- For each of acks, a time by which the reader had acknowledged it.
    by_role             text                      -- The login that said hello last.
) WITH ({busy});

-- `commands`: of a topic that several readers are allowed by name, one has the commands.
CREATE TABLE link_allowed (  -- What a reader may ask for; without rows all messages and events.
    link     bigint  NOT NULL,  -- The link.
    topic    text    COLLATE "C" NOT NULL  -- The topic, or a pattern of topics, as in subscription.
        CONSTRAINT link_allowed_topic CHECK ({is_topic_or_pattern}),
    commands boolean NOT NULL DEFAULT false CHECK (NOT commands OR fits IS NULL),  -- Whether commands and replies of it go to this reader, if to no inbox here.
    {fits_and_words},
    PRIMARY KEY (link, topic)
);
-- D-links-17: No reader changes who gets a command.
CREATE UNIQUE INDEX link_allowed_commands ON link_allowed (topic) WHERE commands;

CREATE TABLE link_topic (  -- What each reader wants, written by the reader from its subscriptions.
    topic    text    COLLATE "C" NOT NULL  -- The topic, or a pattern of topics, as in subscription.
        CONSTRAINT link_topic_topic CHECK ({is_topic_or_pattern}),
    link     bigint  NOT NULL,                -- The link.
    {fits_and_words},
    commands boolean NOT NULL DEFAULT false,  -- Whether the reader gets commands and replies of it, too, if no inbox here does.
    PRIMARY KEY (topic, link)
);
CREATE INDEX link_topic_link ON link_topic (link);
CREATE INDEX link_topic_pattern ON link_topic (fits, words, link) WHERE fits IS NOT NULL;

-- A pattern is allowed by one that fits all that it fits: as in `mailroom.routing`, with the pattern for a topic. A #
-- at the end may be any number of words, so a pattern with * fits not all of it.
CREATE FUNCTION link_allows(of_link bigint, of_topic text)  -- Whether a link that asks for this gets commands, too; null for nothing.
RETURNS boolean LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
RETURN (
    SELECT CASE WHEN count(*) = 0 THEN false
                WHEN bool_or(a.topic = of_topic OR of_topic || '.' LIKE a.fits AND (
                    a.words IS NULL OR a.words = cardinality(string_to_array(of_topic, '.')) AND of_topic !~ '#'))
                THEN bool_or(a.topic = of_topic AND a.commands) END
    FROM link_allowed AS a WHERE a.link = of_link);

-- With its owner's rights: readers need none on what other readers are allowed. Without limits all is allowed, so
-- limits that row security hides from the owner are an error. What is not allowed is passed over and not refused, so
-- that the reader gets the rest, and sees what is missing.
-- D-links-16: What a reader may ask for is the source's word.
CREATE FUNCTION link_topic_asked()  -- Passes over what the link is not allowed, and sets commands.
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    new.commands := {schema}.link_allows(new.link, new.topic);
    RETURN CASE WHEN new.commands IS NOT NULL THEN new END;
END $$;
REVOKE ALL ON FUNCTION link_topic_asked FROM PUBLIC;
CREATE TRIGGER zz_asked BEFORE INSERT ON link_topic FOR EACH ROW EXECUTE FUNCTION link_topic_asked();

-- No foreign keys to `link`: they would lock a row of it for each message.
CREATE TABLE transit (  -- Messages stamped for other nodes, until these have received them. The newest row of a link stays.
    link         bigint      NOT NULL,  -- The link.
    seq          bigint      NOT NULL,  -- The number within the link, from 1 without gaps, in clock order.
    sent_clock   bigint      NOT NULL,  -- Lamport clock of the send event on this node.
    stamped_at   timestamptz NOT NULL,  -- When it was stamped. With message_id it tells apart two histories that have the same seq.
    {message},
    PRIMARY KEY (link, seq)
) WITH ({hot});
COMMENT ON COLUMN transit.kind IS
    'M message, E event, C command, R reply; H a mark, which is not a message and only shows a clock.';
COMMENT ON COLUMN transit.expires_at IS 'If not received before this time, the message is dropped.';

-- A policy may hide rows of transit from a reader's role, which would look as if nothing had been sent, or as if the
-- source had lost it. So the reader holds what it sees against what there is, in one snapshot; row security that binds
-- the owner too is an error. With a bound body: its names mean what they mean here, whatever search_path and names come
-- later.
CREATE FUNCTION link_next(of_link bigint, behind bigint)  -- The next seq of a link, whatever policies hide; for the roles of readers.
RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off
RETURN (SELECT t.seq FROM transit AS t WHERE t.link = of_link AND t.seq > behind ORDER BY t.seq LIMIT 1);
REVOKE ALL ON FUNCTION link_next FROM PUBLIC;

-- A reader that was put back acknowledges anew what it reads again, and it counts from then.
CREATE FUNCTION acknowledged_less()  -- Forgets when a reader had acknowledged what it has lost.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE left_over CONSTANT integer := (SELECT count(*) FROM unnest(new.acks) AS seq WHERE seq <= new.acked);
BEGIN
    new.acks := new.acks[1:left_over];
    new.acked_at := new.acked_at[1:left_over];
    RETURN new;
END $$;
CREATE TRIGGER acknowledged_less BEFORE UPDATE OF acked ON link FOR EACH ROW WHEN (new.acked < old.acked) EXECUTE FUNCTION acknowledged_less();

-- The daemon that wrote its run into a link has the link. The functions below run as the owner, and ask for the same login.
CREATE FUNCTION greeted()  -- Notes which login has said hello.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    new.by_role := session_user;
    RETURN new;
END $$;
CREATE TRIGGER greeted BEFORE INSERT OR UPDATE OF run ON link FOR EACH ROW WHEN (new.run IS NOT NULL) EXECUTE FUNCTION greeted();

-- A reader that wants a clock further ahead asks again when it has seen this one, and so gets there in steps. What it
-- has received cannot be shortened so: the clock goes beyond all of it, or nothing is claimed.
CREATE FUNCTION bound_reader()  -- Bounds by how much a reader may raise the clock.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE reach CONSTANT bigint := {schema}.clock_reach();
BEGIN
    IF new.claim_clock > reach THEN
        RAISE check_violation USING
            MESSAGE = format('claim_clock %s is more than 2^32 beyond the clock of this node', new.claim_clock),
            HINT = 'If this node has lost such clocks, let it go on after them: mailroom node advance CLOCK',
            SCHEMA = tg_table_schema, TABLE = tg_table_name, COLUMN = 'claim_clock', CONSTRAINT = 'link_claim_clock';
    END IF;
    new.wanted_clock := least(new.wanted_clock, reach);
    RETURN new;
END $$;
CREATE TRIGGER bounded BEFORE INSERT OR UPDATE OF wanted_clock, claim_clock ON link FOR EACH ROW
WHEN (new.wanted_clock > 4294967296 OR new.claim_clock > 4294967296) EXECUTE FUNCTION bound_reader();

-- Readers write by functions alone. Rights on the tables would be on the rows of every link, and a right to DELETE is one
-- to lock a table that each delivery reads. A link is the login's that said hello for it first, until `link moved`.
CREATE FUNCTION link_hold(of_name text)  -- Locks a link for the rest of the transaction; false if it is another login's, null if there is none.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    PERFORM FROM {schema}.link WHERE name = of_name AND coalesce(by_role = session_user, true) FOR NO KEY UPDATE;
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM {schema}.link WHERE name = of_name);
END $$;
-- The id of another reader stays, which bars a bridge's link too.
CREATE FUNCTION link_hello(of_link bigint, id uuid, system_id bigint, database_oid bigint, origin bigint, by_run uuid)  -- A reader says who it is, and has the link from then on; false if it is another's.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    UPDATE {schema}.link AS l SET reader_id = id, reader_system_id = system_id, reader_database_oid = database_oid,
        reader_origin = origin, run = by_run, seen_at = clock_timestamp()
    WHERE l.number = of_link AND coalesce(l.by_role = session_user, true) AND coalesce(l.reader_id = id, true);
    RETURN FOUND;
END $$;
CREATE FUNCTION link_ask(of_link bigint, by_run uuid, topics text[])  -- A reader asks for these topics, and no others; false if another daemon or login has the link.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    PERFORM FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN false; END IF;
    DELETE FROM {schema}.link_topic WHERE link = of_link AND topic <> ALL (topics);
    INSERT INTO {schema}.link_topic (topic, link) SELECT t.topic, of_link FROM unnest(topics) AS t (topic)
    ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
-- It may fall: a target that was put back in time is where its receipts are. Nothing is written if it is there already.
CREATE FUNCTION link_acknowledge(of_link bigint, by_run uuid, seq bigint)  -- A reader has everything up to this seq durably; false if another daemon or login has the link.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    UPDATE {schema}.link AS l SET acked = seq, seen_at = clock_timestamp()
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user AND l.acked <> seq;
    RETURN FOUND OR EXISTS (
        SELECT FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;
REVOKE ALL ON FUNCTION link_hold, link_hello, link_ask, link_acknowledge FROM PUBLIC;

-- Each returns whether it changed anything, and null if another daemon or login has the link.
-- D-roles-3: A reader's acts on its source's clock and history are functions.
CREATE FUNCTION link_want(of_link bigint, by_run uuid, clock bigint)  -- A reader asks for a mark with a clock, or as far as it may.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.link AS l SET wanted_clock = clock
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND l.wanted_clock < least(clock, {schema}.clock_reach());
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;
CREATE FUNCTION link_claim(of_link bigint, by_run uuid, seq bigint, clock bigint)  -- A reader says what it has received that is not here.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.link AS l SET claim_seq = seq, claim_clock = clock
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND (l.claim_seq, l.claim_clock) IS DISTINCT FROM (seq, clock);
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;
CREATE FUNCTION link_match(of_link bigint, by_run uuid)  -- A reader has found its position here.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.link AS l SET matched = n.life, claim_seq = NULL, claim_clock = NULL FROM {schema}.node AS n
    WHERE l.number = of_link AND l.run = by_run AND l.by_role = session_user
      AND (l.matched IS DISTINCT FROM n.life OR l.claim_seq IS NOT NULL);
    IF FOUND THEN RETURN true; END IF;
    RETURN (SELECT false FROM {schema}.link WHERE number = of_link AND run = by_run AND by_role = session_user);
END $$;
REVOKE ALL ON FUNCTION link_want, link_claim, link_match FROM PUBLIC;
