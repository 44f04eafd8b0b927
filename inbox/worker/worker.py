"""`Worker` and `AsyncWorker`: services that reap an inbox, one transaction per batch."""

import asyncio
import contextlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, Protocol

import psycopg

from inbox.claim import Share
from inbox.failure import Recorded
from inbox.handlers import check_schema
from inbox.inbox import AsyncInbox, Inbox
from inbox.peek import finding
from inbox.worker import arguments
from inbox.worker.arguments import AsyncHandler, AsyncOnError, Handler, NotAwaited, OnError
from inbox.worker.batch import Batch, Ended, Patience, blaming, cancellations
from inbox.worker.batch_handler import AsyncBatchHandler, BatchHandler
from inbox.worker.in_flight import Entry, InFlight
from inbox.worker.loop import Due, Loop
from inbox.worker.signals import stopping
from inbox.worker.threads import in_thread
from inbox.worker.transactions import (
    AsyncSource,
    AsyncTransactions,
    Source,
    Transactions,
    async_transactions,
    transactions,
    usable,
    usable_async,
)
from inbox.worker.wakeup import InboxListener
from mailroom import schema as node
from mailroom import settings
from mailroom.message import Message
from mailroom.names import DEFAULT_SCHEMA
from mailroom.packages import load
from mailroom.session import encoding
from mailroom.session.home import Home
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import driver_of, run, run_async

log = logging.getLogger("mailroom.worker")

CANCELLED_S = 1.0  # the time for a cancelled task to end before it is cancelled again


class Dispatches(Protocol):
    """What a worker with `dispatch=True` runs beside its loops: `dispatcher.Dispatcher` and `dispatcher.Executor`."""

    async def run(self) -> None:
        """Do the dispatcher's work while no other one leads, until stopped."""
        ...

    def stop(self) -> None:
        """Make `run` return."""
        ...


class _Service(ABC):
    """What `Worker` and `AsyncWorker` share: settings, loops, the tasks beside them, and stopping."""

    def __init__(
        self, name: str, schema: str, parallel: int, batch: int, poll_interval_s: float, dispatch: bool,
        listen_dsn: str | None, fatal: tuple[type[Exception], ...], handle_signals: bool,
    ) -> None:  # fmt: skip
        self.name = name
        self.schema = schema
        self.batch = arguments.count(batch, "batch")
        self.poll_interval_s = arguments.seconds(poll_interval_s, "poll_interval_s")
        self.fatal: tuple[type[BaseException], ...] = arguments.exceptions(fatal, "fatal")
        self.stopping = asyncio.Event()
        self.patience = Patience()
        self._parallel = arguments.count(parallel, "parallel")
        self._dispatch = arguments.flag(dispatch, "dispatch")
        self._listen_dsn = None if listen_dsn is None else settings.dsn(listen_dsn)
        self._handle_signals = handle_signals
        self._is_stopped = False
        self._cancellations = 0  # pending in the task that calls `run` when it does
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: InFlight
        self._home = Home()

    def stop(self) -> None:
        """Let every loop finish its batch, and `run` return. Call it from any thread or signal, at any time."""
        self._is_stopped = True  # set first: either `_serve` sees it, or we see the event loop here
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: `run` has ended
                self._loop.call_soon_threadsafe(self.stopping.set)

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        return stopping(self.stop) if self._handle_signals else contextlib.nullcontext()

    async def _serve(self, home: Home) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self.stopping.set()
        listener = InboxListener(home, self.schema, self.name)
        due = Due(self.poll_interval_s)
        self._in_flight = InFlight(home, self.schema, self.name)
        try:
            # Before the first batch, which may contain the message that killed the last worker.
            await self._in_flight.run_in_thread(self._in_flight.begin)
            if cancellations() > self._cancellations:
                raise asyncio.CancelledError  # Python 3.11's wait_for has swallowed it, for example in a pool
            log.info(
                "%s: running in schema %s of %s: %d at once, batches of %d",
                self.name, self.schema, home.whereabouts, self._parallel, self.batch,
            )  # fmt: skip
            await self._run_loops(
                [Loop(self, listener, self._in_flight, due) for _ in range(self._parallel)], listener, due, home
            )
        finally:
            await self._in_flight.run_in_thread(self._in_flight.close)

    async def _run_loops(self, made: list[Loop], listener: InboxListener, due: Due, home: Home) -> None:
        """Run the loops and the tasks beside them. Cancelled, stop them first; cancelled again, end at once."""

        def found() -> None:
            due.recorded(0)
            listener.ring()

        # First, since it raises an error if the dispatcher cannot be imported.
        dispatchers = _dispatchers(home, self.schema, self.poll_interval_s) if self._dispatch else []
        loops = [asyncio.create_task(loop.run()) for loop in made]
        beside = [asyncio.create_task(listener.run()), asyncio.create_task(self._in_flight.watch(found))]
        dispatching = [asyncio.create_task(each.run()) for each in dispatchers]
        tasks = [*loops, *beside, *dispatching, asyncio.create_task(self.stopping.wait())]
        cancelled: asyncio.CancelledError | None = None
        try:
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as first:
                cancelled = first
            self.stopping.set()  # also if one failed, so that the others finish their batches
            listener.release()
            await asyncio.wait(loops)
            for each in dispatchers:
                each.stop()
            if dispatching:
                await asyncio.wait(dispatching)
        finally:
            # Only the tasks beside the loops still run; or all, if this was cancelled again. Cancel repeatedly, since
            # Python 3.11's wait_for swallows a cancellation that coincides with its result.
            self.stopping.set()
            while running := [task for task in tasks if not task.done()]:
                for task in running:
                    task.cancel()
                try:
                    await asyncio.wait(running, timeout=CANCELLED_S)
                except asyncio.CancelledError as again:
                    cancelled = again
        for task in (*loops, *beside, *dispatching):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error.error if isinstance(error, Ended) else error
        if cancelled is not None:
            raise cancelled

    def _start(self, connection: object) -> Operation[None]:
        yield from encoding.checking()
        yield from node.checking(self.schema)
        yield from finding(self.schema, self.name)
        yield from self._home.visiting(driver_of(connection))
        self._home.dsn  # noqa: B018  # raises an error if nobody can tell

    def _claiming(self, batch: Batch, inbox: Inbox | AsyncInbox, connection: object) -> Operation[None]:
        share = Share(keys=batch.size, per_key=batch.size, total=batch.size, due_too=False, hold=True)
        claiming = inbox.claiming_due(batch.size, hold=True) if batch.due else inbox.claiming(share)
        claimed = yield from claiming
        batch.take(claimed, connection, (yield from self._home.visiting(driver_of(connection))))

    def _blaming(self, batch: Batch, error: Exception) -> Operation[Recorded]:
        return blaming(self.schema, self.name, batch, error, self.fatal)

    @abstractmethod
    async def work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""

    @abstractmethod
    async def report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`."""

    @abstractmethod
    async def within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""


def _dispatchers(home: Home | str, schema: str, poll_interval_s: float) -> list[Dispatches]:
    # Found by entry point, since `inbox` must not import `dispatcher`.
    lanes = entry_points(group="mailroom.dispatcher")
    return [load(lane)(home, schema, poll_interval_s=poll_interval_s) for lane in lanes]


class Worker(_Service):
    """Reap an inbox and call `handler(message, connection)` for each message, in clock order within each key.

    A `BatchHandler` is called once per batch instead.

    A batch of up to `batch` messages is one transaction, and what the handler does on `connection` is part of it: the
    messages are consumed if and only if it commits. `parallel` batches run at once, each in a thread of its own, never
    two on one key. What the handler returns is ignored. SIGTERM lets the worker finish its batches.

    If the handler raises an exception, the batch is rolled back, and the message's key is tried again after a backoff
    while other keys continue. After the last attempt, or at once for `DecodeError`, `NoHandler` and the classes in
    `fatal`, the key is parked or the message skipped, as configured for the inbox (`create_inbox`). A handler can
    choose the outcome by raising `Retry`, `Park` or `Skip`; with `Unavailable` the inbox waits. A message that kills
    its worker counts as failed too.

    `source` is a connection string, a psycopg `ConnectionPool`, a SQLAlchemy `Engine` or a `sessionmaker`; the handler
    gets a connection (or session) of that kind. Or it is a connection of Django, or "django:ALIAS": then each batch is
    in `atomic`, and the handler gets psycopg's connection below Django's. To be woken by NOTIFY the worker needs a
    direct connection, to `listen_dsn` or by default to where the connections of `source` are; behind a transaction
    pooler it polls every `poll_interval_s` seconds. With `dispatch=True` the worker also delivers and executes while no
    daemon does, so that a small service needs none.

    Creating a worker with an unsuitable argument, such as an async handler, raises `ConfigurationError`.
    """

    def __init__(
        self,
        source: Source,
        inbox: str,
        handler: Handler,
        *,
        schema: str = DEFAULT_SCHEMA,
        parallel: int = 1,
        batch: int = 100,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_error: OnError | None = None,
        handle_signals: bool = True,
    ) -> None:
        super().__init__(inbox, schema, parallel, batch, poll_interval_s, dispatch, listen_dsn, fatal, handle_signals)
        check_schema(handler, schema)
        self._inbox = Inbox(inbox, schema)
        self._source = usable(source)
        self._whole = isinstance(handler, BatchHandler)
        self._handler: Callable[[Any, Any], object] = (
            handler.whole if isinstance(handler, BatchHandler) else arguments.synchronous(handler)
        )
        self._on_error = arguments.callback(on_error)
        self._transactions: Transactions
        self._threads: ThreadPoolExecutor

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`; raises what no retry can fix: unknown inbox, wrong schema, bad login."""
        with self._signals():
            self._transactions = transactions(self._source, self.name, self._parallel, self._listen_dsn)
            self._home = self._transactions.home
            try:
                try:
                    with self._transactions.begin() as connection:
                        run(connection, self._start(connection))
                except psycopg.OperationalError as error:  # lost right after the first connection was made
                    raise settings.connection_failed(error) from None
                with ThreadPoolExecutor(self._parallel, f"mailroom-{self.name}") as self._threads:
                    asyncio.run(self._serve(self._home))
            finally:
                self._transactions.close()

    async def work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""
        await in_thread(self._threads, self._batch_of, batch, entry)

    def _batch_of(self, batch: Batch, entry: Entry) -> None:
        with self._in_flight.removing(entry, batch):
            with self._transactions.begin(failing=batch.due) as connection:
                run(connection, self._claiming(batch, self._inbox, connection))
                if not batch.messages:
                    return
                entry.place = batch.place
                self._in_flight.add(entry, batch.messages)
                try:
                    with batch.handling(whole=self._whole) as turns:
                        for given in turns:  # a message, or all of them
                            self._handler(given, connection)
                    run(connection, batch.ending(self.schema, self.name))
                    with batch.committing():
                        self._transactions.commit(connection)
                except NotAwaited:
                    raise
                except Exception as error:
                    if not self.patience.forgives(error, batch):
                        with contextlib.suppress(psycopg.Error):  # then the loop records it after the rollback
                            batch.recorded = self._in_flight.replace(entry, self._blaming(batch, error))
                    raise
            self.patience.handled(batch)
            batch.committed()

    async def report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`, in a handler's thread since it may block."""
        if self._on_error is not None:
            await in_thread(self._threads, self._on_error, message, error)

    async def within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""

        def run_it() -> T:
            with self._transactions.begin() as connection:
                return run(connection, operation)

        return await in_thread(self._threads, run_it)


class AsyncWorker(_Service):
    """`Worker` for async handlers and sources: `AsyncConnectionPool`, `AsyncEngine`, `async_sessionmaker`, or a DSN."""

    def __init__(
        self,
        source: AsyncSource,
        inbox: str,
        handler: AsyncHandler,
        *,
        schema: str = DEFAULT_SCHEMA,
        parallel: int = 1,
        batch: int = 100,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_error: AsyncOnError | None = None,
        handle_signals: bool = False,
    ) -> None:
        super().__init__(inbox, schema, parallel, batch, poll_interval_s, dispatch, listen_dsn, fatal, handle_signals)
        check_schema(handler, schema)
        self._inbox = AsyncInbox(inbox, schema)
        self._source = usable_async(source)
        self._whole = isinstance(handler, AsyncBatchHandler)
        self._handler: Callable[[Any, Any], Awaitable[object]] = (
            handler.whole if isinstance(handler, AsyncBatchHandler) else arguments.asynchronous(handler)
        )
        self._on_error = arguments.async_callback(on_error)
        self._transactions: AsyncTransactions

    async def run(self) -> None:
        """Run until `stop` or until cancelled, then finish the batches; cancelled again, end at once."""
        self._cancellations = cancellations()
        with self._signals():
            self._transactions = await async_transactions(self._source, self.name, self._parallel, self._listen_dsn)
            self._home = self._transactions.home
            try:
                try:
                    async with self._transactions.begin() as connection:
                        await run_async(connection, self._start(connection))
                except psycopg.OperationalError as error:
                    raise settings.connection_failed(error) from None
                await self._serve(self._home)
            finally:
                await self._transactions.close()

    async def work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""
        async with self._in_flight.removing_async(entry, batch):
            async with self._transactions.begin(failing=batch.due) as connection:
                await run_async(connection, self._claiming(batch, self._inbox, connection))
                if not batch.messages:
                    return
                entry.place = batch.place
                await self._in_flight.run_in_thread(self._in_flight.add, entry, batch.messages)
                try:
                    with batch.handling(whole=self._whole) as turns:
                        for given in turns:
                            await self._handler(given, connection)
                    await run_async(connection, batch.ending(self.schema, self.name))
                    with batch.committing():
                        await self._transactions.commit(connection)
                except Exception as error:
                    if not self.patience.forgives(error, batch):
                        with contextlib.suppress(psycopg.Error):
                            batch.recorded = await self._in_flight.run_in_thread(
                                self._in_flight.replace, entry, self._blaming(batch, error)
                            )
                    raise
            self.patience.handled(batch)
            batch.committed()

    async def report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`, and await the result if it is awaitable."""
        if self._on_error is not None:
            reported = self._on_error(message, error)
            if inspect.isawaitable(reported):
                await reported

    async def within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""
        async with self._transactions.begin() as connection:
            return await run_async(connection, operation)
