"""Three nodes that all read each other: inboxes in total order beside plain ones.

Each node publishes a third of the messages, and has a worker that handles all of them. A node gives out in total order
what the other two can no longer precede.
"""

import time
from contextlib import ExitStack

from mailroom.registry.inboxes import Order

from .linked import FAR, link, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import fresh_node
from .pipeline import Pipeline

NAMES = ("first", "second", "third")


def _rate(setup: Setup, order: Order) -> float:
    """Return the messages that are handled per second, at all nodes together."""
    each = setup.messages // len(NAMES)
    total = each * len(NAMES)
    with ExitStack() as running:
        nodes = {name: running.enter_context(fresh_node(setup.dsn, order)) for name in NAMES}
        pipelines = [running.enter_context(Pipeline(node)) for node in nodes.values()]
        for name, node in nodes.items():
            link({other: nodes[other] for other in NAMES if other != name}, name, node, with_own=True)
        for name, pipeline in zip(NAMES, pipelines, strict=True):
            pipeline.dispatch({other: setup.dsn for other in NAMES if other != name})
        wait_asked(pipelines[0], nodes, readers=len(NAMES) - 1)
        for pipeline in pipelines:
            pipeline.work(1)
        began = time.monotonic()
        for pipeline in pipelines:
            pipeline.publish(each, topic=FAR)
        ended = max(pipeline.wait_handled(total).time_s for pipeline in pipelines)
    return len(NAMES) * total / (ended - began)


def _run(setup: Setup) -> Values:
    return {"plain inboxes": _rate(setup, "key"), "total order": _rate(setup, "total")}


MEASUREMENT = Measurement(
    "ring",
    "three nodes that read each other, in total order",
    (Line("plain inboxes"), Line("total order", baseline="plain inboxes", bar=Bar(ratio_at_least=0.5))),
    _run,
)
