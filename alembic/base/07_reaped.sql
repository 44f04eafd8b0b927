-- The archive: what was reaped, or discarded by hand, of the inboxes that keep it. `mailroom.registry.archive_days` makes the partitions.

-- By the day on which a message is dropped, and not by inbox or the day of its reaping: so all inboxes share the
-- partitions, whatever they keep, and what is over is a whole partition. Without a default partition: with one, a new
-- partition could not be attached beside open batches.
-- D-reap-16: The archive's partitions are by the day of the drop.
CREATE TABLE reaped (  -- Messages that were reaped or discarded, of inboxes that keep them; a partition per day.
    LIKE inbox INCLUDING DEFAULTS INCLUDING COMMENTS,
    reaped_at timestamptz NOT NULL DEFAULT statement_timestamp(),  -- When it was taken, in the transaction that reaped it.
    drop_on   date        NOT NULL,                                -- The day, in UTC, at whose end it may be gone.
    discarded boolean     NOT NULL DEFAULT false                   -- Whether an operator discarded it: then nobody was handed it.
) PARTITION BY RANGE (drop_on);
CREATE INDEX reaped_id ON reaped (message_id);
CREATE INDEX reaped_cause ON reaped (((headers ->> 'causation'::text) COLLATE "C"));
CREATE INDEX reaped_when ON reaped (inbox, reaped_at, clock);

-- A claim takes the last of these days that is not later than the one it wants: so it never fails for lack of a partition,
-- however long no daemon has made any.
CREATE TABLE reaped_day (  -- The partitions of `reaped`.
    day        date        PRIMARY KEY,  -- The partition is reaped_<YYYYMMDD>.
    emptied_at timestamptz               -- When the janitor emptied it, since its day was over; null before.
);

-- With the rights of the owner, since a dispatcher's role is not: a partition is its owner's. CREATE and then ATTACH, and
-- not PARTITION OF, which waits for open batches. Rows are inserted and then truncated, so VACUUM has nothing to do. All
-- days from tomorrow on, since each inbox keeps for a number of days of its own, and two weeks more, in which no daemon
-- need run. The table itself is looked for, since replication brings the row of a day alone. The caller has the lock of
-- changes of the schema, and no claim waits for any of this.
CREATE FUNCTION make_reaped_days(at timestamptz)  -- Makes the partitions of reaped that are missing ahead of a time, and returns how many.
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today CONSTANT date := (at AT TIME ZONE 'UTC')::date;
    missing date;
    made bigint := 0;
BEGIN
    FOR missing IN
        SELECT today + n FROM generate_series(1, (SELECT max(keep_reaped_days) + 15 FROM {schema}.inbox_registry)) AS n
        WHERE to_regclass(format('{schema}.reaped_%s', to_char(today + n, 'YYYYMMDD'))) IS NULL ORDER BY n
    LOOP
        EXECUTE format(
            'CREATE TABLE {schema}.reaped_%s (LIKE {schema}.reaped INCLUDING DEFAULTS INCLUDING COMMENTS) '
            'WITH (autovacuum_vacuum_insert_threshold = -1)', to_char(missing, 'YYYYMMDD'));
        EXECUTE format(
            'ALTER TABLE {schema}.reaped ATTACH PARTITION {schema}.reaped_%s FOR VALUES FROM (%L) TO (%L)',
            to_char(missing, 'YYYYMMDD'), missing, missing + 1);
        INSERT INTO {schema}.reaped_day (day) VALUES (missing) ON CONFLICT DO NOTHING;
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

-- TRUNCATE locks this partition only, into which nobody inserts any more; from then on no claim chooses it.
CREATE FUNCTION empty_reaped_day(over date, at timestamptz)  -- Empties the partition of a day that is over.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.reaped_day SET emptied_at = at
    WHERE day = over AND day < (at AT TIME ZONE 'UTC')::date AND emptied_at IS NULL;
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('TRUNCATE {schema}.reaped_%s', to_char(over, 'YYYYMMDD'));
    RETURN true;
END $$;

-- DROP locks all of `reaped` for a moment. A claim that chose the day before it was emptied has ended a minute later.
CREATE FUNCTION drop_reaped_day(over date, at timestamptz)  -- Drops the partition of a day that was emptied more than a minute ago.
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {schema}.reaped_day WHERE day = over AND emptied_at < at - interval '1 minute';
    IF NOT FOUND THEN RETURN false; END IF;
    EXECUTE format('DROP TABLE {schema}.reaped_%s', to_char(over, 'YYYYMMDD'));
    RETURN true;
END $$;
REVOKE ALL ON FUNCTION make_reaped_days, empty_reaped_day, drop_reaped_day FROM PUBLIC;
