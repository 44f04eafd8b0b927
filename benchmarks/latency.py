"""Latency: from the moment a writer asks for COMMIT until its message's handler is called, at 200 messages/s.

The system is idle otherwise: one writer, the dispatcher daemon and one Worker. Messages go out by a timetable, so a
slow one does not make the next ones late on paper. The commit itself is part of the time, because a writer that took
the time after it would have missed what the dispatcher had already begun. The first half second is not counted.
"""

import time
from ctypes import c_double
from multiprocessing.sharedctypes import RawArray
from typing import Any, cast

import psycopg

from benchmarks.clients import PROCESSES
from benchmarks.measure import Bar, Line, Measurement, Setup, Values
from benchmarks.node import Node, fresh_node
from benchmarks.pipeline import Count, Handler, Pipeline
from benchmarks.workload import INBOX, number, outgoing
from inbox import Message
from outbox import Outbox

PER_SECOND = 200
WARM_UP = 100
AT_MOST = 2_000


def noting(count: Count, handled: "Any") -> Handler:
    """Return a handler that notes when each message reached it."""

    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        now = time.monotonic()
        handled[number(cast(dict[str, Any], message.value))] = now
        count.add(1)

    return handle


def _write(node: Node, messages: int, committed: "Any") -> None:
    outbox = Outbox(node.schema)
    ready = list(outgoing(messages))
    with node.connect() as connection:
        start = time.monotonic()
        for nth, message in enumerate(ready):
            time.sleep(max(0.0, start + nth / PER_SECOND - time.monotonic()))
            outbox.send(connection, INBOX, message.value, key=message.key)
            committed[nth] = time.monotonic()
            connection.commit()


def _run(setup: Setup) -> Values:
    messages = min(AT_MOST, setup.messages) + WARM_UP
    committed, handled = RawArray(c_double, messages), RawArray(c_double, messages)
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.work(1, noting, handled)
        writer = PROCESSES.Process(target=_write, args=(node, messages, committed), daemon=True)
        writer.start()
        pipeline.wait_handled(messages)
        writer.join()
    waits_ms = [(after - before) * 1_000 for before, after in zip(committed, handled, strict=True)]
    counted = sorted(waits_ms[WARM_UP:])
    return {"p50": counted[len(counted) // 2], "p99": counted[len(counted) * 99 // 100]}


MEASUREMENT = Measurement(
    "latency",
    "commit to handler at 200 messages/s",
    (Line("p50", unit="ms", bar=Bar(at_most=4)), Line("p99", unit="ms", bar=Bar(at_most=15))),
    _run,
)
