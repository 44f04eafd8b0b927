"""Locks: who waits for one on our tables, who has it, and who has one that keeps writers out."""

from mailroom.doctor.finding import FOUND, DoctorCheck, Examination, Found, asking
from mailroom.doctor.sessions import DESCRIBED, TERMINATE
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.waits import reading_waits


def waiting(look: Examination) -> Operation[Found]:
    """Return who waits, with the process ids of those that have the lock."""
    found: Found = []
    for wait in (yield from reading_waits(at_least_s=look.limits.lock_s, schema=look.schema)):
        pids = ", ".join(str(each.pid) for each in wait.blockers if each.pid)
        found.append((pids, f"{wait}, for {wait.seconds:.0f} s"))
    return found


# The modes that conflict with writers. VACUUM has one for a moment, in a transaction that may be old.
STRONG = Sql(
    """
WITH strong AS MATERIALIZED (
    SELECT l.pid, l.virtualtransaction, string_agg(DISTINCT l.mode, ', '::text) AS modes, count(*) AS relations,
           min(c.relname::text) AS relation
    FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
    WHERE l.locktype = 'relation' AND l.granted AND c.relnamespace = '{schema}'::regnamespace
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
      AND l.pid IS DISTINCT FROM pg_backend_pid()
    GROUP BY l.pid, l.virtualtransaction)
SELECT coalesce(s.pid::text, ''), pg_catalog.format('%%s on %%s%%s, held by %%s', s.modes, s.relation,
       CASE WHEN s.relations > 1 THEN pg_catalog.format(' and %%s more', s.relations - 1) END,
       CASE WHEN s.pid IS NULL THEN 'a prepared transaction (see pg_prepared_xacts)' ELSE {session} END)
FROM strong AS s LEFT JOIN pg_stat_activity AS a ON a.pid = s.pid
WHERE a.backend_type IS DISTINCT FROM 'autovacuum worker'
  AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v WHERE v.pid = s.pid)
  AND coalesce(a.xact_start, (
      SELECT min(p.prepared) FROM pg_locks AS t JOIN pg_prepared_xacts AS p ON p.transaction = t.transactionid
      WHERE s.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid'
        AND t.virtualtransaction = s.virtualtransaction)
      ) <= clock_timestamp() - %(lock_s)s::float8 * interval '1 s'
""",
    columns=FOUND,
    session=DESCRIBED,
)

CHECKS = (
    DoctorCheck("M005", waiting, TERMINATE, ends=True),
    DoctorCheck("M006", asking(STRONG), TERMINATE, ends=True),
)
