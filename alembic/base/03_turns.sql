-- Who delivers and who executes: decided by locks on tables, which take a right at the node, and told by leases.

-- Nothing is ever in these tables, so nothing vacuums or analyzes them for long. The mode of the lock is the weakest
-- that conflicts with itself: reading the tables, as a dump does, is in nobody's way.
CREATE TABLE dispatch_turn (  -- Has no rows: who locks it may deliver. Takes UPDATE, DELETE or TRUNCATE on it.
);
CREATE TABLE execute_turn (  -- Has no rows: who locks it may execute. Takes UPDATE, DELETE or TRUNCATE on it.
);

CREATE FUNCTION has_older_program(key integer, outbox regclass)  -- Whether a role that may empty the outbox has, or waits for, the lock of programs before 0124.
RETURNS boolean LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
SELECT EXISTS (
    SELECT FROM pg_locks AS l, pg_stat_get_activity(l.pid) AS a, pg_roles AS r
    WHERE l.locktype = 'advisory' AND l.classid = 1835100525::oid AND l.objsubid = 2
      AND l.objid::bigint = key::bigint & 4294967295
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.pid <> pg_backend_pid()
      AND pg_has_role(a.usesysid, r.oid, 'MEMBER') AND has_table_privilege(r.oid, outbox, 'DELETE'))
$$;

-- An advisory lock (1835100525 is `mailroom.locks.DISPATCH`, and the second key `mailroom.locks.key` of the outbox) is
-- tried for as well, and waited for as long as a role with rights at the node has it or is in the queue: whoever else
-- holds it, which every role can, is passed over. Without SET search_path, which costs as much as the rest; so they name
-- the schema of everything.
CREATE FUNCTION take_dispatch_turn()  -- Waits until nobody else delivers; until the transaction ends.
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    key CONSTANT integer := pg_catalog.int4(
        pg_catalog.int8mi(pg_catalog.int8('{schema}.outbox'::pg_catalog.regclass::pg_catalog.oid), 2147483648));
BEGIN
    LOCK TABLE ONLY {schema}.dispatch_turn IN SHARE UPDATE EXCLUSIVE MODE;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(1835100525, key)
       AND {schema}.has_older_program(key, '{schema}.outbox'::pg_catalog.regclass) THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(1835100525, key);
    END IF;
END $$;
CREATE FUNCTION take_execute_turn()  -- Waits until nobody else executes; until the transaction ends.
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    key CONSTANT integer := pg_catalog.int4(
        pg_catalog.int8mi(pg_catalog.int8('{schema}.outbox_executable'::pg_catalog.regclass::pg_catalog.oid), 2147483648));
BEGIN
    LOCK TABLE ONLY {schema}.execute_turn IN SHARE UPDATE EXCLUSIVE MODE;
    IF NOT pg_catalog.pg_try_advisory_xact_lock(1835100525, key)
       AND {schema}.has_older_program(key, '{schema}.outbox_executable'::pg_catalog.regclass) THEN
        PERFORM pg_catalog.pg_advisory_xact_lock(1835100525, key);
    END IF;
END $$;

CREATE TABLE lease (  -- Who leads, by database time. Safety never rests on it.
    role         text        COLLATE "C" PRIMARY KEY,  -- The role: dispatcher or executor.
    holder       uuid        NOT NULL,                 -- The id of the process that holds it.
    epoch        bigint      NOT NULL,                 -- Raised by each takeover.
    until        timestamptz NOT NULL,                 -- When the lease expires unless renewed.
    host         text        NOT NULL,                 -- The holder's host.
    pid          integer     NOT NULL,                 -- The holder's process id.
    backend_pid  integer     NOT NULL,                 -- The session that may hold the awake lock; a new leader terminates it.
    backend_from timestamptz NOT NULL,                 -- When that session began, so that no later session with the same process id is terminated.
    state        text        COLLATE "C" NOT NULL,     -- The holder's state at the last renewal: awake or asleep.
    counts       jsonb       NOT NULL                  -- The holder's totals.
) WITH ({busy});
