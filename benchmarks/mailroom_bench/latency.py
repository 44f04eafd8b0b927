"""Latency: from the moment a writer asks for COMMIT until its message's handler is called, at 200 messages/s.

The system is idle otherwise: one writer, the dispatcher daemon and one Worker. Messages are sent on a schedule, so a
slow one does not delay the next. The time includes the commit: a clock read after it would miss what the dispatcher has
begun by then. The first half second is not counted. Then again with an AsyncWorker; which of both is first changes from
run to run.
"""

import logging
import time
from collections.abc import Iterator
from ctypes import c_double
from itertools import count as counting
from multiprocessing.sharedctypes import RawArray
from typing import Any, cast

import psycopg

from inbox import Message
from outbox import Outbox

from .clients import PROCESSES
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Count, Handler, Pipeline
from .workload import INBOX, key, number, outgoing

PER_SECOND = 200
WARM_UP = 100
AT_MOST = 2_000


def recording(count: Count, handled: "Any", failing: frozenset[str]) -> Handler:
    """Return a handler that records when each message reached it, and fails for some keys."""

    logging.getLogger("mailroom").addHandler(logging.NullHandler())  # the failures are on purpose

    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        now = time.monotonic()
        if message.key in failing:
            raise ValueError("poisoned")
        handled[number(cast(dict[str, Any], message.value))] = now
        count.add(1)

    return handle


def scheduled(messages: int) -> Iterator[int]:
    """Yield the number of each message when it is time to send it."""
    start = time.monotonic()
    for nth in range(messages):
        time.sleep(max(0.0, start + nth / PER_SECOND - time.monotonic()))
        yield nth


def _write(node: Node, topic: str, messages: int, committed: "Any") -> None:
    outbox = Outbox(schema=node.schema)
    ready = list(outgoing(messages))
    with node.connect() as connection:
        for nth in scheduled(messages):
            message = ready[nth]
            outbox.send(connection, topic, message.value, key=message.key)
            committed[nth] = time.monotonic()
            connection.commit()


def waits_ms(
    setup: Setup, at_most: int = AT_MOST, failing: frozenset[str] = frozenset(), *, on_a_loop: bool = False
) -> list[float]:
    """Return the latency of each message of the healthy keys, in the order of sending."""
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        return waits_between_ms(node, pipeline, min(at_most, setup.messages), failing=failing, on_a_loop=on_a_loop)


def waits_between_ms(
    sender: Node,
    pipeline: Pipeline,
    count: int,
    *,
    topic: str = INBOX,
    failing: frozenset[str] = frozenset(),
    on_a_loop: bool = False,
) -> list[float]:
    """Send messages at one node, and have them handled in a pipeline that runs, which may be another node's."""
    messages = count + WARM_UP
    healthy = [nth for nth in range(messages) if key(nth) not in failing]
    committed, handled = RawArray(c_double, messages), RawArray(c_double, messages)
    pipeline.work(1, recording, handled, failing, on_a_loop=on_a_loop)
    writer = PROCESSES.Process(target=_write, args=(sender, topic, messages, committed), daemon=True)
    writer.start()
    pipeline.wait_handled(len(healthy))
    writer.join()
    return [(handled[nth] - committed[nth]) * 1_000 for nth in healthy if nth >= WARM_UP]


def percentile(waits: list[float], percent: int) -> float:
    """Return the percentile of the latencies."""
    return sorted(waits)[len(waits) * percent // 100]


_turn = counting()
PERCENTS = (50, 99)


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for on_a_loop in (False, True)[:: -1 if next(_turn) % 2 else 1]:
        waits = waits_ms(setup, on_a_loop=on_a_loop)
        kind = ", AsyncWorker" if on_a_loop else ""
        values |= {f"p{percent}{kind}": percentile(waits, percent) for percent in PERCENTS}
    return values


MEASUREMENT = Measurement(
    "latency",
    "commit to handler at 200 messages/s",
    (
        Line("p50", unit="ms", bar=Bar(at_most=4)),
        Line("p99", unit="ms", bar=Bar(at_most=15)),
        *(Line(f"p{percent}, AsyncWorker", "ms", f"p{percent}") for percent in PERCENTS),
    ),
    _run,
)
