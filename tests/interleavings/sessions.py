"""Sessions and named steps: a session runs its steps one by one in a thread, and may wait for another's lock in one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import psycopg

from tests.support.waiting import eventually

Step = Callable[[psycopg.Connection[Any]], object]


class Session:
    """A connection with a thread of its own. A step that waits for a lock holds up only the session's next steps."""

    def __init__(self, name: str, dsn: str, observer: psycopg.Connection[Any]) -> None:
        self.name = name
        self.connection = psycopg.connect(dsn)
        self._observer = observer
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[object] | None = None

    def start(self, step: Step) -> bool:
        """Begin a step; return whether it is done, and not waiting for a lock."""
        assert self._pending is None, f"{self.name} still waits"
        self._pending = self._thread.submit(step, self.connection)
        return self.settled()

    def settled(self) -> bool:
        """Wait until the pending step is done or waits for a lock; return whether it is done."""
        pending = self._pending
        if pending is None:
            return True
        pid = self.connection.info.backend_pid

        def state() -> str:
            if wait([pending], timeout=0.005).done:
                return "done"
            [(blockers,)] = self._observer.execute("SELECT pg_blocking_pids(%s)", [pid]).fetchall()
            return "waiting" if blockers else ""

        if eventually(state) == "waiting":
            return False
        self._pending = None
        pending.result()
        return True

    def close(self) -> None:
        self._thread.shutdown()
        self.connection.close()


@contextmanager
def sessions(dsn: str, observer: psycopg.Connection[Any], *names: str) -> Iterator[dict[str, Session]]:
    """Open a session of each name. `observer` is an autocommit connection."""
    opened = {name: Session(name, dsn, observer) for name in names}
    try:
        yield opened
    finally:
        for session in opened.values():
            session.close()


def interleave(opened: dict[str, Session], steps: Mapping[str, Sequence[Step]], order: Sequence[str]) -> None:
    """Take the steps in `order`, a session's name each. A waiting session's turn comes when it waits no more."""
    queues = {name: list(todo) for name, todo in steps.items()}
    turns = list(order)
    while turns:
        ready = [name for name in dict.fromkeys(turns) if opened[name].settled()]
        assert ready, "all of them wait"
        name = next(turn for turn in turns if turn in ready)
        turns.remove(name)
        opened[name].start(queues[name].pop(0))
    for session in opened.values():
        eventually(session.settled)


def orders(first: str, first_steps: int, second: str, second_steps: int) -> list[tuple[str, ...]]:
    """Return every order in which two sessions can take these numbers of steps."""
    turns = range(first_steps + second_steps)
    return [
        tuple(first if turn in chosen else second for turn in turns)
        for chosen in map(set, combinations(turns, first_steps))
    ]
