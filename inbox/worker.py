"""Workers: services that reap an inbox, one transaction per batch, as long as they run."""

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import psycopg

from inbox.claim import Share, finding
from inbox.failure import recording
from inbox.inbox import AsyncInbox, Inbox
from inbox.sleeping import InboxBell
from inbox.source import AsyncSource, AsyncTransactions, Source, Transactions, async_transactions, transactions
from mailroom import backoff
from mailroom import schema as node
from mailroom.bell import heard
from mailroom.errors import ConfigurationError
from mailroom.message import Message
from mailroom.names import DEFAULT_SCHEMA
from mailroom.operation import Operation
from mailroom.transaction import run, run_async

log = logging.getLogger("mailroom.worker")

LONGEST_PAUSE_S = 10.0
# Not the handler's fault, and gone when the transaction is tried again: serialization, deadlock, lock timeout.
RETRIED = frozenset({"40001", "40P01", "55P03"})


class Dispatches(Protocol):
    """What a worker that delivers by itself runs beside its lanes: a `dispatcher.Dispatcher`."""

    async def run(self) -> None:
        """Deliver while no other leads, until stopped."""
        ...

    def stop(self) -> None:
        """Return from `run`."""
        ...


@dataclass(slots=True)
class _Attempt:
    """One batch, and how far it came: the message being handled is the one that failed."""

    taken: int = 0
    message: Message | None = None
    lost: bool = False

    @contextlib.contextmanager
    def handling(self, message: Message, connection: Any) -> Iterator[None]:
        """Call the handler within."""
        self.message = message
        try:
            yield
        except Exception:
            # Asked here: what a handler failed on, an engine closes afterwards as a matter of course.
            self.lost = bool(getattr(connection, "closed", False) or getattr(connection, "invalidated", False))
            raise


class _Service(ABC):
    """What both flavours share: the lanes, how they sleep and are woken, stopping, failures."""

    def __init__(
        self, name: str, schema: str, parallel: int, batch: int, poll_interval_s: float, dispatch: bool,
        listen_dsn: str | None,
    ) -> None:  # fmt: skip
        for value, what in ((parallel, "parallel"), (batch, "batch")):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000:
                raise ConfigurationError(f"{what} is {value!r}; give an int from 1 to 10,000.")
        if not poll_interval_s > 0:
            raise ConfigurationError(f"poll_interval_s is {poll_interval_s!r}; give seconds above 0.")
        self._name = name
        self._schema = schema
        self._parallel = parallel
        self._batch = batch
        self._poll_interval_s = poll_interval_s
        self._dispatch = dispatch
        self._listen_dsn = listen_dsn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let every lane finish its batch and return from `run`; safe from any thread, at any time, twice."""
        if self._loop is None:
            self._stopping.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: `run` has ended
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, dsn: str) -> None:
        self._loop = asyncio.get_running_loop()
        bell = InboxBell(dsn, self._schema, self._name)
        with self._signals(self._loop):
            lanes = [asyncio.create_task(self._lane(bell)) for _ in range(self._parallel)]
            beside = [asyncio.create_task(bell.run())]
            dispatcher = _dispatcher(dsn, self._schema, self._poll_interval_s) if self._dispatch else None
            if dispatcher is not None:
                beside.append(asyncio.create_task(dispatcher.run()))
            tasks = [*lanes, *beside, asyncio.create_task(self._stopping.wait())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                self._stopping.set()  # also when one of them failed: the others finish their batches
                bell.ring()
                await asyncio.wait(lanes)
                if dispatcher is not None:
                    dispatcher.stop()
                    await asyncio.wait(beside[1:])
            finally:
                # What still runs is the bell; or, if this was cancelled, everything.
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        for task in (*lanes, *beside):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Any:
        # Only the main thread may; elsewhere whoever started the thread calls stop().
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _lane(self, bell: InboxBell) -> None:
        size, failures = self._batch, 0
        while not self._stopping.is_set():
            attempt = _Attempt()
            try:
                if await self._work(attempt, size) < size:
                    # Less than was asked for: asleep first, then the scan that finds what came meanwhile.
                    with bell.sleeper():
                        ring = bell.next_ring()
                        await bell.asleep(self._poll_interval_s)
                        attempt = _Attempt()
                        if not await self._work(attempt, size) and not self._stopping.is_set():
                            await heard(ring, self._poll_interval_s)
                size, failures = self._batch, 0
            except Exception as error:
                if attempt.message is not None and not _passing(error, attempt):
                    await self._failed(attempt.message, error)
                elif attempt.taken > 1 and not _passing(error, attempt):
                    size = 1  # the commit failed, and nobody knows for which: find it by going one by one
                elif _passing(error, attempt):
                    failures += 1
                    log.warning("%s: trying the batch again (%s)", self._name, type(error).__name__)
                    await self._pause(backoff.pause_s(failures, LONGEST_PAUSE_S))
                else:
                    raise

    async def _failed(self, message: Message, error: Exception) -> None:
        try:
            attempts = await self._record(message, error)
        except Exception as trouble:
            if not _passing(trouble, _Attempt()):
                raise
            log.warning("%s: no attempt recorded of %s (%s)", self._name, message.id, type(trouble).__name__)
        else:
            # Not the error's text: it may hold what the message holds.
            log.warning("%s: %s failed, attempt %d: %s", self._name, message.id, attempts, type(error).__name__)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _share(self, size: int) -> Share:
        return Share(keys=size, per_key=size, total=size)

    def _start(self) -> Operation[None]:
        yield from node.checking(self._schema)
        yield from finding(self._schema, self._name)

    @abstractmethod
    async def _work(self, attempt: _Attempt, size: int) -> int:
        """Claim, handle and commit one batch; returns how many messages it had."""

    @abstractmethod
    async def _record(self, message: Message, error: Exception) -> int:
        """Record a failed attempt in a transaction of its own."""


def _passing(error: Exception, attempt: _Attempt) -> bool:
    """Tell whether it is the trouble of the database or of our connection to it, and not the message's."""
    cause = getattr(error, "orig", None) or error
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""
    if state in RETRIED or getattr(error, "connection_invalidated", False):
        return True
    if attempt.message is not None:
        # A handler may lose connections of its own; that is a failure of its message.
        return attempt.lost
    return state[:2] in ("08", "53", "57") or isinstance(
        cause, psycopg.OperationalError | psycopg.InterfaceError | ConnectionError
    )


def _dispatcher(dsn: str, schema: str, poll_interval_s: float) -> Dispatches:
    # Handed in by entry point, since the consumer's side does not import the dispatcher.
    [found] = entry_points(group="mailroom.dispatcher", name="dispatcher")
    made: Dispatches = found.load()(dsn, schema, poll_interval_s=poll_interval_s)
    return made


class Worker(_Service):
    """Reaps an inbox and calls `handler(message, connection)` for each message, in clock order along each key.

    A batch of up to `batch` messages is one transaction, and what the handler does on `connection` is part of it: the
    messages are consumed if and only if it commits. `parallel` batches run at once, each in a thread of its own, never
    two on one key. If the handler raises, the batch is rolled back, and the message's key is tried again after a
    back-off (`inbox create --backoff-s`) while other keys go on. SIGTERM finishes the batches.

    `source` is a connection string, a psycopg `ConnectionPool`, a SQLAlchemy `Engine` or `sessionmaker`; the handler
    gets a connection (or session) of that kind. Waking rests on a direct connection to `listen_dsn` (by default where
    `source` points); behind a transaction pooler it is polled every `poll_interval_s`. With `dispatch=True` the worker
    also delivers when no dispatcher leads, so that a small service needs no daemon.
    """

    def __init__(
        self,
        source: Source,
        inbox: str,
        handler: Callable[[Message, Any], object],
        *,
        schema: str = DEFAULT_SCHEMA,
        parallel: int = 1,
        batch: int = 100,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
    ) -> None:
        super().__init__(inbox, schema, parallel, batch, poll_interval_s, dispatch, listen_dsn)
        if inspect.iscoroutinefunction(handler):
            raise ConfigurationError("This handler is async: use AsyncWorker for it.")
        self._inbox = Inbox(inbox, schema)
        self._source = source
        self._handler = handler
        self._transactions: Transactions
        self._threads: ThreadPoolExecutor

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or `stop`. Raises what no retry mends: no such inbox, wrong schema, bad login."""
        self._transactions = transactions(self._source, self._name, self._parallel)
        try:
            with self._transactions.begin() as connection:
                run(connection, self._start())
            with ThreadPoolExecutor(self._parallel, f"mailroom-{self._name}") as self._threads:
                asyncio.run(self._serve(self._listen_dsn or self._transactions.dsn))
        finally:
            self._transactions.close()

    async def _work(self, attempt: _Attempt, size: int) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._batch_of, attempt, size)

    def _batch_of(self, attempt: _Attempt, size: int) -> int:
        with self._transactions.begin() as connection:
            messages = run(connection, self._inbox.claiming(self._share(size)))
            attempt.taken = len(messages)
            for message in messages:
                with attempt.handling(message, connection):
                    self._handler(message, connection)
            attempt.message = messages[0] if len(messages) == 1 else None
        return attempt.taken

    async def _record(self, message: Message, error: Exception) -> int:
        def record() -> int:
            with self._transactions.begin() as connection:
                return run(connection, recording(self._schema, self._name, message, error))

        return await asyncio.get_running_loop().run_in_executor(self._threads, record)


class AsyncWorker(_Service):
    """`Worker` for async handlers and sources: `AsyncConnectionPool`, `AsyncEngine`, `async_sessionmaker`, or a DSN."""

    def __init__(
        self,
        source: AsyncSource,
        inbox: str,
        handler: Callable[[Message, Any], Awaitable[object]],
        *,
        schema: str = DEFAULT_SCHEMA,
        parallel: int = 1,
        batch: int = 100,
        poll_interval_s: float = 1.0,
        dispatch: bool = False,
        listen_dsn: str | None = None,
    ) -> None:
        super().__init__(inbox, schema, parallel, batch, poll_interval_s, dispatch, listen_dsn)
        self._inbox = AsyncInbox(inbox, schema)
        self._source = source
        self._handler = handler
        self._transactions: AsyncTransactions

    async def run(self) -> None:
        """See `Worker.run`."""
        self._transactions = await async_transactions(self._source, self._name, self._parallel)
        try:
            async with self._transactions.begin() as connection:
                await run_async(connection, self._start())
            await self._serve(self._listen_dsn or self._transactions.dsn)
        finally:
            await self._transactions.close()

    async def _work(self, attempt: _Attempt, size: int) -> int:
        async with self._transactions.begin() as connection:
            messages = await run_async(connection, self._inbox.claiming(self._share(size)))
            attempt.taken = len(messages)
            for message in messages:
                with attempt.handling(message, connection):
                    await self._handler(message, connection)
            attempt.message = messages[0] if len(messages) == 1 else None
        return attempt.taken

    async def _record(self, message: Message, error: Exception) -> int:
        async with self._transactions.begin() as connection:
            return await run_async(connection, recording(self._schema, self._name, message, error))
