"""The daemon: a lane that delivers, one that executes, and one that reads other nodes and serves bridges to brokers.

Each lane has a lease and connections of its own, so that one lane never holds up the other.
`deliver_all` and `execute_all` do what the first two do once, without a daemon.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from dispatcher.bridges.lane import BridgesBeside
from dispatcher.delivery.deliver import DELIVERY_SESSION, Delivery, releasing
from dispatcher.delivery.deliverer import BATCH_ROWS, MAX_BYTES, Deliverer
from dispatcher.delivery.portion import Portion
from dispatcher.executor.batch_executor import BatchExecutor
from dispatcher.executor.execution import Execution
from dispatcher.housekeeping.housekeeping import Housekeeping
from dispatcher.housekeeping.janitor import Janitor, moving_all_parked
from dispatcher.housekeeping.periodic import PeriodicSends
from dispatcher.lanes.lane import POLL_INTERVAL_S, Lane, Work
from dispatcher.lanes.leading import LANE, Leading, open_session
from dispatcher.lanes.threads import ThreadEach
from dispatcher.lanes.waits import told
from dispatcher.links.lane import LinksLane
from mailroom import schema as node
from mailroom.metrics.leader import LeaderSamples
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.sql.runner import run_async
from mailroom.sql.sqlstate import is_held_up
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

# A user waits for the end and sees the progress, so locks and large batches may take as long as they need.
DRAIN = settings.UNATTENDED | DELIVERY_SESSION | {"statement_timeout": "0", "lock_timeout": "0"}
# How long the executor waits for locked rows of users' tables: meanwhile it holds up all other executables.
EXECUTOR = LANE | settings.UNDER_POLICIES | {"lock_timeout": "2s"}


@dataclass(slots=True)
class Totals:
    """Totals: messages taken from the outbox, and their outcomes.

    `delivered` counts the copies in inboxes, `carried` those for links to other nodes.
    """

    taken: int = 0
    delivered: int = 0
    scheduled: int = 0
    expired: int = 0
    unrouted: int = 0
    dead: int = 0
    carried: int = 0

    def _add(self, delivery: Delivery) -> None:
        """Count one delivery."""
        self.taken += delivery.taken
        self.delivered += delivery.delivered
        self.scheduled += delivery.scheduled
        self.expired += delivery.expired
        self.unrouted += delivery.unrouted
        self.dead += delivery.dead
        self.carried += delivery.carried


class Dispatcher(Lane):
    """The lane that delivers a node's outbox to its inboxes.

    `rows` and `max_bytes` bound one batch, and `partitions` how many inboxes one transaction delivers to (None: as many
    as the server has room for); for the rest see `Lane`. `totals` counts what it has delivered.
    """

    _role, _outbox = "dispatcher", "outbox"
    totals: Totals

    def __init__(
        self,
        dsn: str | Home,
        *,
        schema: str = DEFAULT_SCHEMA,
        poll_interval_s: float = POLL_INTERVAL_S,
        rows: int = BATCH_ROWS,
        max_bytes: int = MAX_BYTES,
        partitions: int | None = None,
    ) -> None:
        super().__init__(dsn, schema, poll_interval_s)
        self._rows = rows
        self._max_bytes = max_bytes
        self._partitions = partitions
        self._portion = Portion()
        self._janitor = Janitor(self._schema)
        self._housekeeping = Housekeeping(self._home, self._janitor)
        self._samples: LeaderSamples | None = None
        self.totals = Totals()

    def _work_on(self, connection: psycopg.AsyncConnection) -> Work:
        deliverer = Deliverer(
            connection, self._schema, rows=self._rows, max_bytes=self._max_bytes, portion=self._portion,
            progress=self._count, partitions=self._partitions,
        )  # fmt: skip
        return Work(deliverer.deliver, deliverer.drain, deliverer.drain_rest)

    def _beside(self, leading: asyncio.Event) -> Sequence[Coroutine[Any, Any, None]]:
        return [each.run(leading) for each in (self._housekeeping, self._samples) if each is not None]

    def _sampled(self) -> LeaderSamples:
        """Have metrics sampled beside the work, from the next connection on; return what has the samples."""
        self._samples = LeaderSamples(self._home, schema=self._schema)
        return self._samples

    def _watch(self, inboxes: Iterable[str]) -> None:
        """Have the janitor look at these inboxes soon: they got messages, perhaps from another lane."""
        self._janitor.watch(inboxes)

    def _count(self, delivery: Delivery) -> None:
        self.totals._add(delivery)
        self._watch(delivery.inboxes)


@dataclass(slots=True)
class Executed:
    """Totals: executables taken, those of them that went to `dead_letter`, and replies sent."""

    taken: int = 0
    dead: int = 0
    replied: int = 0

    def _add(self, execution: Execution) -> None:
        """Count one execution."""
        self.taken += execution.taken
        self.dead += execution.dead
        self.replied += execution.replied


class Executor(Lane):
    """The lane that applies the executables of a node; see `Lane`. `totals` counts what it has executed."""

    _role, _outbox = "executor", "outbox_executable"
    _session = EXECUTOR
    totals: Executed

    def __init__(
        self,
        dsn: str | Home,
        *,
        schema: str = DEFAULT_SCHEMA,
        poll_interval_s: float = POLL_INTERVAL_S,
        rows: int = BATCH_ROWS,
    ) -> None:
        super().__init__(dsn, schema, poll_interval_s)
        self._rows = rows
        self._portion = Portion()
        self.totals = Executed()

    def _work_on(self, connection: psycopg.AsyncConnection) -> Work:
        executor = BatchExecutor(
            connection, self._schema, rows=self._rows, portion=self._portion, progress=self.totals._add
        )
        return Work(executor.execute, executor.drain, executor.drain)


def run(dsn: str, *, schema: str = DEFAULT_SCHEMA, poll_interval_s: float = POLL_INTERVAL_S) -> None:
    """Run a daemon with all lanes until SIGTERM or SIGINT. It ends within 10 s, even if the database is gone."""
    asyncio.run(run_until_signalled(all_lanes(dsn, schema=schema, poll_interval_s=poll_interval_s)))


def all_lanes(dsn: str, *, schema: str = DEFAULT_SCHEMA, poll_interval_s: float = POLL_INTERVAL_S) -> list[Leading]:
    """Return the lanes of a daemon. The janitor of the one that delivers also looks after what other nodes fill."""
    home = Home(settings.dsn(dsn))  # one for both: they listen over one session
    dispatcher = Dispatcher(home, schema=schema, poll_interval_s=poll_interval_s)
    executor = Executor(home, schema=schema, poll_interval_s=poll_interval_s)
    links = LinksLane(
        dsn, schema, poll_interval_s=poll_interval_s, on_filled=dispatcher._watch,
        beside=lambda home, on_received: BridgesBeside(
            home, schema, poll_interval_s=poll_interval_s, on_received=on_received
        ),
    )  # fmt: skip
    return [dispatcher, executor, links]


async def run_until_signalled(lanes: Sequence[Leading]) -> None:
    """Run lanes side by side until SIGTERM or SIGINT. If one ends before that, stop the others and raise its error."""

    def stop() -> None:
        for lane in lanes:
            lane.stop()

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadEach())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    running = [asyncio.create_task(lane.run()) for lane in lanes]
    # Not FIRST_EXCEPTION: a cancelled lane would end, and the daemon go on without it.
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    stop()
    # Of all of them: asyncio logs an error that was not taken, with its traceback.
    for error in await asyncio.gather(*running, return_exceptions=True):
        if error is not None:
            raise error


def deliver_all(
    dsn: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    now: datetime | None = None,
    progress: Callable[[Delivery], None] | None = None,
) -> Totals:
    """Deliver everything committed so far, in this process, and return the totals. A daemon may run beside it.

    Periodic messages that are due are sent, large batches of Spark that their drivers left at least a minute ago are
    finished, and messages of parked keys move to `parked`, as under the daemon. `now` decides what is due and what has
    expired; None is the database's clock. `progress` is called with each delivery.
    """
    return asyncio.run(_deliver_all(dsn, schema_name(schema), now, progress))


async def _deliver_all(
    dsn: str, schema: str, now: datetime | None, progress: Callable[[Delivery], None] | None
) -> Totals:
    totals = Totals()

    def count(delivery: Delivery) -> None:
        totals._add(delivery)
        if progress is not None:
            progress(delivery)

    try:
        async with told(settings.dsn(dsn)), open_session(settings.dsn(dsn), "dispatcher", DRAIN) as connection:
            await run_async(connection, node.checking(schema))
            deliverer = Deliverer(connection, schema, progress=count)
            periodic = PeriodicSends(schema, time.monotonic)
            while await periodic.send_due(connection, now):
                pass
            while await run_async(connection, releasing(schema, now=now)):
                pass
            await deliverer.drain(now)
            janitor = Janitor(schema)
            while await janitor.move_on(connection):
                await deliverer.drain(now)
            await run_async(connection, moving_all_parked(schema))
    except psycopg.OperationalError as error:
        raise settings.connection_failed(error) from None
    return totals


def execute_all(
    dsn: str, *, schema: str = DEFAULT_SCHEMA, progress: Callable[[Execution], None] | None = None
) -> Executed:
    """Execute everything committed so far, in this process, and return the totals. A daemon may run beside it."""
    return asyncio.run(_execute_all(dsn, schema_name(schema), progress))


async def _execute_all(dsn: str, schema: str, progress: Callable[[Execution], None] | None) -> Executed:
    totals = Executed()

    def count(execution: Execution) -> None:
        totals._add(execution)
        if progress is not None:
            progress(execution)

    try:
        async with (
            told(settings.dsn(dsn)),
            open_session(settings.dsn(dsn), "executor", DRAIN | settings.UNDER_POLICIES) as connection,
        ):
            await run_async(connection, node.checking(schema))
            executor = BatchExecutor(connection, schema, progress=count)
            while True:
                try:
                    await executor.drain()
                    return totals
                except psycopg.OperationalError as error:
                    if not is_held_up(error):  # such as a deadlock over rows of a target
                        raise
    except psycopg.OperationalError as error:
        raise settings.connection_failed(error) from None
