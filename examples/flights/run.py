"""One run: flights go in, workers take them out, and a worker and the dispatcher are killed midway."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import psycopg

from mailroom.errors import MailroomError
from mailroom.session import settings

from .processes import Process, Processes
from .sending import send
from .source import Flight
from .tables import business, remake

WORKERS = 4
FLIGHTS_PER_TRANSACTION = 1_000
# The writer keeps this far ahead of the workers, so that latency tells of the path and not of a queue.
AHEAD = 2_000
# Shares of the flights handled at which somebody is killed.
KILL_WORKER_AT = 1 / 3
KILL_DISPATCHER_AT = 2 / 3
LOOK_INTERVAL_S = 0.02
STATEMENT_LIMIT_S = 60


class RunFailed(MailroomError):
    """The flights did not arrive in time, or a process ended that should not have."""

    code = "MR-demo-failed"


class Screen(Protocol):
    """Where a run shows itself."""

    def progress(self, sent: int, handled: int) -> None:
        """Show how many flights were sent and handled."""

    def event(self, text: str) -> None:
        """Show that something happened."""


def run(
    dsn: str, node: str, source: Iterator[Flight], count: int, *, logs: Path, deadline: float, screen: Screen
) -> None:
    """Send the `count` flights of `source` through `node`, made anew, and return when every one is handled.

    Raises `RunFailed` when `deadline` (of time.monotonic) passes first or when a process ends unasked.
    """
    with settings.connect(dsn, "demo", autocommit=True) as connection:
        connection.execute(f"SET statement_timeout = '{STATEMENT_LIMIT_S}s'")
        with _alone(connection, node):
            remake(dsn, node)
            with Processes(dsn, node, logs, WORKERS) as processes:
                _Run(connection, node, count, processes, deadline, screen).finish(source)


@contextmanager
def _alone(connection: psycopg.Connection, node: str) -> Iterator[None]:
    lock = [f"mailroom demo {node}"]
    row = connection.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", lock).fetchone()
    if row != (True,):
        raise RunFailed(f"Another demo runs in schema {node!r}: wait for its end, or choose another --schema.")
    yield


class _Run:
    def __init__(
        self,
        connection: psycopg.Connection,
        node: str,
        count: int,
        processes: Processes,
        deadline: float,
        screen: Screen,
    ) -> None:
        self._connection = connection
        self._node = node
        self._count = count
        self._processes = processes
        self._deadline = deadline
        self._screen = screen
        self._sent = 0
        self._handled = 0
        self._kills: list[tuple[float, Callable[[], Process]]] = [
            (KILL_WORKER_AT, self._latest_worker),
            (KILL_DISPATCHER_AT, lambda: processes.dispatcher),
        ]

    def finish(self, source: Iterator[Flight]) -> None:
        while batch := list(islice(source, FLIGHTS_PER_TRANSACTION)):
            send(self._connection, self._node, batch)
            self._sent += len(batch)
            self._look()
            while self._sent - self._handled > AHEAD:
                self._pause()
        while self._handled < self._sent or self._waiting() != (0, 0):
            self._pause()

    def _pause(self) -> None:
        time.sleep(LOOK_INTERVAL_S)
        self._look()

    def _look(self) -> None:
        # The ledger's sequence: read at once, where counting the rows takes ever longer. It runs ahead of them by what
        # was rolled back, so it does not show the end of the run.
        sequence = f"{business(self._node)}.ledger_nth_seq"
        [drawn] = self._one(f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {sequence}")
        self._handled = min(drawn, self._sent)
        self._screen.progress(self._sent, self._handled)
        self._kill_who_is_due()
        for process in self._processes.ended():
            raise RunFailed(f"The {process.name} ended by itself with exit code {process.exit_code()}.")
        if time.monotonic() > self._deadline:
            outbox, inbox = self._waiting()
            raise RunFailed(
                f"Out of time: {self._count - self._sent} flights are not sent, {outbox} wait for the dispatcher, "
                f"{inbox} for the workers."
            )

    def _kill_who_is_due(self) -> None:
        if self._kills and self._handled >= self._kills[0][0] * self._count:
            process = self._kills.pop(0)[1]()
            killed = process.pid
            process.kill()
            process.start_again()
            self._screen.event(
                f"{self._handled:,} flights handled: SIGKILL to the {process.name} ({killed}); back as {process.pid}"
            )

    def _latest_worker(self) -> Process:
        """Return the worker that was the last to commit: it is certainly at work."""
        workers = {worker.pid: worker for worker in self._processes.workers}
        latest = f"SELECT worker FROM {business(self._node)}.ledger WHERE worker = ANY(%s) ORDER BY nth DESC LIMIT 1"
        row = self._connection.execute(latest.encode(), [list(workers)]).fetchone()
        # A run of a few flights may have handled all of them and committed none yet.
        return self._processes.workers[0] if row is None else workers[row[0]]

    def _waiting(self) -> tuple[int, int]:
        """Return how many messages are in the outbox and in the inbox; one statement, so none is on its way between."""
        outbox, inbox = self._one(
            f"SELECT (SELECT count(*) FROM {self._node}.outbox), (SELECT count(*) FROM {self._node}.inbox)"
        )
        return outbox, inbox

    def _one(self, query: str) -> tuple[Any, ...]:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None  # noqa: S101 - each of the queries gives one row
        return row
