"""Waits: which sessions of Mailroom wait for a lock, for which, and who has it.

Every session that Mailroom opens has an application name that begins with `mailroom `; so one session can tell of all
others, also of other owners. Who blocks is the server's own answer (`pg_blocking_pids`). What a role may not see of a
session of another one, such as since when its transaction is open, is left out.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import APPLICATION

LONG_S = 2.0  # a wait that is worth telling
GONE_S = 5.0  # a wait that was not seen for that long has ended; shorter gaps are those between two tries

# What is locked: in words, since names of lock types say little. `pg_locks` names no relation for a transaction.
LOCKED = """pg_catalog.concat(w.mode, ' on ', CASE w.locktype
    WHEN 'relation' THEN w.relation::pg_catalog.regclass::text
    WHEN 'tuple' THEN pg_catalog.concat('a row of ', w.relation::pg_catalog.regclass)
    WHEN 'transactionid' THEN pg_catalog.concat('what transaction ', w.transactionid, ' has changed')
    ELSE pg_catalog.concat('a lock of type ', w.locktype) END)"""
WAITS = Sql(
    """
WITH held AS MATERIALIZED (SELECT * FROM pg_catalog.pg_locks),
waiting AS MATERIALIZED (
    SELECT w.*, a.application_name FROM held AS w JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid
    WHERE NOT w.granted AND a.datname = pg_catalog.current_database()
      AND (a.application_name ^@ %(application)s::text OR w.relation IN (
          SELECT c.oid FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          WHERE n.nspname = %(schema)s::text::name)))
SELECT w.pid::bigint, w.application_name, {locked},
       coalesce(extract(epoch FROM pg_catalog.clock_timestamp() - w.waitstart), 0)::float8,
       b.pid::bigint, coalesce(s.application_name, ''), coalesce(s.usename::text, ''), coalesce(s.state, ''),
       extract(epoch FROM pg_catalog.clock_timestamp() - s.xact_start)::float8, coalesce((
           SELECT pg_catalog.string_agg(DISTINCT h.mode, ', ') FROM held AS h
           WHERE h.granted AND h.pid = b.pid AND h.locktype = w.locktype
             AND h.relation IS NOT DISTINCT FROM w.relation
             AND h.transactionid::text IS NOT DISTINCT FROM w.transactionid::text), '')
FROM waiting AS w CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) AS b (pid)
     LEFT JOIN pg_catalog.pg_stat_activity AS s ON s.pid = b.pid
ORDER BY 4 DESC, 1, 5
""",
    columns=("bigint", "text", "text", "float8", "bigint", "text", "text", "text", "float8", "text"),
    locked=LOCKED,
)


@dataclass(frozen=True, slots=True)
class Blocker:
    """A session in the way: its process id at the server, application name and role.

    `state` is what PostgreSQL says it does, such as "idle in transaction", and `since_s` how many seconds ago its
    transaction began; empty and None if this role may not see it. `holds` are the modes of the locks that it has on
    what is waited for; empty if it waits itself, further ahead. A prepared transaction has process id 0.
    """

    pid: int
    application: str
    role: str
    state: str
    since_s: float | None
    holds: str

    def __str__(self) -> str:
        if not self.pid:
            return "a prepared transaction (see pg_prepared_xacts)"
        since = "" if self.since_s is None else f" for {self.since_s:.0f} s"
        doing = f", {self.state or 'in a transaction'}{since}" if self.state or since else ""
        what = f", has {self.holds}" if self.holds else ", waits ahead"
        return f"pid {self.pid} ({self.application or 'no application name'}, role {self.role}{doing}{what})"


@dataclass(frozen=True, slots=True)
class Wait:
    """A session of Mailroom that waits for a lock: `what`, for `seconds` until now, since `blockers` have it."""

    pid: int
    application: str
    what: str
    seconds: float
    blockers: tuple[Blocker, ...]

    def __str__(self) -> str:
        by = "; ".join(map(str, self.blockers))
        return f"{self.application} (pid {self.pid}) waits for {self.what}, blocked by {by}"


def reading_waits(
    application: str = APPLICATION, at_least_s: float = 0.0, schema: str | None = None
) -> Operation[list[Wait]]:
    """Return the waits of the database's sessions whose application name begins so, the longest first.

    With `schema` also those of any session for a lock on something in it.
    """
    found: dict[int, Wait] = {}
    for pid, name, what, seconds, *blocker in (yield WAITS.at()(application=application, schema=schema)):
        before = found.get(pid)
        blockers = (*(before.blockers if before else ()), Blocker(*blocker))
        found[pid] = Wait(pid, name, what, seconds, blockers)
    return [wait for wait in found.values() if wait.seconds >= at_least_s]


class NotedWait:
    """Which waits were seen, so that each is told once: when it lasts for `LONG_S`.

    A session that gives up and tries again waits on: its waits for the same blockers count as one. `monotonic` is the
    clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[tuple[str, frozenset[int]], tuple[float, float, bool]] = {}

    def long(self, waits: Iterable[Wait]) -> list[Wait]:
        """Note the waits of now; return those that have become long since the last call."""
        now, told = self._monotonic(), []
        self._seen = {key: seen for key, seen in self._seen.items() if now - seen[1] < GONE_S}
        for wait in waits:
            key = (wait.application, frozenset(blocker.pid for blocker in wait.blockers))
            first, _, is_told = self._seen.get(key, (now - wait.seconds, now, False))
            is_long = now - first >= LONG_S
            if is_long and not is_told:
                told.append(wait)
            self._seen[key] = (first, now, is_told or is_long)
        return told
