-- The node itself, its clock, and how transactions ended.

-- D-links-11: Every node records its place when it is made.
CREATE TABLE node (  -- This node: one row, not touched in the hot path.
    single        boolean     PRIMARY KEY DEFAULT true CHECK (single),  -- Limits the table to one row.
    id            uuid        NOT NULL DEFAULT gen_random_uuid(),  -- The node's id: the `origin` of its messages.
    name          text        COLLATE "C" NOT NULL DEFAULT current_schema(),  -- The node's name, for people; at first that of its database.
    incarnation   bigint      NOT NULL DEFAULT 1,  -- Raised when history was lost, so that clocks of two histories are distinguishable.
    clock_ceiling bigint      NOT NULL DEFAULT 0,  -- No clock above it is given out. It is raised durably before the clock passes it.
    tokens_swept  uuid,                            -- Commit tokens up to this one may have been deleted.
    wire          smallint    NOT NULL DEFAULT 1,  -- The version of the columns that cross a link.
    system_id     bigint,                          -- The server's system identifier when a dispatcher last started.
    database_oid  bigint,                          -- The database's oid then. With another one, this is a copy of the database.
    timeline      bigint,                          -- The server's timeline then.
    started_at    timestamptz,                     -- When the server had started then. With another time, a crash may have lost something.
    life          uuid        NOT NULL DEFAULT gen_random_uuid(),  -- Made anew whenever history may have been lost: the links that matched before are in doubt.
    resumed       bigint      NOT NULL DEFAULT 1,  -- The incarnation up to which total inboxes go on; a new one keeps them stopped until `link resume`.
    advanced      bigint      NOT NULL DEFAULT 0 CHECK (advanced BETWEEN 0 AND 6917529027641081856)  -- How far an operator has let the clock go (`mailroom node advance`); 0 for never.
);

-- A sequence, not a row: under a held snapshot, a row that every delivery updates leaves a dead version each time.
CREATE SEQUENCE clock AS bigint MINVALUE 0 START 0 CACHE 1 NO CYCLE;
COMMENT ON SEQUENCE clock IS 'The node''s Lamport clock. Only the holder of the dispatch lock moves it.';

-- A node is called as its database is, not as its schema, which is the same in most databases.
INSERT INTO node (name) SELECT CASE WHEN d.name ~ '^[A-Za-z][A-Za-z0-9_.-]{0,62}$' THEN d.name ELSE current_schema() END
FROM current_database() AS d (name);

-- As `mailroom.links.place` reads it. Of a server that hides its control file, only the start's time is known.
DO $$
BEGIN
    UPDATE node SET system_id = c.system_identifier, database_oid = d.oid::bigint,
        timeline = ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
        started_at = pg_postmaster_start_time()
    FROM pg_control_system() AS c, pg_database AS d WHERE d.datname = current_database();
EXCEPTION WHEN insufficient_privilege OR feature_not_supported THEN
    UPDATE node SET system_id = 0, database_oid = d.oid::bigint, timeline = 0, started_at = pg_postmaster_start_time()
    FROM pg_database AS d WHERE d.datname = current_database();
END $$;

-- As in mailroom.clock: where a start of this node would take its clock now, is within what it may be raised to. Other
-- nodes have started, and their clocks are passed on here. With the owner's rights, since writers may not read the
-- clock; it tells one number. It never falls while the server's time does not, so what was taken in once is taken
-- again.
-- D-deliver-6: No send or reader raises a clock by much.
CREATE FUNCTION clock_reach()  -- The largest clock to which one send may raise the node's: 2^32 beyond its own.
RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
RETURN (
    SELECT greatest(c.last_value, least(
        greatest(2305843009213693952, n.advanced),
        4294967296 + least(9223372032559808511, greatest(c.last_value, n.clock_ceiling, least(
            extract(epoch FROM clock_timestamp() - timestamptz '2026-01-01 00:00+00'), 15768000000
            )::bigint * 16777216))))
    FROM clock AS c, node AS n);

-- What pg_dump --schema-only has made has all tables and no node, and sequences begin anew there. So only low positions
-- are looked at, which costs a node nothing after its first messages; and the sequence is set back, so that they stay
-- low. With the owner's rights, since writers may do neither.
CREATE FUNCTION refuse_without_node(sequence regclass)  -- Raises an error if this schema has no node; a writer of its first positions calls it.
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.node) OR row_security_active('{schema}.node') THEN RETURN; END IF;
    IF sequence IN ('{schema}.outbox_position_seq'::regclass, '{schema}.outbox_executable_position_seq'::regclass) THEN
        PERFORM setval(sequence, 1, false);
    END IF;
    RAISE object_not_in_prerequisite_state USING
        MESSAGE = 'schema {schema} has the tables of Mailroom and no node: it was copied without its rows, so no dispatcher would deliver this',
        HINT = 'Restore the rows too. Or make a new node: drop the schema, then run mailroom migrate.';
END $$;

CREATE TABLE commit_token (  -- How transactions ended whose COMMIT may have lost its answer.
    token     uuid    PRIMARY KEY,  -- The transaction's token; it begins with the time, in milliseconds.
    committed boolean NOT NULL      -- False: it was ruled out before it committed, and can commit no more.
);
