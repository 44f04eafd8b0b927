"""Flow: the whole path at once, from the first COPY until the last message is reaped and committed.

One process publishes by COPY in batches of 1,000, encoding included; the dispatcher daemon delivers; two Worker
processes with an empty handler reap in batches of up to 1,000. All of it, and the server, share the machine's cores.
The floor is the sorted INSERT..SELECT of as many rows with the machine to itself.
"""

import time

from . import floors
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline


def flow_rate(node: Node, messages: int) -> float:
    """Return the rate of the whole path."""
    with Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.work(2)
        pipeline.publish(messages)
        start = time.monotonic()
        return messages / (pipeline.wait_drained(messages) - start)


def _run(setup: Setup) -> Values:
    with fresh_node(setup.dsn) as node:
        floor = floors.sorted_insert_rate(node, setup.messages)
        return {"sorted INSERT..SELECT": floor, "end to end": flow_rate(node, setup.messages)}


MEASUREMENT = Measurement(
    "flow",
    "send, deliver and reap at once",
    (
        Line("sorted INSERT..SELECT"),
        Line("end to end", baseline="sorted INSERT..SELECT", bar=Bar(ratio_at_least=0.11, at_least=30_000)),
    ),
    _run,
)
