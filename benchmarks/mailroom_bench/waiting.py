"""Waiting: the cost of a claim beside keys that wait for their next attempt or are parked, each with one message.

There is one key per two of `--messages`, at most 50,000. Their messages are the oldest of the inbox, and are marked as
failed in the tables. A dispatcher runs beside, and gets time to raise the healthy floor. The measure is the median of
claims that find nothing, and of claims that find the only message of a healthy key.
"""

import time
from statistics import median

from inbox import Inbox

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline
from .workload import INBOX

AT_MOST = 50_000
CLAIMS = 20


def _fail(node: Node, keys: int, until: str) -> None:
    """Let so many keys wait until a time, or for ever, each with one message that has failed."""
    node.send(keys, keys=keys)
    node.deliver()
    node.execute(
        f"INSERT INTO {node.schema}.key_state (inbox, key, clock, attempts, retry_at, parked_at, alone_to, suspect_to) "
        f"SELECT inbox, key, clock, 1, {until}, CASE {until} WHEN 'infinity' THEN now() END, clock, clock "
        f"FROM {node.partition}"
    )


def _is_settled(node: Node) -> bool:
    """Return whether messages of parked keys were moved, and claims begin above the waiting messages."""
    with node.connect(autocommit=True) as connection:
        above = f"(SELECT healthy_floor FROM {node.schema}.inbox_registry WHERE name = '{INBOX}')"
        statement = f"SELECT NOT EXISTS (SELECT FROM {node.partition} WHERE (clock + 0) > {above})"
        return connection.execute(statement.encode()).fetchone() == (True,)


def _claims_ms(setup: Setup, until: str | None) -> tuple[float, float]:
    """Return the duration of a claim that finds nothing, and of one that finds the message of a healthy key."""
    empty: list[float] = []
    healthy: list[float] = []
    with fresh_node(setup.dsn) as node, node.connect() as connection, Pipeline(node) as pipeline:
        if until is not None:
            _fail(node, min(AT_MOST, setup.messages // 2), until)
        pipeline.dispatch()
        pipeline.wait(lambda: _is_settled(node))
        inbox = Inbox(INBOX, schema=node.schema)
        for nth in range(CLAIMS):
            for messages, times in ((0, empty), (1, healthy)):
                node.send_one_key(f"healthy-{nth}", messages)
                node.deliver()
                start = time.monotonic()
                taken = inbox.reap_any(connection)
                connection.commit()
                times.append(1_000 * (time.monotonic() - start))
                if len(taken) != messages:
                    raise RuntimeError(f"a claim took {len(taken)} messages of {messages}")
    return median(empty), median(healthy)


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for beside, until in (("none", None), ("waiting", "now() + interval '1 day'"), ("parked", "'infinity'")):
        values[f"empty, {beside}"], values[f"healthy, {beside}"] = _claims_ms(setup, until)
    return values


MEASUREMENT = Measurement(
    "waiting",
    "claims beside keys that wait or are parked",
    (
        Line("empty, none", unit="ms"),
        Line("empty, waiting", unit="ms", baseline="empty, none", bar=Bar(ratio_at_most=3)),
        Line("empty, parked", unit="ms", baseline="empty, none", bar=Bar(ratio_at_most=3)),
        Line("healthy, none", unit="ms"),
        Line("healthy, waiting", unit="ms", baseline="healthy, none", bar=Bar(ratio_at_most=3)),
        Line("healthy, parked", unit="ms", baseline="healthy, none", bar=Bar(ratio_at_most=3)),
    ),
    _run,
)
