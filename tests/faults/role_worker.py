"""Workers, sync and async: the handler writes the ledger in the batch's own transaction, and fails in every way."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from inbox import AsyncBatchHandler, AsyncWorker, BatchHandler, Message, Park, Retry, Skip, Worker
from tests.faults.actors import USED_UP_S
from tests.faults.ledger import PROBE, READ, REAPED, SEEN
from tests.faults.load import ENDING, KILLING, POISON, READERS, RUDE
from tests.faults.role import Control, rest
from tests.faults.task import Task

BATCH = 40
LANES = 2
# One of the two workers of each inbox has a handler of whole batches, with a pool of its program or without.
BY_BATCH = frozenset({"worker-a1", "worker-b2", "worker-d1", "worker-v2"})
ENDS = (b"COMMIT", b"ROLLBACK", b"COMMIT AND CHAIN", b"ROLLBACK AND CHAIN", b"PREPARE TRANSACTION 'faults'")


class Refused(Exception):
    """A handler's own failure."""


class Final(Exception):
    """A failure that no further attempt mends."""


# The time-out is short, so that it is met while others have the connections.
POOL: dict[str, Any] = {"min_size": LANES, "max_size": LANES, "timeout": 0.5}
SETTINGS: dict[str, Any] = {"parallel": LANES, "batch": BATCH, "fatal": (Final,), "handle_signals": True}


def play(task: Task, control: Control) -> None:
    """Work until told to stop; inboxes named `b..` are worked on by async workers."""
    handler = Handler(task)
    settings = SETTINGS | {"poll_interval_s": task.habits.poll_s}
    handle: Any = BatchHandler(handler.handle_whole) if task.name in BY_BATCH else handler.handle
    if task.inbox.startswith("b"):
        asyncio.run(_work(task, control, handler, settings))
    elif not has_pool(task):
        Worker(task.dsn, task.inbox, handle, **settings).run()
    else:
        with ConnectionPool(task.dsn, configure=partial(_isolate, task), open=True, **POOL) as pool:
            control.use_up = partial(_use_up, pool)
            Worker(pool, task.inbox, handle, **settings).run()


def has_pool(task: Task) -> bool:
    """Whether a worker works on a pool of its program, and not on sessions of its own."""
    return task.role == "worker" and task.name.endswith("2")


async def _work(task: Task, control: Control, handler: "Handler", settings: dict[str, Any]) -> None:
    handle: Any = handler.handle_async
    if task.name in BY_BATCH:
        handle = AsyncBatchHandler(handler.handle_whole_async)
    if not has_pool(task):
        await AsyncWorker(task.dsn, task.inbox, handle, **settings).run()
        return
    loop = asyncio.get_running_loop()
    async with AsyncConnectionPool(task.dsn, configure=partial(_isolate_async, task), **POOL) as pool:
        control.use_up = lambda seconds: asyncio.run_coroutine_threadsafe(_use_up_async(pool, seconds), loop).result()
        await AsyncWorker(pool, task.inbox, handle, **settings).run()


def _use_up(pool: ConnectionPool, seconds: float) -> None:
    with contextlib.ExitStack() as taken:
        for _ in range(LANES):
            taken.enter_context(pool.connection(timeout=USED_UP_S))
        rest(seconds)


async def _use_up_async(pool: AsyncConnectionPool, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as taken:
        for _ in range(LANES):
            await taken.enter_async_context(pool.connection(timeout=USED_UP_S))
        await asyncio.sleep(seconds)


def _isolate(task: Task, connection: psycopg.Connection[Any]) -> None:
    connection.isolation_level = isolation_level(task)


async def _isolate_async(task: Task, connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.set_isolation_level(isolation_level(task))


def isolation_level(task: Task) -> psycopg.IsolationLevel:
    """Return the isolation level of a task."""
    return psycopg.IsolationLevel[task.isolation.upper().replace(" ", "_")]


# What a handler of the database does that always ends so, by the second part of the key.
RUDENESS = {
    "ends": "SELECT pg_terminate_backend(pg_backend_pid())",
    "locked": "DO $$ BEGIN RAISE SQLSTATE '55P03'; END $$",
    "conflict": "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$",
}


class Handler:
    """Writes what it was given into the ledger, or fails as the dice say."""

    def __init__(self, task: Task) -> None:
        self._inbox = task.inbox
        self._failing = task.habits.failing
        self._random = random.Random(task.seed)

    def handle(self, message: Message, connection: psycopg.Connection[Any]) -> None:
        """Handle one message."""
        self.handle_whole([message], connection)

    def handle_whole(self, messages: list[Message], connection: psycopg.Connection[Any]) -> None:
        """Handle a batch; if it fails, each of its messages comes by itself."""
        for statement, values in self._told(messages):
            connection.execute(statement, values)
        for message in messages:
            if self._fate(message) == "swallow":
                # As a careless handler does: its transaction is lost, and it returns as if it were not.
                with contextlib.suppress(psycopg.errors.DivisionByZero):
                    connection.execute("SELECT 1 / 0")

    async def handle_async(self, message: Message, connection: psycopg.AsyncConnection[Any]) -> None:
        """Handle one message."""
        await self.handle_whole_async([message], connection)

    async def handle_whole_async(self, messages: list[Message], connection: psycopg.AsyncConnection[Any]) -> None:
        """Handle a batch; if it fails, each of its messages comes by itself."""
        for statement, values in self._told(messages):
            await connection.execute(statement, values)
        for message in messages:
            if self._fate(message) == "swallow":
                with contextlib.suppress(psycopg.errors.DivisionByZero):
                    await connection.execute("SELECT 1 / 0")

    def _told(self, messages: list[Message]) -> Iterator[tuple[bytes, list[object]]]:
        """Yield what writes the ledger, and what the keys of the messages ask for."""
        assert all(each.value["id"] == str(each.id) for each in messages), "a value belongs to another message"
        columns: list[object] = [[each.id for each in messages], [each.key for each in messages],
                                 [each.clock for each in messages]]  # fmt: skip
        if self._inbox in READERS:
            yield READ.encode(), [[self._inbox] * len(messages), *columns]
        else:
            yield REAPED.encode(), [self._inbox, *columns]
        for message in messages:
            if message.key.startswith(PROBE):
                yield SEEN.encode(), [message.id, self._inbox]
            if message.key.startswith(RUDE):
                yield RUDENESS[message.key.split("-")[1]].encode(), []
            if message.key.startswith(ENDING):
                yield self._random.choice(ENDS), []

    def _fate(self, message: Message) -> str:
        if message.key.startswith(PROBE):
            return "handled"
        if message.key.startswith(KILLING):
            os.kill(os.getpid(), signal.SIGKILL)
        if message.key.startswith(POISON):
            raise (Refused, Final, Park)[message.clock % 3]("poison")
        if self._random.random() >= self._failing:
            return "handled"
        match self._random.randrange(5):
            case 0:
                raise Refused("this time")
            case 1:
                raise Retry(self._random.uniform(0, 0.1))
            case 2:
                raise Skip("not wanted")
            case 3:
                return "swallow"
        raise psycopg.errors.CheckViolation("of the handler's own")
