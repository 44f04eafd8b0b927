"""Lives: which worker processes still speak. Each holds a lock as long as it does, and its notes tell which.

The lock belongs to the session that looks for the dead each second, from a thread of its own: no handler keeps it from
that, neither one that is busy nor one that blocks its loop. A process that is paused says nothing, and the server ends
the session. One that lost it takes another and the lock again, at the next look; so nobody is given up at once.
"""

import logging
import secrets
import time
from collections.abc import Callable

import psycopg
from psycopg.errors import InsufficientPrivilege

from mailroom import locks
from mailroom.session.pooler import is_pooled
from mailroom.sql.operation import Operation, Row, Sql
from mailroom.sql.runner import run

log = logging.getLogger("mailroom.worker")

SESSION = {"idle_session_timeout": "30s"}
# Silent at each look for so long, by the clock of who listens: two looks to take another session, and one more.
DEAD_S = 3.0
# On top of those that its session lasted. It is not dead, and may go on at any moment: late is better than wrong.
PAUSED_S = 30.0

TAKE_LOCK = Sql(
    "SELECT pg_try_advisory_lock({alive_lock}, %(life)s::integer)",
    columns=("boolean",),
    alive_lock=locks.ALIVE,
)
# Shared, so that two who listen do not take each other for a life; until the end of the transaction, so that whom it
# finds dead stays so.
UNLOCKED = Sql(
    """
WITH lives AS MATERIALIZED (
    SELECT DISTINCT life FROM {schema}.worker
    WHERE inbox = '{inbox}' AND life IS DISTINCT FROM %(mine)s::integer)
SELECT life FROM lives WHERE life IS NULL OR pg_try_advisory_xact_lock_shared({alive_lock}, life)
""",
    columns=("integer",),
    alive_lock=locks.ALIVE,
)
# By the transaction that had the messages when the note was written: by now others may have them.
OPEN_BATCHES = Sql(
    """
SELECT DISTINCT w.life, w.host, w.pid::bigint, l.pid::bigint
FROM {schema}.worker AS w JOIN pg_locks AS l ON l.transactionid::text::bigint = w.xact
WHERE w.inbox = '{inbox}' AND w.life = ANY (%(lives)s::integer[])
  AND l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid IS NOT NULL
""",
    columns=("integer", "text", "bigint", "bigint"),
)
TERMINATE = Sql("SELECT pg_terminate_backend(%(pid)s::integer)", columns=("boolean",))


class Lives:
    """Those that the notes of an inbox tell of, and this process's own."""

    def __init__(self, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._names = {"schema": schema, "inbox": inbox}
        self._monotonic = monotonic
        self._number = secrets.randbelow(2**32) - 2**31
        self._session: psycopg.Connection | None = None
        self._silent: dict[int, float] = {}
        self._checked_at = monotonic()
        self._untouchable: set[int] = set()

    @property
    def mine(self) -> int | None:
        """What a note of this process tells; None while it does not hold its lock."""
        return self._number if self._session is not None and not self._session.closed else None

    @property
    def undecided(self) -> bool:
        """Whether somebody is silent who is not given up yet."""
        return any(not self._is_over(life, DEAD_S) for life in self._silent)

    def hold_lock(self, connection: psycopg.Connection) -> None:
        """Hold this process's lock on its session; a session through a pooler has none."""
        if connection is not self._session and not is_pooled(connection):
            # Its last session may not have ended yet.
            is_held = run(connection, self._taking_lock())
            self._session = connection if is_held else None

    def checking(self) -> Operation[bool]:
        """Hear who is silent, in a transaction; tell whether there are notes of the dead, or of no life."""
        rows = yield UNLOCKED.at(**self._names)(mine=self._number)
        silent = {life for (life,) in rows}
        before, self._checked_at = self._checked_at, self._monotonic()
        if self._checked_at - before > DEAD_S:
            self._silent = {}  # who knows what was said meanwhile
        self._silent = {life: self._silent.get(life, self._checked_at) for life in silent if life is not None}
        return None in silent or bool(self.dead())

    def dead(self) -> list[int]:
        """Return who has been silent for so long that nothing is expected of them."""
        return [life for life in self._silent if self._is_over(life, DEAD_S)]

    def end_paused(self, connection: psycopg.Connection) -> None:
        """End the open batches of those that are silent although their connections are there: nobody else gets at them.

        What they had in hand is then as if they had died.
        """
        paused = [life for life in self._silent if self._is_over(life, PAUSED_S)]
        for life, host, process, backend in run(connection, self._open_batches(paused)) if paused else ():
            inbox = self._names["inbox"]
            try:
                run(connection, self._terminating(backend))
                log.warning("%s: worker %d on %s is paused: ended its batch", inbox, process, host)
            except InsufficientPrivilege:
                if life not in self._untouchable:
                    self._untouchable.add(life)
                    log.warning(
                        "%s: worker %d on %s is paused and keeps its keys: another role's, whose batch this one may "
                        "not end",
                        inbox, process, host,
                    )  # fmt: skip

    def _is_over(self, life: int, silent_s: float) -> bool:
        return self._monotonic() - self._silent[life] >= silent_s

    def _taking_lock(self) -> Operation[bool]:
        [(is_held,)] = yield TAKE_LOCK.at()(life=self._number)
        return bool(is_held)

    def _open_batches(self, lives: list[int]) -> Operation[list[Row]]:
        rows: list[Row] = yield OPEN_BATCHES.at(**self._names)(lives=lives)
        return rows

    def _terminating(self, backend: int) -> Operation[None]:
        yield TERMINATE.at()(pid=backend)
