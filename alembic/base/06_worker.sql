-- Batches of workers: held until their worker ends them, and on record while their handlers run.

-- The rows of a cursor WITH HOLD are computed at COMMIT, however it is sent; an error then rolls the transaction back.
CREATE FUNCTION refuse_commit()  -- Fails the COMMIT of a batch that its worker has not allowed.
RETURNS void LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'only its worker may end the transaction of a batch' USING
        ERRCODE = 'invalid_transaction_termination',
        HINT = 'Leave COMMIT and ROLLBACK to the worker; for separate work open another connection.';
END $$;

-- The server reports a change of this setting to its client, and undoes it at the end of the transaction. The setting
-- applies to the next transaction of the session, so it has no effect on this one, and is restored before the next.
CREATE FUNCTION hold_batch()  -- Makes COMMIT fail until the cursor mailroom_batch is closed; reports the end of the transaction.
RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('default_transaction_read_only',
                       (NOT current_setting('default_transaction_read_only')::boolean)::text, true);
    EXECUTE 'DECLARE mailroom_batch NO SCROLL CURSOR WITH HOLD FOR SELECT {schema}.refuse_commit()';
    RETURN true;
END $$;

CREATE TABLE worker (  -- In-flight entries: each loop of a worker has one. If its messages are not locked, the loop died.
    id             uuid        PRIMARY KEY,           -- The loop.
    inbox          text        COLLATE "C" NOT NULL,  -- Its inbox.
    host           text        NOT NULL,              -- The worker's host.
    pid            integer     NOT NULL,              -- The worker's process id.
    claimed_at     timestamptz NOT NULL,              -- When the batch was claimed.
    messages       integer     NOT NULL,              -- Messages of the batch.
    keys           text[]      COLLATE "C" NOT NULL,  -- Keys of the batch.
    clocks         bigint[]    NOT NULL,              -- The last clock of each key in the batch.
    process_number integer,                           -- The number of the worker process, which holds the lock of it while it is alive; null if it has none.
    deleted        boolean     NOT NULL DEFAULT false,  -- Set to have the row deleted (delete_marked).
    xact           bigint                             -- The full id of the batch's transaction; null if unknown, or lost while its worker lives.
) WITH ({busy});

-- An entry stays when its process died. An abort is on record before the locks of its rows go, so the next holder of
-- these locks sees it here. What a node brought along from elsewhere may name transactions that its server has not had
-- yet, or has forgotten: they have ended.
-- D-workers-9: A dead worker's keys are passed over until its death is counted.
CREATE FUNCTION orphaned_keys(of_inbox text, but uuid[])  -- The keys of batches that have ended and are not accounted for.
RETURNS SETOF text LANGUAGE plpgsql VOLATILE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT pg_catalog.unnest(w.keys) FROM {schema}.my_worker AS w
    WHERE w.inbox = of_inbox AND w.id <> ALL (but)
      AND CASE WHEN w.xact IS NULL THEN false
               WHEN w.xact >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN true
               ELSE coalesce(pg_xact_status(w.xact::text::xid8), 'aborted') = 'aborted' END;
END $$;
