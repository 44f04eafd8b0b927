"""A lane of the daemon: it empties one outbox while it leads, with a keeper beside it for the lease.

Three connections: the lane's (its batches, and the "awake" lock), the keeper's (the lease, and nothing that may take
long) and the bell's (LISTEN alone). Whatever breaks, all three are dropped and made anew; only the totals outlive them.
The lease is renewed by a write, so a server that has become a standby is found out by that. Nothing ends a lane that
has once begun to work.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import psycopg

from dispatcher.deliver import SESSION
from dispatcher.doorbell import Doorbell
from dispatcher.lease import RENEW_S, Lease, reading_backend
from dispatcher.notifications import CHECK_INTERVAL_S, DROP_AT, WARN_AT, reading_queue_usage
from mailroom import schema as node
from mailroom import settings
from mailroom.errors import ConfigurationError, ConnectionFailed, MailroomError
from mailroom.names import schema_name
from mailroom.session import backoff
from mailroom.session.disconnect import answered, sever
from mailroom.session.listener import Bell
from mailroom.session.pooler import is_pooled
from mailroom.sql.runner import run_async
from mailroom.sql.sqlstate import OF_THE_SESSION, is_held_up

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("mailroom.dispatcher")

POLL_INTERVAL_S = 1.0
LONGEST_PAUSE_S = 5.0  # after losing the database; a node has few dispatchers, and all of its messages wait for one
KEEP_INTERVAL_S = RENEW_S / 2
# Works. A batch that reaches many inboxes takes its time, and tried anew it would take it again.
LANE = settings.UNATTENDED | SESSION | {"statement_timeout": "10min"}
# Keeps the lease, or the house: what it waits for longer than this comes next time.
KEEPER = settings.UNATTENDED | SESSION | {"lock_timeout": "500ms"}
# Told to stop: so long for the batch under way, then for cancelled statements to answer; 9 s at the worst.
FINISH_WITHIN_S = 3.0
DISCONNECT_AFTER_S = 2.0


class Work(Protocol):
    """What a lane does over one connection."""

    async def first(self) -> int:
        """Do one batch, and return how much that was."""
        ...

    async def drain(self) -> int:
        """Do all there is, and return how much that was."""
        ...


class Lane(ABC):
    """Empties an outbox as long as it runs and holds the lease of its role; else it stands by.

    `poll_interval_s` is how long a message waits at most if every notification is lost. A first connection that fails
    raises `ConnectionFailed`, a `dsn` that leads through a pooler `ConfigurationError`; what else keeps the first batch
    from being looked for is raised as it is. Once that was done, whatever fails is logged and tried again with a
    back-off.
    """

    role: str
    outbox: str
    session: Mapping[str, str] = LANE
    totals: "DataclassInstance"

    def __init__(self, dsn: str, schema: str, poll_interval_s: float) -> None:
        self._dsn = settings.dsn(dsn)
        self._schema = schema_name(schema)
        self._poll_interval_s = poll_interval_s
        self._lease = Lease(self._schema, self.role)
        self._leading = asyncio.Event()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_begun = False

    @abstractmethod
    def _work_on(self, connection: psycopg.AsyncConnection) -> Work:
        """Return what is done over a connection that was just made."""

    def _beside(self, leading: asyncio.Event) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs beside the work as long as its connections do, over one of its own."""
        return ()

    def stop(self) -> None:
        """Finish the batch, give the lease up and return from `run`; safe from any thread, at any time, twice."""
        if self._loop is None:
            self._stopping.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: `run` has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self) -> None:
        """Work until stopped."""
        self._loop = asyncio.get_running_loop()
        connected, failures = False, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                async with (
                    open_session(self._dsn, self.role, self.session) as lane,
                    open_session(self._dsn, self.role, KEEPER) as keeper,
                ):
                    if is_pooled(lane):
                        raise ConfigurationError(
                            "A dispatcher needs sessions of its own, and this connection string leads through a "
                            "pooler. Give it one that leads to the server itself: with --dsn, or with listen_dsn for "
                            "a worker that dispatches."
                        )
                    await run_async(keeper, node.checking(self._schema))
                    connected = True
                    await self._work(lane, keeper)
            except Exception as error:
                if self._stopping.is_set():
                    return
                if not connected and isinstance(error, ConnectionFailed):
                    raise
                if not connected and isinstance(error, psycopg.OperationalError):  # lost right behind it
                    raise settings.connection_failed(error) from None
                if not self._has_begun and not isinstance(error, OF_THE_SESSION):
                    raise
                failures = 1 if time.monotonic() - began > LONGEST_PAUSE_S else failures + 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if backoff.is_worth_a_line(failures, pause_s):
                    self._log(error)
                await self._pause(pause_s)

    async def _work(self, lane: psycopg.AsyncConnection, keeper: psycopg.AsyncConnection) -> None:
        bell = Bell(self._dsn, self._schema, self.outbox, f"{self.role} bell")
        doorbell = Doorbell(lane, self._schema, self.outbox, bell, self._poll_interval_s)
        self._leading.clear()
        serve = asyncio.create_task(self._serve(doorbell, self._work_on(lane)))
        beside = (bell.run(), self._keep(lane, keeper, doorbell, bell), *self._beside(self._leading))
        others = [asyncio.create_task(each) for each in beside]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([serve, *others, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                bell.ring()
                await asyncio.wait([serve], timeout=FINISH_WITHIN_S)
        finally:
            await _end([serve, *others, stopping], [lane, keeper])
        for task in (serve, *others):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if not keeper.closed:
            await answered(keeper, run_async(keeper, self._lease.giving_up()), DISCONNECT_AFTER_S)

    def _log(self, error: Exception) -> None:
        if isinstance(error, OF_THE_SESSION):
            log.warning("lost the database (%s), connecting again", type(error).__name__)
        elif isinstance(error, MailroomError):
            log.error("%s: trying again: %s", self.role, error)
        else:
            # Where it was, and not what it says: that may repeat a message.
            code = f" {error.sqlstate}" if isinstance(error, psycopg.Error) else ""
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: trying again after %s%s:\n%s", self.role, type(error).__name__, code, where)

    def _is_held_up(self, error: psycopg.Error, what: str) -> bool:
        """Tell whether to try again over the same session, and log it."""
        if not is_held_up(error):
            return False
        log.warning(
            "%s: %s was held up by somebody's lock, or cancelled (%s); trying again",
            self.role, what, type(error).__name__,
        )  # fmt: skip
        return True

    async def _unless_held_up(self, batches: Callable[[], Awaitable[int]]) -> int:
        try:
            return await batches()
        except psycopg.Error as error:
            if not self._is_held_up(error, "a batch"):
                raise
            return 0

    async def _serve(self, doorbell: Doorbell, work: Work) -> None:
        async def first() -> int:
            done = await self._unless_held_up(work.first)
            self._has_begun = True
            return done

        async def drain() -> int:
            return await self._unless_held_up(work.drain)

        while not self._stopping.is_set():
            if self._leading.is_set():
                await doorbell.serve(drain, lambda: self._leading.is_set() and not self._stopping.is_set(), first=first)
            else:
                # Standing by; the keeper takes the lease when it runs out.
                await self._pause(RENEW_S / 4)

    async def _keep(
        self, lane: psycopg.AsyncConnection, keeper: psycopg.AsyncConnection, doorbell: Doorbell, bell: Bell
    ) -> None:
        backend = await run_async(lane, reading_backend())
        renewed = checked = float("-inf")
        while True:
            try:
                # Standing by, each time: a leader that is gone is replaced within 5 s, of which its lease takes 3.
                if time.monotonic() - renewed >= RENEW_S or not self._leading.is_set():
                    began = time.monotonic()
                    state = "awake" if doorbell.awake else "asleep"
                    self._lead(await run_async(keeper, self._lease.taking(backend, state, asdict(self.totals))))
                    renewed = began
                if time.monotonic() - checked >= CHECK_INTERVAL_S:
                    checked = time.monotonic()
                    await self._check_queue(keeper, bell)
            except psycopg.Error as error:
                # The lease may run out meanwhile. A batch under way would be lost with the sessions at once.
                if not self._is_held_up(error, "the lease"):
                    raise
            await asyncio.sleep(KEEP_INTERVAL_S)

    def _lead(self, leads: bool) -> None:
        if leads != self._leading.is_set():
            role = "leading" if leads else "standing by for"
            log.info("%s %s schema %s, epoch %s", self.role, role, self._schema, self._lease.epoch)
            self._leading.set() if leads else self._leading.clear()
        self._has_begun = self._has_begun or not leads

    async def _check_queue(self, keeper: psycopg.AsyncConnection, bell: Bell) -> None:
        usage = await run_async(keeper, reading_queue_usage())
        if usage < WARN_AT:
            return
        log.warning(
            "the server's queue of notifications is %.0f %% full, and a full one makes every commit that notifies "
            "fail: look for a session that listens and is paused or idle in a transaction",
            100 * usage,
        )
        if usage >= DROP_AT:
            bell.listen_anew()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


@contextlib.asynccontextmanager
async def open_session(dsn: str, role: str, session: Mapping[str, str]) -> AsyncIterator[psycopg.AsyncConnection]:
    """Give a session of our own, autocommit; its transactions are READ COMMITTED, whatever the server's default."""
    connection = await settings.connect_async(dsn, role, session)
    try:
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        yield connection
    finally:
        await connection.close()


async def _end(tasks: list[asyncio.Task[Any]], connections: list[psycopg.AsyncConnection]) -> None:
    """Cancel the tasks and see them end, severing their connections if the database does not answer."""
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=DISCONNECT_AFTER_S)
    if pending:
        for connection in connections:
            sever(connection)
        for task in pending:
            task.cancel()  # again: the bell's connection is its own, and psycopg gives up on it at the second time
        await asyncio.wait(pending, timeout=DISCONNECT_AFTER_S)
