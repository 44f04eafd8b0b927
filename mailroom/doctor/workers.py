"""Those who reap: batches that do not end, batches of the dead, and inboxes that no worker reaps, or too late."""

from datetime import timedelta

from mailroom.doctor.finding import FOUND, DoctorCheck, Examination, Found, asking
from mailroom.figures.alive import ALIVE, DATABASE, HOLDER, IS_ALIVE
from mailroom.figures.waiting import reading_names, reading_oldest
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql

ENTRY = """pg_catalog.format('inbox %%s, worker %%s pid %%s: %%s messages since %%s, %%s', w.inbox, w.host, w.pid,
    w.messages,
       date_trunc('second'::text, clock_timestamp() - w.claimed_at),
       CASE WHEN l.pid IS NULL THEN 'its transaction has ended'
            ELSE pg_catalog.format('its transaction is open, backend %%s', l.pid) END)"""
OLD = Sql(
    """
WITH {alive}
SELECT l.pid::text, {entry}
FROM {schema}.worker AS w {holder}
WHERE l.pid IS NOT NULL AND w.claimed_at <= clock_timestamp() - %(batch_s)s::float8 * interval '1 s'
  AND (w.process_number IS NULL OR {is_alive})
ORDER BY w.claimed_at
""",
    columns=FOUND,
    alive=ALIVE,
    is_alive=IS_ALIVE,
    holder=HOLDER,
    entry=ENTRY,
    alive_lock=locks.ALIVE,
    database=DATABASE,
)
SILENT = Sql(
    """
WITH {alive}
SELECT CASE WHEN l.pid IS NULL THEN 'mailroom worker run MODULE:WORKER'
            ELSE l.pid::text END, {entry}
FROM {schema}.worker AS w {holder}
WHERE w.process_number IS NOT NULL AND NOT {is_alive}
  AND w.claimed_at <= clock_timestamp() - %(silent_s)s::float8 * interval '1 s'
ORDER BY l.pid IS NULL, w.claimed_at
""",
    columns=FOUND,
    alive=ALIVE,
    is_alive=IS_ALIVE,
    holder=HOLDER,
    entry=ENTRY,
    alive_lock=locks.ALIVE,
    database=DATABASE,
)
# The fullest inboxes, by the statistics, or those that read logs, that are read or not: by a worker, or a stream of
# Spark. One that is emptied into files is emptied whenever the files are wanted, and one that is paused when it is
# resumed: they are neither.
FULLEST = Sql(
    """
WITH {alive},
at_work AS MATERIALIZED (
    SELECT l.objid::bigint AS number FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid IN ({asleep_lock}::oid, {stream_lock}::oid)
      AND l.objsubid = 2 AND l.database = {database})
SELECT r.name FROM {schema}.inbox_registry AS r
JOIN pg_class AS c ON c.relnamespace = '{schema}'::regnamespace AND c.relname = ('inbox_' || r.name)::name
WHERE {kind} AND r.paused_at IS NULL
  AND (EXISTS (SELECT FROM at_work WHERE at_work.number = c.oid::bigint - 2147483648 & 4294967295)
       OR EXISTS (SELECT FROM {schema}.worker AS w
                  WHERE w.inbox = r.name AND (w.process_number IS NULL OR {is_alive}))
       OR EXISTS (SELECT FROM {schema}.spark_stream AS s WHERE s.inbox = r.name)) = {is_read}
  AND NOT EXISTS (SELECT FROM {schema}.spark_drain AS s WHERE s.inbox = r.name)
ORDER BY pg_stat_get_live_tuples(c.oid) DESC, r.name LIMIT {most}
""",
    columns=("text",),
    alive=ALIVE,
    is_alive=IS_ALIVE,
    alive_lock=locks.ALIVE,
    asleep_lock=locks.ASLEEP,
    stream_lock=locks.STREAM,
    database=DATABASE,
)
# The names are in the text twice: so the plan locks their partitions only, and not those of all inboxes.
UNREAD = Sql(
    """
SELECT r.name, pg_catalog.format('inbox %%s: the oldest message was delivered %%s ago, and no worker is there', r.name,
       date_trunc('second'::text, clock_timestamp() - o.delivered_at))
FROM {schema}.inbox_registry AS r CROSS JOIN LATERAL (
    SELECT i.delivered_at FROM {schema}.inbox AS i
    WHERE i.inbox = r.name AND i.inbox IN ('{names}') AND i.clock + 0 > r.floor ORDER BY i.clock + 0 LIMIT 1) AS o
WHERE r.name IN ('{names}') AND o.delivered_at <= clock_timestamp() - %(unread_s)s::float8 * interval '1 s'
ORDER BY o.delivered_at, r.name
""",
    columns=FOUND,
)


def unread(look: Examination) -> Operation[Found]:
    """Return inboxes in which messages wait and that no worker reaps, of the ten fullest and those that read logs."""
    names, unread_s = (yield from _fullest(look.schema, is_read=False)), look.limits.unread_s
    rows = (yield UNREAD.at(schema=look.schema, names="', '".join(names))(unread_s=unread_s)) if names else []
    of_logs = yield from _of_logs(look, unread_s, is_read=False)
    return [(part, line) for part, line in rows if part not in of_logs] + [
        (name, f"inbox {name}: the oldest unread message was delivered {_shown(age_s)} ago, and no worker is there")
        for name, age_s in of_logs.items()
    ]


def late(look: Examination) -> Operation[Found]:
    """Return inboxes whose workers are late, the latest first; failing keys do not count.

    They are looked for among the ten fullest, and those that read logs.
    """
    oldest, names = {}, set((yield from _fullest(look.schema, is_read=True)))
    if names:
        inboxes = [each for each in (yield from reading_names(look.schema)) if each.inbox in names]
        oldest = yield from reading_oldest(look.schema, inboxes, (), None)
    for name, age_s in (yield from _of_logs(look, look.limits.late_s, is_read=True)).items():
        oldest[name] = max(age_s, oldest.get(name, 0.0))
    return [
        (name, f"inbox {name}: the oldest message was delivered {_shown(age_s)} ago")
        for name, age_s in sorted(oldest.items(), key=lambda each: -each[1])
        if age_s >= look.limits.late_s
    ]


HAS_ROWS = "(pg_stat_get_live_tuples(c.oid) > 0 OR c.reltuples > 0::real)"
READS_LOG = "r.log IS NOT NULL"


def _fullest(schema: str, kind: str = HAS_ROWS, most: str = "10", *, is_read: bool) -> Operation[list[str]]:
    names = yield FULLEST.at(schema=schema, kind=kind, most=most, is_read=str(is_read).lower())()
    return [name for (name,) in names]


def _of_logs(look: Examination, least_s: float, *, is_read: bool) -> Operation[dict[str, float]]:
    """Return how long the oldest unread message waits, where that is as long, of inboxes that read logs."""
    names = yield from _fullest(look.schema, READS_LOG, "1000", is_read=is_read)
    readers = (yield from look.readers()) if names else []
    found = [each for each in readers if each.inbox in set(names)]
    return {each.inbox: each.oldest_s for each in found if each.unread and each.oldest_s >= least_s}


def _shown(age_s: float) -> timedelta:
    return timedelta(seconds=round(age_s))


CHECKS = (
    DoctorCheck("M025", asking(OLD), "{first}", of_tables=True, ends=True),
    DoctorCheck("M026", asking(SILENT), "{first}", of_tables=True, ends=True),
    DoctorCheck("M027", unread, "mailroom worker run MODULE:WORKER", of_tables=True),
    DoctorCheck("M053", late, "mailroom top --once --schema {schema}", of_tables=True),
)
