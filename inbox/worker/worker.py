"""`Worker` and `AsyncWorker`: services that reap an inbox, one transaction per batch."""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self

import psycopg

from inbox.by_key.claim import Share
from inbox.by_key.failure import Recorded
from inbox.by_key.peek import finding
from inbox.claims import Claims
from inbox.handling import arguments
from inbox.handling.arguments import AsyncHandler, AsyncOnError, Handler, NotAwaited, OnError
from inbox.handling.batch import Batch
from inbox.handling.batch_handler import AsyncBatchHandler, BatchHandler, whole, whole_async
from inbox.handling.blame import Patience, blaming, is_transient
from inbox.handling.handlers import check_schema
from inbox.handling.overtime import HandlerTurn, Overtime, TimedOut
from inbox.handling.run import Ended, cancellations
from inbox.sessions.transactions import (
    AsyncSource,
    AsyncTransactions,
    Source,
    Transactions,
    async_transactions,
    transactions,
    usable,
    usable_async,
)
from inbox.sessions.wakeup import InboxListener
from inbox.worker.connecting import NotConnected, connecting, reason
from inbox.worker.dispatching import Dispatching
from inbox.worker.in_flight import Entry, InFlight
from inbox.worker.limiting import Limiting
from inbox.worker.loop import Due, Loop, Service
from inbox.worker.options import WorkerOptions
from inbox.worker.signals import stopping
from inbox.worker.tasks import all_cancelled, first_error
from inbox.worker.threads import Threads, in_thread
from mailroom import events
from mailroom import schema as node
from mailroom.health import Health
from mailroom.message.message import Message
from mailroom.roles.advice import advise
from mailroom.session import backoff, settings
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.session.repeats import Repeats
from mailroom.sql import encoding
from mailroom.sql.operation import Operation, T
from mailroom.sql.runner import driver_of, run, run_async
from mailroom.values.names import DEFAULT_SCHEMA

log = logging.getLogger("mailroom.worker")

LONGEST_PAUSE_S = 10.0  # between two tries to connect at first
LEAST_IDLE_S = 5.0  # a loop that has claimed nothing for so long may only be slow


class _Worker(ABC):
    """What `Worker` and `AsyncWorker` share: settings, loops, the tasks beside them, and stopping."""

    def __init__(self, inbox: str, schema: str, options: WorkerOptions) -> None:
        self._claims = Claims(schema, inbox)
        self.inbox = self._claims.inbox
        self.schema = self._claims.schema
        self._options = options
        self._stopping = asyncio.Event()
        self._patience = Patience()
        self._limiting = Limiting(self.schema, self.inbox)
        self._is_stopped = False
        self._cancellations = 0  # pending in the task that calls `run` when it does
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: InFlight
        self._overtime: Overtime | None = None
        self._home = Home()
        self._transactions: Transactions | AsyncTransactions
        self._is_open = False
        self._troubles: dict[object, Exception] = {}
        self._repeats = Repeats()
        self._has_begun = self._was_running = False
        self._since = datetime.now(UTC)
        self._loops: list[Loop] = []
        self._ended_by: BaseException | None = None
        self._on_first_try: Callable[[], None] = lambda: None  # a connection was made or refused, or `run` ends

    @property
    def failure(self) -> BaseException | None:
        """What keeps the worker from working: the error that has ended it, or why it gets no messages at present.

        None if nothing does. The failure of a message does not count as the worker's.
        """
        return self._ended_by or next(iter(list(self._troubles.values())), None)

    @property
    def healthy(self) -> bool:
        """Whether the worker runs, has found its inbox, and could claim when it last tried; for a service's probe."""
        return self._has_begun and self.failure is None

    def health(self) -> Health:
        """Return how the worker is: connecting, running, stopped, or ended by an error. It asks no database.

        It is ready if it is `healthy`, and if each of its loops has a batch in hand or has claimed within the last
        three poll intervals, but at least 5 s.
        """
        why = None if self.failure is None else reason(self.failure)
        if self._ended_by is not None:
            state = "ended"
        elif self._has_begun:
            state = "running"
            idle_s = max((loop.idle_s() for loop in self._loops), default=0.0)
            if why is None and idle_s > max(LEAST_IDLE_S, 3 * self._options.poll_interval_s):
                why = f"a loop has claimed nothing for {idle_s:.0f} s"
        else:
            state = "stopped" if self._is_stopped else "connecting"
        return Health(self.inbox, state, state == "running" and why is None, self._was_running, self._since, why)

    def stop(self) -> None:
        """Let every loop finish its batch, and `run` return. Call it from any thread or signal, at any time."""
        self._is_stopped = True  # set first: either `_serve` sees it, or we see the event loop here
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: `run` has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        return stopping(self.stop) if self._options.handle_signals else contextlib.nullcontext()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run inside this context. An error that ends the worker is logged here, in case nobody awaits `run`."""
        try:
            yield
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self._ended_by = error
            advised = advise(error, "reaper", inbox=self.inbox, schema=self.schema)
            log.error("%s: the worker has ended: %s%s", self.inbox, reason(error), f". {advised}" if advised else "")
            raise
        finally:
            self._has_begun = False
            self._since = datetime.now(UTC)
            self._on_first_try()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self._stopping.set()
        home = await self._first_connection()
        if home is not None:
            await self._serve(home)

    async def _first_connection(self) -> Home | None:
        """Connect, trying until it can, and find the inbox; return where the batches go, None if stopped before."""
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._open()
            except Exception as error:
                why = error.error if isinstance(error, NotConnected) else error
                if isinstance(why, psycopg.OperationalError):
                    why = settings.connection_failed(why)
                if not (why is not error or is_transient(error, Batch())) or isinstance(why, self._options.fatal):
                    raise why from error.__cause__
                self._troubles[self], failures = why, failures + 1
                pause_s = backoff.pause_s(failures, LONGEST_PAUSE_S)
                if (again := self._repeats.struck(reason(why))) is not None:
                    log.warning("%s: no first connection, trying again: %s%s", self.inbox, reason(why), again)
                self._on_first_try()
                await heard(self._stopping, pause_s)
            else:
                self._troubles.pop(self, None)
                self._has_begun = self._was_running = True
                self._since = datetime.now(UTC)
                self._on_first_try()
                return self._home
        return None

    async def _serve(self, home: Home) -> None:
        listener = InboxListener(home, self.schema, self.inbox)
        due = Due(self._options.poll_interval_s)
        self._in_flight = InFlight(home, self.schema, self.inbox)
        timeout_s, parallel = self._options.timeout_s, self._options.parallel
        self._overtime = None if timeout_s is None else Overtime(self.inbox, timeout_s)
        try:
            # Before the first batch, which may contain the message that killed the last worker.
            await self._in_flight.run_in_thread(self._in_flight.begin)
            if cancellations() > self._cancellations:
                raise asyncio.CancelledError  # Python 3.11's wait_for has swallowed it, for example in a pool
            log.info(
                "%s: running in schema %s of %s: %d at once, batches of up to %d",
                self.inbox, self.schema, home.whereabouts, parallel, self._options.batch,
            )  # fmt: skip
            self._loops = [Loop(self._service(), listener, self._in_flight, due) for _ in range(parallel)]
            await self._run_loops(self._loops, listener, due, home)
            log.info("%s: stopped", self.inbox)
        finally:
            if self._overtime is not None:
                await self._in_flight.run_in_thread(self._overtime.close)
            await self._in_flight.run_in_thread(self._in_flight.close)

    def _service(self) -> Service:
        return Service(
            self.schema, self.inbox, self._options, self._blaming, self._stopping, self._patience, self._limiting,
            self._troubles, self._repeats, self._starting, self._work, self._within, self._report,
        )  # fmt: skip

    def _end(self, batch: Batch, entry: Entry, error: TimedOut) -> None:
        """Record that a batch has timed out, and end its session. If that fails, the loop records it."""
        try:
            batch.end.recorded = self._in_flight.end(entry, self._blaming(batch, error))
        except psycopg.Error as failed:
            log.warning("%s: could not end a batch that has timed out (%s)", self.inbox, type(failed).__name__)

    async def _run_loops(self, made: list[Loop], listener: InboxListener, due: Due, home: Home) -> None:
        """Run the loops and the tasks beside them. Cancelled, stop them first; cancelled again, end at once."""

        def found() -> None:
            due.recorded(0)
            listener.ring()

        # First, since it raises an error if the dispatcher cannot be imported.
        dispatching = (
            Dispatching(self.inbox, home, self.schema, self._options.poll_interval_s, self._repeats)
            if self._options.dispatch
            else None
        )
        loops = [asyncio.create_task(loop.run()) for loop in made]
        beside = [asyncio.create_task(listener.run()), asyncio.create_task(self._in_flight.watch(found))]
        lanes = [] if dispatching is None else [asyncio.create_task(dispatching.run())]
        tasks = [*loops, *beside, *lanes, asyncio.create_task(self._stopping.wait())]
        cancelled: asyncio.CancelledError | None = None
        try:
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as first:
                cancelled = first
            self._stopping.set()  # also if one failed, so that the others finish their batches
            listener.release()
            await asyncio.wait(loops)
            if dispatching is not None:
                dispatching.stop()
                await asyncio.wait(lanes)
        finally:
            # Only the tasks beside the loops still run; or all, if this was cancelled again.
            self._stopping.set()
            cancelled = await all_cancelled(tasks) or cancelled
        error = first_error((*loops, *beside, *lanes)) or cancelled
        if error is not None:
            raise error.error if isinstance(error, Ended) else error

    def _starting(self) -> Operation[None]:
        """Raise an error that says what is wrong if no claim can succeed: of the schema, or of the inbox."""
        yield from encoding.checking()
        yield from node.checking(self.schema)
        yield from finding(self.schema, self.inbox)

    def _visiting(self, connection: object) -> Operation[None]:
        yield from self._starting()
        yield from self._limiting.learning()
        yield from self._home.visiting(driver_of(connection))
        self._home.dsn  # noqa: B018  # raises an error if nobody can tell

    @contextlib.contextmanager
    def _getting(self) -> Iterator[None]:
        """Get a connection for a batch, whatever the source is; if none comes, the sessions beside it make room."""
        self._home.wanted()
        try:
            with connecting():
                yield
        except NotConnected:
            self._home.missed()
            raise
        self._home.given()

    def _claiming(self, batch: Batch, connection: object) -> Operation[None]:
        began = time.monotonic()
        yield from self._limiting.claiming(batch, self._taking(batch, connection))
        if batch.taken is not None and batch.messages and events.heard(events.BatchClaimed):
            took_s = batch.taken.at - began
            events.emit(events.BatchClaimed(self.schema, self.inbox, batch.messages, batch.due, took_s))

    def _taking(self, batch: Batch, connection: object) -> Operation[None]:
        size, mine = batch.size, self._in_flight.mine
        if batch.due:
            claimed = yield from self._claims.claiming_due(size, hold=True, mine=mine)
        else:
            share = Share(keys=size, per_key=size, most=size, due_too=False, hold=True, mine=mine)
            if batch.allowed.deferred is not None and (found := batch.allowed.deferred.open):
                prefixes = [each.prefix for each in found]
                share = replace(share, prefixes=prefixes, separator=found[0].separator)
            claimed = yield from self._claims.claiming(share)
        order, place = (yield from self._claims.looking_up()), (yield from self._home.visiting(driver_of(connection)))
        batch.take(claimed, order, connection, place)

    def _blaming(self, batch: Batch, error: Exception) -> Operation[Recorded]:
        return self._limiting.recording(batch, blaming(batch, error, self._options.fatal))

    def _ending(self, batch: Batch) -> Operation[None]:
        yield from batch.ending()
        yield from self._limiting.ending(batch)

    @abstractmethod
    async def _open(self) -> None:
        """Make `_transactions`, unless they are made (`_is_open`), and check in one of them that claims can succeed."""

    @abstractmethod
    async def _work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""

    @abstractmethod
    async def _report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`."""

    @abstractmethod
    async def _within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""


class Worker(_Worker):
    """Reap an inbox and call `handler(message, connection)` for each message, in clock order within each key.

    A `BatchHandler` is called once per batch instead.

    A batch of up to `batch` messages is one transaction, and what the handler does on `connection` is part of it: the
    messages are consumed if and only if it commits. The first batch has one message. Batches become larger as long as
    one takes less than a quarter of `batch_s` seconds, and smaller if it takes longer, so that no message waits long
    for others of its batch; with None each may have `batch`. `parallel` batches run at once, each in a thread of its
    own, never two on one key. What the handler returns is ignored. SIGTERM lets the worker finish its batches.

    If the handler raises an exception, the batch is rolled back, and the message's key is tried again after a backoff
    while other keys continue. After the last attempt, or at once for `DecodeError`, `NoHandler` and the classes in
    `fatal`, the key is parked or the message skipped, as configured for the inbox (`create_inbox`). A handler can
    choose the outcome by raising `Retry`, `Park` or `Skip`; with `Unavailable` the inbox waits. A message that kills
    its worker counts as failed too, and so does one that a handler has had for more than `timeout_s` seconds: then the
    session of its batch is ended from outside, and the worker goes on. The handler itself goes on in its thread until
    it returns (a task of an `AsyncWorker` is cancelled), beside the next try and whatever else the worker does, and
    keeps its connection of a pool or engine of yours. By default there is no limit.

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
        batch: int = 1_000,
        batch_s: float | None = 1.0,
        timeout_s: float | None = None,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_error: OnError | None = None,
        handle_signals: bool = True,
    ) -> None:
        options = WorkerOptions(
            parallel, batch, batch_s, timeout_s, poll_interval_s, dispatch, listen_dsn, fatal, handle_signals
        )
        super().__init__(inbox, schema, options)
        check_schema(handler, schema)
        self._source = usable(source)
        self._whole = isinstance(handler, BatchHandler)
        self._handler: Callable[[Any, Any], object] = (
            whole(handler) if isinstance(handler, BatchHandler) else arguments.synchronous(handler)
        )
        self._on_error = arguments.callback(on_error)
        self._transactions: Transactions
        self._threads: Threads
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`; raises what no retry can fix, such as an unknown inbox.

        Without a connection it waits and tries again, unless the first one fails by an error of a class in `fatal`.
        """
        with self._running(), self._signals():
            try:
                with Threads(f"mailroom-{self.inbox}") as self._threads:
                    asyncio.run(self._main())
            finally:
                if self._is_open:
                    self._transactions.close()

    def __enter__(self) -> Self:
        """Run in a thread of its own, as a part of another program, which asks `healthy`; leaving the block stops it.

        Raises what `run` does if no retry can fix it, such as an unknown inbox; without a connection it goes on trying.
        """
        tried = threading.Event()
        self._on_first_try = tried.set
        self._thread = threading.Thread(target=self._run_in_thread, name=f"mailroom-worker-{self.inbox}")
        self._thread.start()
        try:
            tried.wait()
        except BaseException:
            self._end_thread()
            raise
        if self._ended_by is not None:
            self._end_thread()
            raise self._ended_by
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """Let the batches finish; raises the error of a worker that has ended, unless the block raises one."""
        self._end_thread()
        if kind is None and self._ended_by is not None:
            raise self._ended_by

    def _run_in_thread(self) -> None:
        with contextlib.suppress(BaseException):  # `_running` has logged it, and it is raised when the block is left
            self.run()

    def _end_thread(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    async def _open(self) -> None:
        await in_thread(self._threads, self._open_here)

    def _open_here(self) -> None:
        if not self._is_open:
            with connecting():
                self._transactions = transactions(
                    self._source, self.inbox, self._options.parallel, self._options.listen_to
                )
            self._home = self._transactions.home
            self._is_open = True
        with self._begin() as connection:
            run(connection, self._visiting(connection))

    @contextlib.contextmanager
    def _begin(self, *, failing: bool = False) -> Iterator[Any]:
        """Begin a transaction, or raise `NotConnected`."""
        with contextlib.ExitStack() as transaction:
            with self._getting():
                connection = transaction.enter_context(self._transactions.begin(failing=failing))
            yield connection

    async def _work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""
        running = in_thread(self._threads, self._batch_of, batch, entry)
        if self._overtime is None:
            await running
            return
        turn = batch.run.turn = HandlerTurn()
        left = await self._overtime.bound(running, turn, partial(self._end, batch, entry))
        if left is not None:
            self._threads.give_up(turn.thread)
            self._transactions.spare(1)
            left.add_done_callback(self._came_back)
            turn.check()

    def _came_back(self, left: "asyncio.Future[None]") -> None:
        if not left.cancelled():
            left.exception()  # it was recorded when its time was up
            self._transactions.spare(-1)

    def _batch_of(self, batch: Batch, entry: Entry) -> None:
        with self._in_flight.removing(entry, batch):
            with self._begin(failing=batch.due) as connection:
                run(connection, self._claiming(batch, connection))
                if (taken := batch.taken) is None or not taken.messages:
                    return
                entry.place = taken.place
                self._in_flight.add(entry, taken.messages, due=batch.due, entries=taken.order.entries)
                try:
                    with batch.run.handling(taken, whole=self._whole) as turns:
                        for given in turns:  # a message, or all of them
                            self._handler(given, connection)
                    run(connection, self._ending(batch), prepared=False)
                    with batch.committing():
                        self._transactions.commit(connection)
                except (NotAwaited, TimedOut):
                    raise
                except Exception as error:
                    if not self._patience.forgives(error, batch):
                        with contextlib.suppress(psycopg.Error):  # then the loop records it after the rollback
                            batch.end.recorded = self._in_flight.replace(entry, self._blaming(batch, error))
                    raise
            self._patience.handled(batch)
            batch.committed()

    async def _report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`, in a handler's thread since it may block."""
        if self._on_error is not None:
            await in_thread(self._threads, self._on_error, message, error)

    async def _within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""

        def run_it() -> T:
            with self._begin() as connection:
                return run(connection, operation)

        return await in_thread(self._threads, run_it)


class AsyncWorker(_Worker):
    """`Worker` for async handlers and sources: `AsyncConnectionPool`, `AsyncEngine`, `async_sessionmaker`, or a DSN."""

    def __init__(
        self,
        source: AsyncSource,
        inbox: str,
        handler: AsyncHandler,
        *,
        schema: str = DEFAULT_SCHEMA,
        parallel: int = 1,
        batch: int = 1_000,
        batch_s: float | None = 1.0,
        timeout_s: float | None = None,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
        fatal: tuple[type[Exception], ...] = (),
        on_error: AsyncOnError | None = None,
        handle_signals: bool = False,
    ) -> None:
        options = WorkerOptions(
            parallel, batch, batch_s, timeout_s, poll_interval_s, dispatch, listen_dsn, fatal, handle_signals
        )
        super().__init__(inbox, schema, options)
        check_schema(handler, schema)
        self._source = usable_async(source)
        self._whole = isinstance(handler, AsyncBatchHandler)
        self._handler: Callable[[Any, Any], Awaitable[object]] = (
            whole_async(handler) if isinstance(handler, AsyncBatchHandler) else arguments.asynchronous(handler)
        )
        self._on_error = arguments.async_callback(on_error)
        self._transactions: AsyncTransactions
        self._task: asyncio.Task[None] | None = None
        self._left: set[asyncio.Future[None]] = set()  # nothing else refers to a task

    async def run(self) -> None:
        """Run until `stop` or until cancelled, then finish the batches; cancelled again, end at once.

        Raises what no retry can fix, as `Worker.run` does.
        """
        self._cancellations = cancellations()
        with self._running(), self._signals():
            try:
                await self._main()
            finally:
                if self._is_open:
                    await self._transactions.close()

    async def __aenter__(self) -> Self:
        """Run in a task of its own, as a part of another program, which asks `healthy`; leaving the block stops it.

        Raises what `run` does if no retry can fix it, such as an unknown inbox; without a connection it goes on trying.
        """
        tried = asyncio.Event()
        self._on_first_try = tried.set
        self._task = asyncio.create_task(self._run_in_task(), name=f"mailroom-worker-{self.inbox}")
        try:
            await tried.wait()
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if self._ended_by is not None:
            await self._task
            raise self._ended_by
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """Let the batches finish; raises the error of a worker that has ended, unless the block raises one."""
        self.stop()
        if self._task is not None:
            await self._task
        if kind is None and self._ended_by is not None:
            raise self._ended_by

    async def _run_in_task(self) -> None:
        try:
            await self.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the event loop at once
            if error is not self._ended_by:
                raise

    async def _open(self) -> None:
        if not self._is_open:
            with connecting():
                self._transactions = await async_transactions(
                    self._source, self.inbox, self._options.parallel, self._options.listen_to
                )
            self._home = self._transactions.home
            self._is_open = True
        async with self._begin() as connection:
            await run_async(connection, self._visiting(connection))

    @contextlib.asynccontextmanager
    async def _begin(self, *, failing: bool = False) -> AsyncIterator[Any]:
        """Begin a transaction, or raise `NotConnected`."""
        async with contextlib.AsyncExitStack() as transaction:
            with self._getting():
                connection = await transaction.enter_async_context(self._transactions.begin(failing=failing))
            yield connection

    async def _work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""
        running = self._batch_of(batch, entry)
        if self._overtime is None:
            await running
            return
        turn = batch.run.turn = HandlerTurn()
        left = await self._overtime.bound(running, turn, partial(self._end, batch, entry), cancel=True)
        if left is not None:
            await self._transactions.spare(1)
            left = asyncio.create_task(self._coming_back(left))
            self._left.add(left)
            left.add_done_callback(self._left.discard)
            turn.check()

    async def _coming_back(self, left: "asyncio.Future[None]") -> None:
        await asyncio.wait((left,))
        if not left.cancelled():
            left.exception()
        await self._transactions.spare(-1)

    async def _batch_of(self, batch: Batch, entry: Entry) -> None:
        async with self._in_flight.removing_async(entry, batch):
            async with self._begin(failing=batch.due) as connection:
                await run_async(connection, self._claiming(batch, connection))
                if (taken := batch.taken) is None or not taken.messages:
                    return
                entry.place = taken.place
                add = partial(self._in_flight.add, entry, taken.messages, due=batch.due, entries=taken.order.entries)
                await self._in_flight.run_in_thread(add)
                try:
                    with batch.run.handling(taken, whole=self._whole) as turns:
                        for given in turns:
                            await self._handler(given, connection)
                    await run_async(connection, self._ending(batch), prepared=False)
                    with batch.committing():
                        await self._transactions.commit(connection)
                except TimedOut:
                    raise
                except Exception as error:
                    if not self._patience.forgives(error, batch):
                        with contextlib.suppress(psycopg.Error):
                            batch.end.recorded = await self._in_flight.run_in_thread(
                                self._in_flight.replace, entry, self._blaming(batch, error)
                            )
                    raise
            self._patience.handled(batch)
            batch.committed()

    async def _report(self, message: Message | None, error: Exception) -> None:
        """Call the user's `on_error`, and await the result if it is awaitable."""
        if self._on_error is not None:
            reported = self._on_error(message, error)
            if inspect.isawaitable(reported):
                await reported

    async def _within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""
        async with self._begin() as connection:
            return await run_async(connection, operation)


def limit(worker: Worker | AsyncWorker, timeout_s: float | None) -> None:
    """Let a worker that was given no `timeout_s` have this one."""
    if worker._options.timeout_s is None:
        worker._options = replace(worker._options, timeout_s=timeout_s)


def home_of(worker: Worker | AsyncWorker) -> Callable[[], Home]:
    """Return what says where a worker's database is, once it has connected."""
    return lambda: worker._home
