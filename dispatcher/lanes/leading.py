"""What leads: it works over a session of its own while it holds a lease, which a keeper beside it renews.

Two connections: one to work over, and the keeper's (the lease, and nothing that may take long). After any error both
are dropped and made again, with all that runs beside; only the totals survive. The lease is renewed by a write, which
fails on a server that has become a standby. Once the work has begun, no error ends it.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg

from dispatcher.delivery.deliver import DELIVERY_SESSION
from dispatcher.lanes.failure import RepeatedFailure
from dispatcher.lanes.lease import RENEW_S, Lease, reading_backend
from dispatcher.lanes.notifications import CHECK_INTERVAL_S, DROP_AT, WARN_AT, reading_queue_usage
from dispatcher.lanes.waits import telling
from mailroom import events
from mailroom import schema as node
from mailroom.errors import ConfigurationError, ConnectionFailed, MailroomError
from mailroom.health import Health
from mailroom.roles.advice import advise, noted
from mailroom.session import backoff, settings
from mailroom.session.disconnect import answered_within, disconnect
from mailroom.session.home import Elsewhere, Home
from mailroom.session.listener import heard
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run_async
from mailroom.sql.sqlstate import OF_THE_SESSION, is_held_up
from mailroom.values.names import schema_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("mailroom.dispatcher")

LONGEST_PAUSE_S = 5.0  # before reconnecting; short, since all messages of the node wait for a dispatcher
KEEP_INTERVAL_S = RENEW_S / 2
SILENT_S = 15.0  # a lane whose database has not answered for that long is not ready
# A batch for many inboxes may legitimately take minutes; retrying would not be faster.
LANE = settings.UNATTENDED | DELIVERY_SESSION | {"statement_timeout": "10min"}
# For the lease and for housekeeping, which pass over what is locked for longer and try it again later.
KEEPER = settings.UNATTENDED | DELIVERY_SESSION | {"lock_timeout": "500ms"}
# When stopping: for the batch under way, then twice for cancelled statements and the lease. 9 s at the worst.
# D-daemon-6: Stopping ends within 10 s whatever the database does.
FINISH_WITHIN_S = 3.0
DISCONNECT_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Duty:
    """What is done over one connection, for as long as it lasts.

    `serve` works while the lane leads, and returns soon after the lane was told to stop. `beside` runs with it, over
    connections of its own. `is_awake` is for the lease's row. `wake` ends a wait of `serve` for more work, and
    `listen_anew` drops the connections that listen to this server and makes them again.
    """

    serve: Coroutine[Any, Any, None]
    beside: Sequence[Coroutine[Any, Any, None]]
    is_awake: Callable[[], bool]
    wake: Callable[[], None]
    listen_anew: Callable[[], None]


class Leading(ABC):
    """Works while it holds the lease of its role; otherwise it stands by.

    If the first connection fails, `run` raises `ConnectionFailed`; if `dsn` leads through a pooler,
    `ConfigurationError`. Any other error before the work has begun is raised as it is. Afterwards every error is logged
    and retried with a backoff.
    """

    _role: str
    _session: Mapping[str, str] = LANE
    totals: "DataclassInstance"

    def __init__(self, dsn: str | Home, schema: str) -> None:
        self._home = dsn if isinstance(dsn, Home) else Home(settings.dsn(dsn))
        self._schema = schema_name(schema)
        self._lease = Lease(self._schema, self._role)
        self._keeper = settings.of_this_process(f"{self._role} keeper {self._schema}")
        self._leading = asyncio.Event()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_begun = False
        self._repeats = Repeats()
        self._purpose = "executor" if self._role == "executor" else "dispatcher"
        self._failure = RepeatedFailure(self._purpose, self._schema)
        self._user: str | None = None
        self._health = Health(self._role, "connecting", False, False, datetime.now(UTC))
        self._answered_at = time.monotonic()
        self._is_awake: Callable[[], bool] = lambda: False

    @abstractmethod
    def _on_duty(self, connection: psycopg.AsyncConnection) -> Duty:
        """Return what to do over a connection that was just made."""

    def _counts(self) -> dict[str, object]:
        """Return what the lease's row shows of the work."""
        return asdict(self.totals)

    def stop(self) -> None:
        """Make `run` finish the batch, give up the lease and return. Safe from any thread, at any time, repeatedly."""
        if self._loop is None:
            self._stopping.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: `run` has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    def health(self) -> Health:
        """Return how the lane is: awake or asleep while it leads, standing by, or connecting. It asks no database.

        It is ready if it leads or stands by, and its database has answered within the last 15 s.
        """
        found = replace(self._health, has_begun=self._has_begun)
        if not found.ready:
            return found
        if (silent_s := time.monotonic() - self._answered_at) > SILENT_S:
            return replace(found, ready=False, why=f"the database has not answered for {silent_s:.0f} s")
        return replace(found, state="awake" if self._is_awake() else "asleep") if found.state == "leading" else found

    def _is(self, state: str, *, ready: bool, why: str | None = None) -> None:
        since = self._health.since if self._health.state == state else datetime.now(UTC)
        self._health = Health(self._role, state, ready, self._has_begun, since, why)

    async def run(self) -> None:
        """Work until stopped."""
        self._loop = asyncio.get_running_loop()
        connected, failures = False, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                async with (
                    open_session(self._home, self._role, self._session) as session,
                    open_session(self._home, self._keeper, KEEPER) as keeper,
                ):
                    if is_pooled(session):
                        raise ConfigurationError(
                            "This connection string leads through a pooler, and a dispatcher needs sessions of its "
                            "own. Give one that leads to the server itself: with --dsn, or with listen_dsn for a "
                            "worker that dispatches.",
                            code="MR-pooler-in-the-way",
                        )
                    await run_async(keeper, node.checking(self._schema))
                    connected = True
                    self._user = keeper.info.user
                    await self._work(session, keeper)
            except Exception as error:
                if self._stopping.is_set():
                    return
                advise(error, self._purpose, schema=self._schema)
                # A worker's batches have connected before, so its server is there: it may only give too few sessions.
                is_first = not connected and self._home.place is None
                if (is_first and isinstance(error, ConnectionFailed)) or (
                    not connected and isinstance(error, Elsewhere)
                ):
                    raise
                if is_first and isinstance(error, psycopg.OperationalError):  # lost right after it was made
                    raise settings.connection_failed(error) from None
                if not self._has_begun and not isinstance(error, OF_THE_SESSION):
                    raise
                failures = 1 if time.monotonic() - began > LONGEST_PAUSE_S else failures + 1
                if failures == 1:
                    self._repeats.over()
                self._failure.struck(error, self._user)
                self._is("connecting", ready=False, why=cause(error))
                self._tell(error, reconnects=True)
                self._log(error)
                await self._pause(backoff.pause_s(failures, LONGEST_PAUSE_S))
        log.info("%s for schema %s stopped", self._role, self._schema, extra={"lane": self._role})

    async def _work(self, session: psycopg.AsyncConnection, keeper: psycopg.AsyncConnection) -> None:
        self._leading.clear()
        duty = self._on_duty(session)
        self._is_awake = duty.is_awake
        serve = asyncio.create_task(duty.serve)
        others = [asyncio.create_task(each) for each in (*duty.beside, self._keep(session, keeper, duty))]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([serve, *others, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                duty.wake()
                await asyncio.wait([serve], timeout=FINISH_WITHIN_S)
        finally:
            await _end([serve, *others, stopping], [session, keeper])
        for task in (serve, *others):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if not keeper.closed:
            await answered_within(keeper, run_async(keeper, self._lease.giving_up()), DISCONNECT_AFTER_S)

    def _tell(self, error: Exception, *, reconnects: bool) -> None:
        if events.heard(events.TriedAgain):
            events.emit(events.TriedAgain(self._schema, self._role, None, error, reconnects))

    def _log(self, error: Exception) -> None:
        why = cause(error)
        again = self._repeats.struck(why)
        if again is None:
            return
        fields = {"lane": self._role, "error": why}
        if settings.refusal(error) is not None:
            log.error("%s: will try again: %s%s", self._role, why, again, extra=fields)
        elif isinstance(error, OF_THE_SESSION) and not isinstance(error, ConfigurationError):
            log.warning("%s: lost the database connection (%s), reconnecting%s", self._role, why, again, extra=fields)
        elif isinstance(error, MailroomError):
            log.error("%s: will try again: %s%s", self._role, why, again, extra=fields)
        else:
            # The traceback without the text of the error, which may repeat a message.
            code = f" {error.sqlstate}" if isinstance(error, psycopg.Error) else ""
            where = "".join(traceback.format_tb(error.__traceback__))
            then = "" if (advised := noted(error)) is None else f". {advised}"
            fields["frames"] = f"\n{where}"
            log.error("%s: will try again after %s%s%s%s:\n%s", self._role, why, code, again, then, where, extra=fields)

    def _is_held_up(self, error: psycopg.Error, what: str) -> bool:
        """Return whether to try again over the same session, and log it."""
        if not is_held_up(error):
            return False
        if not self._stopping.is_set():
            self._failure.struck(error, self._user)
            self._tell(error, reconnects=False)
            log.warning(
                "%s: %s was held up by a lock or cancelled (%s), trying again",
                self._role, what, type(error).__name__,
            )  # fmt: skip
        return True

    async def _keep(self, session: psycopg.AsyncConnection, keeper: psycopg.AsyncConnection, duty: Duty) -> None:
        backend = await run_async(session, reading_backend())
        renewed = checked = float("-inf")
        while True:
            try:
                # A standby tries every time, so that it replaces a dead leader within 5 s, of which the lease takes 3.
                if time.monotonic() - renewed >= RENEW_S or not self._leading.is_set():
                    began = time.monotonic()
                    state = "awake" if duty.is_awake() else "asleep"
                    self._lead(
                        await run_async(
                            keeper, self._lease.taking(backend, state, self._counts() | self._failure.told())
                        )
                    )
                    renewed = began
                if time.monotonic() - checked >= CHECK_INTERVAL_S:
                    checked = time.monotonic()
                    await self._check_queue(keeper, duty)
                await telling(keeper).look(keeper)
                self._answered_at = time.monotonic()
            except psycopg.Error as error:
                # The lease may expire meanwhile, but dropping the sessions would lose the batch under way at once.
                if not self._is_held_up(error, "the lease"):
                    raise
            await asyncio.sleep(KEEP_INTERVAL_S)

    def _lead(self, leads: bool) -> None:
        self._answered_at = time.monotonic()
        state = "leading" if leads else "standing by"
        is_new = self._health.state != state  # also for one that stands by from its start, and has said nothing so far
        self._is(state, ready=True)
        if is_new or leads != self._leading.is_set():
            of = f"leading schema {self._schema}, epoch {self._lease.epoch}"
            text = of if leads else f"standing by for schema {self._schema}"
            log.info("%s %s", self._role, text, extra={"lane": self._role})
            self._leading.set() if leads else self._leading.clear()
            if events.heard(events.LeadershipChanged):
                events.emit(events.LeadershipChanged(self._schema, self._role, leads, self._lease.epoch))
        self._has_begun = self._has_begun or not leads

    async def _check_queue(self, keeper: psycopg.AsyncConnection, duty: Duty) -> None:
        usage = await run_async(keeper, reading_queue_usage())
        if usage < WARN_AT:
            return
        log.warning(
            "the server's notification queue is %.0f %% full; once it is full every commit that notifies fails: look "
            "for a listening session that is paused or idle in a transaction",
            100 * usage,
        )
        if usage >= DROP_AT:
            duty.listen_anew()

    async def _pause(self, seconds: float) -> None:
        await heard(self._stopping, seconds)


@contextlib.asynccontextmanager
async def open_session(
    dsn: str | Home, role: str, session: Mapping[str, str]
) -> AsyncIterator[psycopg.AsyncConnection]:
    """Open a session of our own, in autocommit."""
    connection = await Home.of(dsn).connect_async(role, session)
    try:
        yield connection
    finally:
        await connection.close()


async def _end(tasks: list[asyncio.Task[Any]], connections: list[psycopg.AsyncConnection]) -> None:
    """Cancel the tasks and wait until they end; disconnect them if the database does not answer."""
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=DISCONNECT_AFTER_S)
    if pending:
        for connection in connections:
            disconnect(connection)
        for task in pending:
            task.cancel()  # again: psycopg gives up the listener's own connection at the second cancel
        await asyncio.wait(pending, timeout=DISCONNECT_AFTER_S)
