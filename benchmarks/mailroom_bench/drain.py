"""Drain: empty a full inbox into Parquet files by `spark_jobs.drain`, beside a bare loop around `Inbox.reap_any`."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .clients import rate
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .reap import reaping
from .spark import missing_extra
from .workload import INBOX


@contextmanager
def draining(node: Node) -> Iterator[Callable[[], int]]:
    """`drain` with one lane into a directory of its own, which is removed afterwards."""
    from spark_jobs.drain import drain
    from spark_jobs.node import Node as SparkNode

    with tempfile.TemporaryDirectory(prefix="mailroom-drain-") as directory:

        def work() -> int:
            return drain(SparkNode(node.schema, node.dsn), INBOX, directory).messages

        yield work


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for name, prepare in (("reap_any, 1", reaping), ("drain, 1", draining)):
        with fresh_node(setup.dsn) as node:
            node.send(2 * setup.messages)
            node.deliver()
            values[name] = rate(prepare, node)
    return values


MEASUREMENT = Measurement(
    "drain",
    "reap a full inbox into Parquet, twice the messages",
    (
        Line("reap_any, 1"),
        Line("drain, 1", baseline="reap_any, 1", bar=Bar(at_least=50_000)),
    ),
    _run,
    missing_extra,
)
