"""Whom to end: not a session that waits for another one, or for a standby, but what it waits for.

A session that waits for a lock is a victim. Ending it frees no other, and the next one takes its place. So a check
names sessions as it finds them, and here each is followed to the one that waits for no other.
"""

from dataclasses import dataclass

from mailroom.doctor.finding import Found
from mailroom.doctor.sessions import DESCRIBED
from mailroom.sql.operation import Operation, Sql

# Who has waited for long, and what is at the end of its way: a session that waits for no lock, or for less long. One
# that waits in COMMIT for a standby has its locks until then, and cannot be ended.
CAUSES = Sql(
    """
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT l.pid, pg_blocking_pids(l.pid) AS pids FROM pg_locks AS l
    WHERE NOT l.granted AND l.waitstart <= clock_timestamp() - %(lock_s)s::float8 * interval '1 s'
    GROUP BY l.pid),
way (pid, by) AS (
    SELECT w.pid, w.pid FROM waiting AS w
    UNION ALL SELECT a.pid, a.pid FROM pg_stat_activity AS a WHERE a.wait_event = 'SyncRep'
    UNION SELECT y.pid, b.pid FROM way AS y JOIN waiting AS w ON w.pid = y.by, pg_catalog.unnest(w.pids) AS b (pid))
SELECT y.pid::text, CASE WHEN y.by > 0 AND a.wait_event IS DISTINCT FROM 'SyncRep' THEN y.by::text ELSE '' END,
       CASE WHEN a.wait_event = 'SyncRep' THEN pg_catalog.format('for a synchronous standby%%s',
                CASE WHEN y.by <> y.pid THEN pg_catalog.format(', as pid %%s does, which blocks it', y.by) END)
            WHEN y.by = 0 THEN 'for a prepared transaction (see pg_prepared_xacts)'
            ELSE 'for ' || coalesce({session}, pg_catalog.format('pid %%s', y.by)) END
FROM way AS y LEFT JOIN pg_stat_activity AS a ON a.pid = y.by
WHERE y.by NOT IN (SELECT w.pid FROM waiting AS w) ORDER BY 1, 2
""",
    columns=("text", "text", "text"),
    session=DESCRIBED,
)


@dataclass(frozen=True, slots=True)
class WaitCause:
    """What a session waits for: `pid` is whom to end, empty if it is not a session; `what` says it in words."""

    pid: str
    what: str


def reading_causes(lock_s: float) -> Operation[dict[str, list[WaitCause]]]:
    """Return by process id what the sessions wait for that have waited for that long."""
    causes: dict[str, list[WaitCause]] = {}
    for pid, by, what in (yield CAUSES.at()(lock_s=lock_s)):
        causes.setdefault(pid, []).append(WaitCause(by, what))
    return causes


END = "SELECT pg_terminate_backend({});"


def caused(found: Found, causes: dict[str, list[WaitCause]], *, as_commands: bool) -> Found:
    """Return what was found with the causes in place of the victims, where a part is process ids of sessions to end.

    As commands it becomes what ends them. A part that is anything else stays as it is.
    """
    named: Found = []
    for part, line in found:
        pids = part.split(", ")
        if not all(pid.isdecimal() for pid in pids):
            named.append((part, line))
            continue
        found_causes = list(dict.fromkeys(cause for pid in pids for cause in causes.get(pid, [])))
        ends = [pid for pid in pids if pid not in causes] + [cause.pid for cause in found_causes if cause.pid]
        waits = "".join(f"; it waits {cause.what}" for cause in found_causes)
        ends = list(dict.fromkeys(ends))
        named.append((" ".join(map(END.format, ends)) if as_commands else ", ".join(ends), line + waits))
    return named
