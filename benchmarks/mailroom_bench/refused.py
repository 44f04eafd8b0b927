"""Refused: the outbox is drained while the database refuses one message in a hundred.

A constraint on the inbox refuses them, and only they go to `dead_letter`. It is compared with the same run in which the
constraint refuses none. There are 10,000 messages at most: one batch of the dispatcher.
"""

import time

from .measure import Bar, Line, Measurement, Setup, Values
from .node import fresh_node

AT_MOST = 10_000


def _drain_ms(setup: Setup, ending: str) -> float:
    """Return how long it takes to drain a full outbox into an inbox that refuses keys with this ending."""
    with fresh_node(setup.dsn) as node:
        node.execute(f"ALTER TABLE {node.partition} ADD CONSTRAINT refused CHECK (right(key, 2) <> '{ending}')")
        node.send(min(AT_MOST, setup.messages))
        start = time.monotonic()
        node.deliver()
        return 1_000 * (time.monotonic() - start)


def _run(setup: Setup) -> Values:
    return {"none refused": _drain_ms(setup, "no"), "1 % refused": _drain_ms(setup, "00")}


MEASUREMENT = Measurement(
    "refused",
    "deliver the outbox while 1 % are refused",
    (
        Line("none refused", unit="ms"),
        Line("1 % refused", unit="ms", baseline="none refused", bar=Bar(ratio_at_most=3)),
    ),
    _run,
)
