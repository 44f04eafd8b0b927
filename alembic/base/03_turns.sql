-- Who delivers and who executes: decided by locks on tables, which take a right at the node, and told by leases.

-- Nothing is ever in these tables, so nothing vacuums or analyzes them for long. The mode of the lock is the weakest
-- that conflicts with itself: reading the tables, as a dump does, is in nobody's way.
CREATE TABLE dispatch_turn (  -- Has no rows: the session that locks it may deliver. Takes UPDATE, DELETE or TRUNCATE on it.
);
CREATE TABLE execute_turn (  -- Has no rows: the session that locks it may execute. Takes UPDATE, DELETE or TRUNCATE on it.
);

-- Without SET search_path, which costs as much as the rest; so they name the schema of everything.
CREATE FUNCTION take_dispatch_turn()  -- Waits until no other session delivers; until the transaction ends.
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    LOCK TABLE ONLY {schema}.dispatch_turn IN SHARE UPDATE EXCLUSIVE MODE;
END $$;
CREATE FUNCTION take_execute_turn()  -- Waits until no other session executes; until the transaction ends.
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    LOCK TABLE ONLY {schema}.execute_turn IN SHARE UPDATE EXCLUSIVE MODE;
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
    counts       jsonb       NOT NULL,                 -- The holder's totals.
    set_back_at  timestamptz,                          -- When it was noticed last that the server's clock had been set back; NULL if never.
    set_back_by  interval,                             -- By how much, at least.
    brought_back bigint      NOT NULL DEFAULT 0        -- How many keys would have waited for as long, and were brought back.
) WITH ({busy});
