"""Requests: how long `ask` waits for an answer, at 50/s on an idle system, and until 200 at once are answered.

One process asks; another one runs a worker with `Handlers`, and a third the dispatcher. Requests are sent on a schedule
by several threads, so a slow one does not delay the next. The first second is not counted.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from inbox import Handlers, Message, Requests
from mailroom import create_inbox

from .latency import percentile
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Count, Handler, Pipeline
from .workload import INBOX

REPLIES = "bench_replies"
PER_SECOND = 50
WARM_UP = 50
AT_MOST = 500
AT_ONCE = 200
TIMEOUT_S = 60.0


def answering(count: Count, schema: str) -> Handler:
    """Return a handler that answers each command with its value."""
    handlers = Handlers(schema=schema)

    @handlers.on(INBOX)
    def answer(message: Message, _connection: psycopg.Connection[Any]) -> object:
        count.add(1)
        return message.value

    return handlers


def _waits_ms(requests: Requests, number: int) -> list[float]:
    start = time.monotonic()

    def ask(nth: int) -> float:
        time.sleep(max(0.0, start + nth / PER_SECOND - time.monotonic()))
        began = time.monotonic()
        requests.ask(INBOX, nth, timeout_s=TIMEOUT_S)
        return (time.monotonic() - began) * 1_000

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, range(number)))


def _at_once_s(requests: Requests) -> float:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        began = time.monotonic()
        asked = [threads.submit(requests.ask, INBOX, nth, timeout_s=TIMEOUT_S) for nth in range(AT_ONCE)]
        for each in asked:
            each.result()
        return time.monotonic() - began


def _run(setup: Setup) -> Values:
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        _create_inbox(node)
        pipeline.dispatch()
        pipeline.work(1, answering, node.schema)
        with Requests(node.dsn, REPLIES, schema=node.schema) as requests:
            waits = _waits_ms(requests, min(AT_MOST, setup.messages) + WARM_UP)[WARM_UP:]
            at_once_s = _at_once_s(requests)
    return {"p50": percentile(waits, 50), "p99": percentile(waits, 99), "200 at once": at_once_s}


def _create_inbox(node: Node) -> None:
    with node.connect() as connection:
        create_inbox(connection, REPLIES, schema=node.schema, expire_s=600)


MEASUREMENT = Measurement(
    "requests",
    "ask and answer at 50/s, and 200 at once",
    (
        Line("p50", unit="ms", bar=Bar(at_most=8)),
        Line("p99", unit="ms", bar=Bar(at_most=30)),
        Line("200 at once", unit="s", bar=Bar(at_most=2)),
    ),
    _run,
)
