"""Which worker processes are alive: each holds an advisory lock on a number of its own, which its entries contain.

The lock belongs to the session that checks for dead workers every second, in a thread of its own, so no handler can
block it. A paused process sends nothing, and the server ends its idle session. A live process that lost its session
opens another one at the next check and takes the lock again; so a process without its lock is not considered dead at
once.
"""

import logging
import secrets
import time
from collections.abc import Callable

import psycopg
from psycopg.errors import InsufficientPrivilege

from mailroom.session.acting import CURRENT, LOGIN, if_acting
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Row, Sql
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run

log = logging.getLogger("mailroom.worker")

WATCH_SESSION = {"idle_session_timeout": "30s"}
# A process is dead if it was silent (did not hold its lock) at every check for that long, by the clock of the process
# that checks: enough for two checks to open another session, and one more.
DEAD_S = 3.0
# A process whose connections are still there is paused, not dead, and may continue at any moment: late is better than
# wrong. This comes on top of the idle timeout of its session.
PAUSED_S = 30.0

TAKE_LOCK = Sql(
    "SELECT pg_try_advisory_lock({alive_lock}, %(number)s::integer)",
    columns=("boolean",),
    alive_lock=locks.ALIVE,
)
# A shared lock, so that two processes that check do not take each other's lock for a live process. It is held until the
# end of the transaction, so that a process found dead cannot take its lock again meanwhile.
# D-workers-11: A worker is alive while it holds the lock of its number.
UNLOCKED = Sql(
    """
WITH numbers AS MATERIALIZED (
    SELECT DISTINCT process_number FROM {schema}.my_worker
    WHERE inbox = '{inbox}' AND process_number IS DISTINCT FROM %(mine)s::integer)
SELECT process_number FROM numbers
WHERE process_number IS NULL OR pg_try_advisory_xact_lock_shared({alive_lock}, process_number)
""",
    columns=("integer",),
    alive_lock=locks.ALIVE,
)
# It is found by the transaction that held the messages when the entry was written: others may have claimed them since.
# And only if that holds the first of them now, which is read from the message: an entry may name any transaction.
HOLDS = (
    "l.transactionid::text::bigint = w.xact & 4294967295 "
    "AND l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid IS NOT NULL"
)
OPEN_BATCHES = Sql(
    """
SELECT DISTINCT w.process_number, w.host, w.pid::bigint, l.pid::bigint
FROM {schema}.my_worker AS w
JOIN {schema}.inbox_{inbox} AS i
  ON i.key = w.keys[1] AND i.clock = w.clocks[1] AND i.xmax::text::bigint = w.xact & 4294967295
JOIN pg_locks AS l ON {holds}
WHERE w.inbox = '{inbox}' AND w.process_number = ANY (%(numbers)s::integer[])
""",
    columns=("integer", "text", "bigint", "bigint"),
    holds=HOLDS,
)
PID = if_acting("%(pid)s::integer")
TERMINATE, TERMINATE_AS_CURRENT = (
    Sql("SELECT pg_terminate_backend({pid}) FROM {acting}", ("boolean",), acting=acting, pid=PID)
    for acting in (LOGIN, CURRENT)
)


class Processes:
    """The numbers of processes in the in-flight entries of an inbox, and this process's own."""

    def __init__(self, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._names = {"schema": schema, "inbox": inbox}
        self._monotonic = monotonic
        self.number = secrets.randbelow(2**32) - 2**31
        self._session: psycopg.Connection | None = None
        self._silent: dict[int, float] = {}
        self._checked_at = monotonic()
        self._untouchable: set[int] = set()

    @property
    def mine(self) -> int | None:
        """This process's number, for its entries; None while it does not hold its lock."""
        return self.number if self._session is not None and not self._session.closed else None

    @property
    def undecided(self) -> bool:
        """Whether some process is silent but not considered dead yet."""
        return any(not self._is_over(number, DEAD_S) for number in self._silent)

    @property
    def silent(self) -> list[int]:
        """The numbers whose lock was not held when last checked."""
        return list(self._silent)

    def hold_lock(self, connection: psycopg.Connection) -> None:
        """Take this process's lock if `connection` is a new session; behind a pooler there is no lock."""
        if connection is not self._session and not is_pooled(connection):
            # The process's last session may not have ended yet, and then still holds the lock.
            is_held = run(connection, self._taking_lock())
            self._session = connection if is_held else None

    def checking(self) -> Operation[bool]:
        """Update which processes are silent, in a transaction; return whether one is, or an entry has no number."""
        rows = yield UNLOCKED.at(**self._names)(mine=self.number)
        silent = {number for (number,) in rows}
        before, self._checked_at = self._checked_at, self._monotonic()
        if self._checked_at - before > DEAD_S:
            self._silent = {}  # there was no check for a while: a process may have held its lock in between
        self._silent = {number: self._silent.get(number, self._checked_at) for number in silent if number is not None}
        return bool(silent)

    def dead(self) -> list[int]:
        """Return the numbers that have been silent for so long that they are considered dead."""
        return [number for number in self._silent if self._is_over(number, DEAD_S)]

    def end_paused(self, connection: psycopg.Connection) -> None:
        """Terminate the open batches of paused processes, which are silent but still lock their messages.

        Their messages are then treated as if the processes had died.
        """
        paused = [number for number in self._silent if self._is_over(number, PAUSED_S)]
        for number, host, pid, backend in run(connection, self._open_batches(paused)) if paused else ():
            inbox = self._names["inbox"]
            try:
                run(connection, terminating(backend))
                log.warning("%s: worker %d on %s is paused: terminated its batch", inbox, pid, host)
            except InsufficientPrivilege:
                if number not in self._untouchable:
                    self._untouchable.add(number)
                    log.warning(
                        "%s: worker %d on %s is paused and blocks its keys: this role may not terminate its session; "
                        "grant it pg_signal_backend",
                        inbox, pid, host,
                    )  # fmt: skip

    def _is_over(self, number: int, silent_s: float) -> bool:
        return self._monotonic() - self._silent[number] >= silent_s

    def _taking_lock(self) -> Operation[bool]:
        [(is_held,)] = yield TAKE_LOCK.at()(number=self.number)
        return bool(is_held)

    def _open_batches(self, numbers: list[int]) -> Operation[list[Row]]:
        rows: list[Row] = yield OPEN_BATCHES.at(**self._names)(numbers=numbers)
        return rows


def terminating(backend: int) -> Operation[None]:
    """Have the server end a session. Raises `InsufficientPrivilege`."""
    try:
        yield TERMINATE.at()(pid=backend)
    except InsufficientPrivilege:
        yield TERMINATE_AS_CURRENT.at()(pid=backend)
