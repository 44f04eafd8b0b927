"""The rate through a link: a full outbox is stamped at one node and received at another at the same time.

Each node has its daemon. The same daemon delivers as many messages into an inbox of its own node for comparison. Both
sleep until a last message is committed, which wakes them; the time begins there, and ends when the last message can be
claimed.
"""

import time

from mailroom import subscribe

from .linked import FAR, link, received, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline
from .workload import INBOX


def _ring(node: Node) -> float:
    began = time.monotonic()
    node.execute(f"INSERT INTO {node.outbox} (topic, value) VALUES ('{FAR}', '\\xf6')")
    return began


def _delivered(setup: Setup) -> float:
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        with node.connect() as connection:
            subscribe(connection, INBOX, FAR, schema=node.schema)
        pipeline.dispatch()
        node.send(setup.messages, topic=FAR)
        began = _ring(node)
        left = f"SELECT EXISTS (SELECT FROM {node.outbox})".encode()
        with node.connect(autocommit=True) as connection:
            ended = pipeline.wait(lambda: connection.execute(left).fetchone() == (False,))
    return setup.messages / (ended - began)


def _carried(setup: Setup) -> float:
    with (
        fresh_node(setup.dsn) as source, fresh_node(setup.dsn) as target,
        Pipeline(source) as sending, Pipeline(target) as pipeline,
    ):  # fmt: skip
        link({"source": source}, "target", target)
        pipeline.dispatch({"source": source.dsn})
        wait_asked(pipeline, {"source": source})
        sending.dispatch()
        source.send(setup.messages, topic=FAR)
        began = _ring(source)
        return setup.messages / (pipeline.wait(lambda: received(target) > setup.messages) - began)


def _run(setup: Setup) -> Values:
    return {"one node": _delivered(setup), "two nodes": _carried(setup)}


MEASUREMENT = Measurement(
    "links-rate",
    "a full outbox to an inbox of another node",
    (Line("one node"), Line("two nodes", baseline="one node", bar=Bar(ratio_at_least=0.7))),
    _run,
)
