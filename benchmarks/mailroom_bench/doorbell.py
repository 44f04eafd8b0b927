"""Doorbell: what waking a dispatcher costs writers: 16 clients, each sending one message per transaction.

The same clients run three times on the same table, emptied before: with the trigger disabled; with "awake" held, as by
a dispatcher that delivers; with nobody awake, so that every commit sends a NOTIFY.
"""

from . import publish
from .clients import rate_of
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

CLIENTS = 16


def _rate(node: Node, messages: int) -> float:
    node.execute(f"TRUNCATE {node.outbox}")
    return rate_of(CLIENTS, publish.sending, node, messages // CLIENTS)


def _run(setup: Setup) -> Values:
    messages = setup.messages // 5
    with fresh_node(setup.dsn) as node:
        with node.awake():
            awake = _rate(node, messages)
        node.execute(f"ALTER TABLE {node.outbox} DISABLE TRIGGER doorbell")
        without = _rate(node, messages)
        node.execute(f"ALTER TABLE {node.outbox} ENABLE TRIGGER doorbell")
        asleep = _rate(node, messages)
    return {"no trigger": without, "dispatcher awake": awake, "nobody awake": asleep}


MEASUREMENT = Measurement(
    "doorbell",
    "what waking the dispatcher costs 16 writers",
    (
        Line("no trigger"),
        Line("dispatcher awake", baseline="no trigger", bar=Bar(ratio_at_least=0.85)),
        Line("nobody awake", baseline="no trigger"),
    ),
    _run,
)
