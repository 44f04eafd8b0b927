"""Patterns: deliver the outbox with 100 patterns beside the exact subscriptions, and without them.

All are of one inbox, so that each run delivers the same. The messages have 20 topics, or 1,000, in turn. The patterns
are of every form; one in four fits nothing.
"""

import time

from mailroom import subscribe

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .workload import INBOX, KEY, KEYS, VALUE

FORMS = ("shop.{}.*", "*.{}.paid", "shop.{}.#", "bank.{}.*")
PATTERNS = [form.format(nth) for nth in range(25) for form in FORMS]


def _send(node: Node, messages: int, topics: int) -> None:
    with node.connect() as connection:
        connection.execute("SET LOCAL mailroom.notify = off")
        connection.execute(
            f"INSERT INTO {node.outbox} (topic, key, value) "
            f"SELECT 'shop.' || nth %% %(topics)s || '.paid', {KEY}, %(value)s::bytea "
            "FROM generate_series(0, %(messages)s - 1) AS nth".encode(),
            {"topics": topics, "keys": KEYS, "value": VALUE, "messages": messages},
        )


def _rate(setup: Setup, topics: int, patterns: list[str]) -> float:
    with fresh_node(setup.dsn) as node:
        with node.connect() as connection:
            exact = [f"shop.{nth}.paid" for nth in range(topics)]
            subscribe(connection, INBOX, [*exact, *patterns], schema=node.schema)
        _send(node, setup.messages, topics)
        start = time.monotonic()
        node.deliver()
        return setup.messages / (time.monotonic() - start)


def _run(setup: Setup) -> Values:
    return {
        "20 topics, no pattern": _rate(setup, 20, []),
        "20 topics, 100 patterns": _rate(setup, 20, PATTERNS),
        "1,000 topics, no pattern": _rate(setup, 1_000, []),
        "1,000 topics, 100 patterns": _rate(setup, 1_000, PATTERNS),
    }


MEASUREMENT = Measurement(
    "patterns",
    "deliver the outbox with patterns and without",
    (
        Line("20 topics, no pattern"),
        Line("20 topics, 100 patterns", baseline="20 topics, no pattern", bar=Bar(ratio_at_least=0.95)),
        Line("1,000 topics, no pattern"),
        Line("1,000 topics, 100 patterns", baseline="1,000 topics, no pattern", bar=Bar(ratio_at_least=0.75)),
    ),
    _run,
)
