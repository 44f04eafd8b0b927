"""Stuck: the latency of healthy keys beside a message whose handler hangs, and beside one that kills its process.

30 keys have 30 messages a second between them. Then comes the message of another key: each time it is handled, its
handler sleeps for 40 s, or ends its process, which is started again at once. A worker with a `timeout_s` of 5 s handles
two batches at once; two workers and eight are killed. Each key has to wait for what it has been claimed with, and so
the figures are percentiles: the longest wait is as long as the time-out, or as a death goes unnoticed.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double
from multiprocessing.sharedctypes import RawArray
from typing import Any, cast

import psycopg

from inbox import Message, Worker
from mailroom.errors import MailroomError
from outbox import Outbox

from .clients import PROCESSES
from .latency import percentile
from .measure import Bar, Line, Measurement, Setup, Values
from .node import MAX_ATTEMPTS, Node, fresh_node
from .pipeline import Count, Pipeline
from .workload import INBOX, key, number, value

KEYS = 30
PER_SECOND = 30
AT_MOST = 1_350
HANGS_S = 40.0
TIMEOUT_S = 5.0
PARALLEL = 2
STUCK = "stuck"
_AFTER = 60  # messages, so that the workers have begun
_WITHIN_S = 120.0
_LOOK_S = 0.05


def _work(node: Node, hangs: bool, starts: Count, handled: Any) -> None:
    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        if message.key != STUCK:
            handled[number(cast(dict[str, Any], message.value))] = time.monotonic()
            return
        starts.add(1)  # by one process at a time, since it is one key
        if not hangs:
            os._exit(1)
        time.sleep(HANGS_S)

    logging.getLogger("mailroom").addHandler(logging.NullHandler())  # the failures are on purpose
    parallel, timeout_s = (PARALLEL, TIMEOUT_S) if hangs else (1, None)
    Worker(node.dsn, INBOX, handle, schema=node.schema, parallel=parallel, timeout_s=timeout_s).run()


@contextmanager
def _started_again(workers: int, *arguments: object) -> Iterator[None]:
    """Run workers, each again and again, as a supervisor does."""
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            process = PROCESSES.Process(target=_work, args=arguments, daemon=True)
            process.start()
            while process.is_alive() and not over.wait(_LOOK_S):
                pass
            process.kill()
            process.join()

    threads = [threading.Thread(target=keep) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _write(node: Node, messages: int, committed: Any) -> None:
    outbox = Outbox(schema=node.schema)
    with node.connect() as connection:
        began = time.monotonic()
        for nth in range(messages):
            time.sleep(max(0.0, began + nth / PER_SECOND - time.monotonic()))
            if nth == _AFTER:
                outbox.send(connection, INBOX, None, key=STUCK)
            outbox.send(connection, INBOX, value(nth), key=key(nth, KEYS))
            connection.commit()
            committed[nth] = time.monotonic()


def _waits_ms(setup: Setup, workers: int, *, hangs: bool) -> tuple[list[float], int]:
    """Return the latency of each healthy message, and how often the other one was started."""
    messages = min(AT_MOST, setup.messages)
    committed, handled, starts = RawArray(c_double, messages), RawArray(c_double, messages), Count()
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        with _started_again(workers, node, hangs, starts, handled):
            pipeline.start(_write, node, messages, committed).join()
            sent = time.monotonic()
            while not (all(handled) and node.is_drained()):
                if time.monotonic() - sent > _WITHIN_S:
                    raise MailroomError(
                        f"Messages were not handled within {_WITHIN_S:.0f} seconds.", code="MR-bench-failed"
                    )
                time.sleep(_LOOK_S)
    waits = [(at - since) * 1_000 for since, at in zip(committed, handled, strict=True)]
    return waits[_AFTER:], starts.value


def _run(setup: Setup) -> Values:
    found: dict[str, float] = {}
    for name, workers, hangs in (("hangs", 1, True), ("kills 2", 2, False), ("kills 8", 8, False)):
        waits, starts = _waits_ms(setup, workers, hangs=hangs)
        found |= {f"p99, {name}": percentile(waits, 99), f"longest, {name}": max(waits), f"starts, {name}": starts}
    return found


def _lines(name: str, p99_ms: float) -> tuple[Line, ...]:
    return (
        Line(f"p99, {name}", unit="ms", bar=Bar(at_most=p99_ms)),
        Line(f"longest, {name}", unit="ms"),
        Line(f"starts, {name}", unit="", bar=Bar(at_most=MAX_ATTEMPTS)),
    )


MEASUREMENT = Measurement(
    "stuck",
    "latency of healthy keys beside a handler that hangs or kills",
    (*_lines("hangs", 2_000), *_lines("kills 2", 3_500), *_lines("kills 8", 3_500)),
    _run,
)
