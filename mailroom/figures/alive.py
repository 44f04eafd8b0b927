"""Which workers are alive: parts of larger statements that ask for it."""

DATABASE = "(SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())"
# Each worker process holds an advisory lock on its number as long as it is alive. Looked up, and never taken here: who
# takes it would count as alive.
ALIVE = """alive AS MATERIALIZED (
    SELECT l.objid::bigint AS number, l.pid FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid = {alive_lock}::oid AND l.objsubid = 2
      AND l.database = {database})"""
IS_ALIVE = "EXISTS (SELECT FROM alive WHERE alive.number = w.process_number::bigint & 4294967295)"
# The session that has the batch's transaction; the entry knows the lower half of its id.
HOLDER = """LEFT JOIN pg_locks AS l ON l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
     AND l.pid IS NOT NULL AND l.transactionid::text::bigint = w.xact & 4294967295"""
