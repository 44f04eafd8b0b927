-- Rights: a role reads and writes what is recorded of its own inboxes, through views.

-- A role that may take messages out of an inbox may write what is recorded of them. A view's condition sees the role of the
-- statement, also after SET ROLE; a function with its owner's rights would not. With a bound body: its names mean what
-- they mean here, and its text becomes part of the queries that call it.
-- D-roles-1: Consumers work through views, not functions.
CREATE FUNCTION is_mine(inbox text)  -- Whether the current role may take messages out of this inbox.
RETURNS boolean LANGUAGE sql STABLE
RETURN coalesce(has_table_privilege(to_regclass('{schema}.' || quote_ident('inbox_' || inbox))::oid, 'DELETE'), false);

-- A security barrier: no function of a user's sees a row before the condition has let it through. The check costs half
-- as much as a trigger, for each batch of a worker. It comes after ON CONFLICT has locked the row that is in the way:
-- that one has the same id, which is random, and which nobody else sees.
CREATE VIEW my_worker WITH (security_barrier) AS SELECT * FROM worker WHERE is_mine(inbox) WITH CHECK OPTION;
COMMENT ON VIEW my_worker IS 'The rows of worker about inboxes that the current role may take messages out of.';

-- A security barrier hands no order out of an index, however a query asks for one: so some views have the order of an
-- index, and a query for the first rows reads no more than those.
CREATE VIEW my_key_state WITH (security_barrier) AS SELECT * FROM key_state WHERE is_mine(inbox);
COMMENT ON VIEW my_key_state IS 'The rows of key_state about inboxes that the current role may take messages out of.';
CREATE VIEW my_due WITH (security_barrier) AS SELECT * FROM key_state WHERE is_mine(inbox) ORDER BY inbox, retry_at, key;
COMMENT ON VIEW my_due IS
    'The rows of key_state about inboxes that the current role may take messages out of, in the order of retry_at.';
GRANT SELECT ON my_due TO PUBLIC;  -- it shows nobody more than what is theirs
CREATE VIEW my_attempt WITH (security_barrier) AS
SELECT * FROM attempt WHERE is_mine(inbox) ORDER BY inbox, key, clock, id DESC;
COMMENT ON VIEW my_attempt IS 'The rows of attempt about inboxes that the current role may take messages out of.';
CREATE VIEW my_parked WITH (security_barrier) AS SELECT * FROM parked WHERE is_mine(inbox);
COMMENT ON VIEW my_parked IS 'The rows of parked about inboxes that the current role may take messages out of.';
-- It checks each row of a claim, for half of what a trigger costs; the table has none.
CREATE VIEW my_reaped WITH (security_barrier) AS SELECT * FROM reaped WHERE is_mine(inbox) WITH CHECK OPTION;
COMMENT ON VIEW my_reaped IS 'The rows of reaped about inboxes that the current role may take messages out of.';
CREATE VIEW my_limit WITH (security_barrier) AS SELECT * FROM limits WHERE is_mine(inbox);
COMMENT ON VIEW my_limit IS 'The rows of limits about inboxes that the current role may take messages out of.';
CREATE VIEW my_slot WITH (security_barrier) AS SELECT * FROM slot WHERE is_mine(inbox);
COMMENT ON VIEW my_slot IS 'The rows of slot about inboxes that the current role may take messages out of.';
CREATE VIEW my_breaker WITH (security_barrier) AS SELECT * FROM breaker WHERE is_mine(inbox) WITH CHECK OPTION;
COMMENT ON VIEW my_breaker IS 'The rows of breaker about inboxes that the current role may take messages out of.';
CREATE VIEW my_spark_stream WITH (security_barrier) AS SELECT * FROM spark_stream WHERE is_mine(inbox);
COMMENT ON VIEW my_spark_stream IS
    'The rows of spark_stream about inboxes that the current role may take messages out of.';

-- A role that may DELETE may also lock the table, and to lock a view locks the table below it: a consumer could stop all
-- others. A right to UPDATE some columns does not allow that. So a consumer marks a row as deleted, under the conditions
-- that its DELETE would have, and a trigger deletes marked rows at the end of the statement.
CREATE FUNCTION delete_marked()  -- Deletes a row whose column deleted was set.
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    CASE TG_TABLE_NAME
        WHEN 'worker' THEN DELETE FROM {schema}.worker WHERE id = new.id;
        WHEN 'key_state' THEN DELETE FROM {schema}.key_state WHERE inbox = new.inbox AND key = new.key;
        WHEN 'breaker' THEN DELETE FROM {schema}.breaker WHERE inbox = new.inbox AND prefix = new.prefix;
        WHEN 'spark_stream' THEN DELETE FROM {schema}.spark_stream WHERE inbox = new.inbox AND batch = new.batch;
        WHEN 'spark_staging' THEN DELETE FROM {schema}.spark_staging WHERE token = new.token;
        WHEN 'spark_bulk' THEN DELETE FROM {schema}.spark_bulk WHERE name = new.name AND batch = new.batch;
    END CASE;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION delete_marked FROM PUBLIC;
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON worker FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON key_state FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON breaker FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON spark_stream FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON spark_staging FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();
CREATE TRIGGER deleted AFTER UPDATE OF deleted ON spark_bulk FOR EACH ROW WHEN (new.deleted) EXECUTE FUNCTION delete_marked();

-- What a view checks of a new row it checks after ON CONFLICT has locked the row that is in the way, and a unique index
-- has told that there is one. A trigger comes before. Roles with rights to the whole table, as the dispatcher's, write
-- for any inbox, or for none. Of dead letters a consumer writes those that an inbox has skipped: one of another stage
-- would be sent or executed when it is requeued. Without SET search_path, which costs as much as the rest; so it names
-- the schema of everything.
-- D-roles-2: New rows are checked by a trigger before ON CONFLICT.
CREATE FUNCTION refuse_others()  -- Refuses rows about an inbox that the current role may not take messages out of.
RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE may boolean := {schema}.is_mine(NEW.inbox);
BEGIN
    IF may AND TG_RELID OPERATOR(pg_catalog.=) '{schema}.dead_letter'::pg_catalog.regclass THEN
        may := NEW.stage OPERATOR(pg_catalog.=) 'reap';
    END IF;
    IF may OR pg_catalog.has_table_privilege(TG_RELID, 'DELETE') THEN RETURN NEW; END IF;
    RAISE insufficient_privilege USING
        MESSAGE = pg_catalog.format('role %I may not write into %I for the inbox %L', current_user, TG_TABLE_NAME,
                                    NEW.inbox),
        HINT = 'That takes DELETE on the table of the inbox.';
END $$;
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON key_state FOR EACH ROW EXECUTE FUNCTION refuse_others();
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON attempt FOR EACH ROW EXECUTE FUNCTION refuse_others();
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON parked FOR EACH ROW EXECUTE FUNCTION refuse_others();
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON dead_letter FOR EACH ROW EXECUTE FUNCTION refuse_others();
CREATE TRIGGER refuse_others BEFORE INSERT OR UPDATE OF inbox ON spark_stream FOR EACH ROW EXECUTE FUNCTION refuse_others();
