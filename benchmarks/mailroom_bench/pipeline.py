"""A node's own processes, as a service runs them: a dispatcher daemon, workers, and a publisher that feeds them."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from ctypes import c_longlong
from dataclasses import dataclass, field
from itertools import islice
from math import nan
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeAlias, cast

import psycopg

from dispatcher import daemon
from inbox import AsyncWorker, Message, Worker
from mailroom.errors import MailroomError
from mailroom.links.service import variable
from outbox import Outbox

from .clients import PROCESSES
from .floors import BATCH
from .node import Node
from .processor import used_by_s
from .workload import INBOX, KEYS, outgoing

Handler: TypeAlias = Callable[[Message, psycopg.Connection[Any]], None]

WORKER_BATCH = 1_000
AHEAD = 20_000  # messages that a publisher is ahead of the workers, at most
PUBLISHER = "bench publisher"
_LOOK_S = 0.002
_STALLED_S = 60.0
_END_S = 15.0


class Count:
    """A counter that one process increments and others read."""

    def __init__(self) -> None:
        self._cell = RawValue(c_longlong, 0)

    @property
    def value(self) -> int:
        """The current value."""
        return int(self._cell.value)

    def add(self, number: int) -> None:
        """Increment it."""
        self._cell.value += number


@dataclass(frozen=True, slots=True)
class Mark:
    """How many messages were handled at a monotonic time, in seconds."""

    time_s: float
    handled: int


def rate_between(before: Mark, after: Mark) -> float:
    """Return the rate between two marks; NaN if both fell into one batch: then there are too few messages."""
    count = after.handled - before.handled
    return count / (after.time_s - before.time_s) if count else nan


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a publisher may be ahead of its readers, each of whom handles all messages; None: as far as it can.

    `handled` are the counters of the readers' processes, and `sent` counts the messages that it has committed.
    """

    handled: list[Count]
    ahead: int | None = None
    readers: int = 1
    sent: Count = field(default_factory=Count)

    def keep(self) -> None:
        """Wait until there is room for a batch."""
        while (
            self.ahead is not None
            and self.sent.value - sum(count.value for count in self.handled) // self.readers > self.ahead
        ):
            time.sleep(_LOOK_S)


def counting(count: Count) -> Handler:
    """Return a handler that only counts."""

    def handle(_message: Message, _connection: psycopg.Connection[Any]) -> None:
        count.add(1)

    return handle


class Pipeline:
    """The processes of one run, ended with the `with` block. `handled` counts the messages handled so far.

    If they are `metered`, the dispatcher and the workers count their metrics.
    """

    def __init__(self, node: Node, *, metered: bool = False) -> None:
        self.node = node
        self._is_metered = metered
        self.publisher: BaseProcess | None = None
        self.dispatcher: BaseProcess | None = None
        self.workers: list[BaseProcess] = []
        self._counts: list[Count] = []
        self._processes: list[BaseProcess] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def handled(self) -> int:
        """Messages handled by all workers."""
        return sum(count.value for count in self._counts)

    def dispatch(
        self, sources: Mapping[str, str] | None = None, begin: Callable[..., object] | None = None, *arguments: object
    ) -> None:
        """Start a dispatcher daemon; return when all three of its lanes lead.

        `sources` are the connection strings of the nodes that it reads, by their names. `begin(*arguments)` is called
        in its process first.
        """
        self.dispatcher = self.start(_dispatch, self.node, self._is_metered, dict(sources or {}), begin, *arguments)
        with self.node.connect(autocommit=True) as connection:
            leases = f"SELECT count(*) FROM {self.node.schema}.lease WHERE until > clock_timestamp()".encode()
            self.wait(lambda: connection.execute(leases).fetchone() == (3,))

    def work(
        self,
        workers: int,
        handling: Callable[..., Handler] = counting,
        *arguments: object,
        batch: int = WORKER_BATCH,
        inbox: str = INBOX,
        on_a_loop: bool = False,
    ) -> None:
        """Start worker processes with the handler that `handling(count, *arguments)` returns; do not wait for them.

        Each is a `Worker`, or an `AsyncWorker` `on_a_loop` of its own.
        """
        work = _work_on_a_loop if on_a_loop else _work
        for _ in range(workers):
            self.workers.append(
                self.start(work, self.node, self._is_metered, inbox, batch, handling, self.counted(), *arguments)
            )

    def publish(
        self, messages: int, keys: int = KEYS, ahead: int | None = None, topic: str = INBOX, readers: int = 1
    ) -> Count:
        """Start a process that sends messages by COPY in batches of 1,000; return when it begins.

        It stays at most `ahead` messages ahead of the workers, so that it publishes as long as they reap; they are the
        workers of so many `readers`. What is returned counts the messages that it has committed.
        """
        began, pace = Count(), self.pace(ahead, readers)
        self.publisher = self.start(_publish, self.node, messages, keys, topic, began, pace)
        self.wait(lambda: began.value > 0)
        return pace.sent

    def pace(self, ahead: int | None, readers: int = 1) -> Pace:
        """Return the pace of a publisher that stays so many messages ahead of the processes counted so far."""
        return Pace(self._counts, ahead, readers)

    def wait(self, done: Callable[[], bool]) -> float:
        """Wait until `done()` and return the monotonic time; fail if a process died or nothing is handled for long."""
        handled, seen = -1, time.monotonic()
        while not done():
            now = time.monotonic()
            if self.handled != handled:
                handled, seen = self.handled, now
            if now - seen > _STALLED_S or any(process.exitcode not in (None, 0) for process in self._processes):
                raise MailroomError(
                    f"The measurement stopped after {self.handled:,} messages: a process of it ended or hangs. "
                    "Look at what it printed above, and try again with --only and fewer --messages.",
                    code="MR-bench-failed",
                )
            time.sleep(_LOOK_S)
        return time.monotonic()

    def wait_handled(self, messages: int) -> Mark:
        """Wait until so many are handled."""
        reached = self.wait(lambda: self.handled >= messages)
        return Mark(reached, self.handled)

    def wait_drained(self, messages: int) -> float:
        """Wait until so many are handled and none is left, and return the monotonic time."""
        self.wait_handled(messages)
        return self.wait(self.node.is_drained)

    def sessions(self, *roles: str) -> dict[int, str]:
        """Return the server's process ids for the sessions whose names begin with one of these roles, each with it."""
        with self.node.connect(autocommit=True) as connection:
            rows = connection.execute(
                "SELECT pid, role FROM pg_stat_activity, unnest(%s::text[]) AS role "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name ^@ role",
                [list(roles)],
            ).fetchall()
        return dict(rows)

    def used_s(self, *roles: str) -> dict[int, float]:
        """Return the seconds of processor time of these processes and of the server's for the sessions of these roles.

        They are given by process id.
        """
        return used_by_s([*(each.pid for each in self._processes if each.pid), *self.sessions(*roles)])

    def counted(self) -> Count:
        """Return a new counter, which `handled` counts too."""
        count = Count()
        self._counts.append(count)
        return count

    def start(self, target: Callable[..., object], *arguments: object) -> BaseProcess:
        """Start a process."""
        process = PROCESSES.Process(target=target, args=arguments, daemon=True)
        process.start()
        self._processes.append(process)
        self._stack.callback(_end, process)
        return process


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()


def _meter(node: Node, is_metered: bool) -> None:
    if is_metered:
        # Here, since a checkout that is measured beside this one may have no metrics.
        from mailroom.metrics.process import ProcessMetrics

        ProcessMetrics(node.schema).listen()


def _dispatch(
    node: Node, is_metered: bool, sources: Mapping[str, str], begin: Callable[..., object] | None, *arguments: object
) -> None:
    _meter(node, is_metered)
    if begin is not None:
        begin(*arguments)
    # In the process of its own, so that no other one has the passwords in its environment.
    os.environ.update({variable(name): dsn for name, dsn in sources.items()})
    daemon.run(node.dsn, schema=node.schema)


def _work(
    node: Node, is_metered: bool, inbox: str, batch: int, handling: Callable[..., Handler], *arguments: object
) -> None:
    _meter(node, is_metered)
    Worker(node.dsn, inbox, handling(*arguments), schema=node.schema, batch=batch).run()


def _work_on_a_loop(
    node: Node, is_metered: bool, inbox: str, batch: int, handling: Callable[..., Handler], *arguments: object
) -> None:
    _meter(node, is_metered)
    handle = handling(*arguments)

    async def handle_there(message: Message, connection: psycopg.AsyncConnection[Any]) -> None:
        handle(message, cast(Any, connection))  # no handler of ours uses it

    asyncio.run(AsyncWorker(node.dsn, inbox, handle_there, schema=node.schema, batch=batch).run())


def _publish(node: Node, messages: int, keys: int, topic: str, began: Count, pace: Pace) -> None:
    outbox = Outbox(schema=node.schema)
    ready = outgoing(messages, keys, topic)
    with node.connect(role=PUBLISHER) as connection:
        began.add(1)
        while batch := list(islice(ready, BATCH)):
            pace.keep()
            outbox.send_many(connection, batch)
            connection.commit()
            pace.sent.add(len(batch))


def reap_rate(pipeline: Pipeline, messages: int) -> float:
    """Return the rate at which the workers handle that many messages.

    The start of the workers is not counted, nor are the messages they handled before the first reading.
    """
    first = pipeline.wait_handled(1)
    return rate_between(first, pipeline.wait_handled(messages))
