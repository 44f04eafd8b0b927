-- Sequences that are behind their rows, since these were copied from another database without them, are raised.
--
-- Copied rows bring their `xact` along, which is not the transaction that inserts them. So in both outboxes a
-- row of another transaction is a copy, and a send pays nothing for it. In other tables only replication is looked at.

-- From the catalog, so that no identity is forgotten. What is scheduled keeps the position that the outbox gave it.
-- Leaders own all of it; who may not read a table or a sequence asks for the status, and is told of the others.
CREATE FUNCTION sequences_behind(OUT "table" text, OUT "column" text, OUT sequence regclass, OUT highest bigint)  -- The sequences that are behind the rows that they number, as after a copy of rows alone.

RETURNS SETOF record LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    next bigint; place text[]; found bigint;
BEGIN
    FOR "table", "column", sequence IN
        SELECT t.relname, a.attname, s.oid
        FROM pg_class AS s
        JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = s.oid
            AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
        JOIN pg_class AS t ON t.oid = d.refobjid
        JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
        WHERE s.relnamespace = '{schema}'::regnamespace AND t.relnamespace = s.relnamespace AND s.relkind = 'S'
        ORDER BY 1, 2
    LOOP
        CONTINUE WHEN NOT has_sequence_privilege(sequence, 'SELECT');
        next := coalesce(pg_sequence_last_value(sequence) + 1, 1);
        highest := NULL;
        FOREACH place SLICE 1 IN ARRAY ARRAY[["table", "column"]] || CASE "table"
            WHEN 'outbox' THEN '{{scheduled,position}}'::text[] ELSE '{}' END
        LOOP
            CONTINUE WHEN NOT has_table_privilege(format('{schema}.%I', place[1]), 'SELECT');
            EXECUTE format('SELECT max(%2$I) FROM {schema}.%1$I WHERE %2$I >= $1', place[1], place[2])
            INTO found USING next;
            highest := greatest(highest, found);
        END LOOP;
        IF highest IS NOT NULL THEN RETURN NEXT; END IF;
    END LOOP;
END $$;

-- Two that raise one sequence at once would lower it again, so the second one waits and looks again. With the rights of
-- the caller: those of writers do not reach the sequences, and numbers and `xact` are nothing that they set. It goes
-- past the rows by 1,000,000: what is drawn while a sequence is raised is below that.
CREATE FUNCTION raise_sequence(sequence regclass, number bigint)  -- Raises a sequence past a number that a row has, and returns its value.
RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF number <= pg_sequence_last_value(sequence) THEN RETURN NULL; END IF;
    PERFORM FROM {schema}.node FOR NO KEY UPDATE;
    IF number <= pg_sequence_last_value(sequence) THEN RETURN NULL; END IF;
    RETURN setval(sequence, least(number, 9223372036854775807 - 1000000) + 1000000);
END $$;
CREATE FUNCTION raise_sequences(OUT "table" text, OUT "column" text, OUT value bigint)  -- Raises each sequence that is behind its rows past them, and returns which.

RETURNS SETOF record LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE behind record;
BEGIN
    FOR behind IN SELECT * FROM {schema}.sequences_behind() LOOP
        "table" := behind."table";
        "column" := behind."column";
        value := {schema}.raise_sequence(behind.sequence, behind.highest);
        IF value IS NOT NULL THEN RETURN NEXT; END IF;
    END LOOP;
END $$;

-- The locks of a subtransaction that is rolled back are let go: all inboxes at once may not fit into the lock table.
CREATE FUNCTION clock_of_rows()  -- The largest clock that a row of this node has.
RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    partition regclass;
    found bigint;
    highest bigint := greatest(
        (SELECT max(clock) FROM {schema}.parked), (SELECT max(clock) FROM {schema}.dead_letter),
        (SELECT max(sent_clock) FROM {schema}.transit), 0);
BEGIN
    FOR partition IN SELECT inhrelid FROM pg_inherits WHERE inhparent = '{schema}.inbox'::regclass LOOP
        CONTINUE WHEN pg_relation_size(partition) = 0;
        BEGIN
            EXECUTE format('SELECT max(clock) FROM %s', partition) INTO found;
            RAISE SQLSTATE 'MR000';
        EXCEPTION
            WHEN SQLSTATE 'MR000' THEN highest := greatest(highest, found);
            WHEN undefined_table THEN NULL;  -- removed meanwhile
        END;
    END LOOP;
    RETURN highest;
END $$;

-- Its arguments: the column that the sequence numbers, and the table that the sequence is of.
-- D-deliver-5: A copy is recognised by its transaction.
CREATE FUNCTION raise_copied()  -- Raises the sequence of a table past a row that replication brings.
RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.raise_sequence(
        pg_get_serial_sequence(format('{schema}.%I', tg_argv[1]), tg_argv[0])::regclass,
        (to_jsonb(new) ->> tg_argv[0])::bigint);
    RETURN new;
END $$;

-- They fire where rows are replicated, and nowhere else. The outbox's own trigger fires always.
CREATE TRIGGER copied BEFORE INSERT ON outbox_executable FOR EACH ROW EXECUTE FUNCTION raise_copied('position', 'outbox_executable');
CREATE TRIGGER copied BEFORE INSERT ON scheduled FOR EACH ROW EXECUTE FUNCTION raise_copied('position', 'outbox');
CREATE TRIGGER copied BEFORE INSERT ON dead_letter FOR EACH ROW EXECUTE FUNCTION raise_copied('id', 'dead_letter');
CREATE TRIGGER copied BEFORE INSERT ON attempt FOR EACH ROW EXECUTE FUNCTION raise_copied('id', 'attempt');
CREATE TRIGGER copied BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION raise_copied('id', 'audit');
CREATE TRIGGER copied BEFORE INSERT ON link FOR EACH ROW EXECUTE FUNCTION raise_copied('number', 'link');
CREATE TRIGGER copied BEFORE INSERT ON origin FOR EACH ROW EXECUTE FUNCTION raise_copied('number', 'origin');
ALTER TABLE outbox_executable ENABLE REPLICA TRIGGER copied;
ALTER TABLE scheduled ENABLE REPLICA TRIGGER copied;
ALTER TABLE dead_letter ENABLE REPLICA TRIGGER copied;
ALTER TABLE attempt ENABLE REPLICA TRIGGER copied;
ALTER TABLE audit ENABLE REPLICA TRIGGER copied;
ALTER TABLE link ENABLE REPLICA TRIGGER copied;
ALTER TABLE origin ENABLE REPLICA TRIGGER copied;
