"""Peers: Mailroom beside other queues of PostgreSQL, on the same server and in the same run.

The whole path, as in `flow`, beside PgQ's fastest: a log without keys, numbering, routing or parked keys, read by one
consumer. The latency from commit to handler, as in `latency`, beside PgQueuer's, which has one hop. Who is first
changes from run to run. A peer that is not installed is left out.
"""

from collections.abc import Callable
from itertools import count

from . import flow, latency, peer_pgq, peer_pgqueuer
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

PGQ, PGQUEUER = "PgQ", "PgQueuer"
_turn = count()


def _absent(dsn: str) -> dict[str, str]:
    peers = {PGQ: peer_pgq.missing(dsn), PGQUEUER: peer_pgqueuer.missing()}
    return {peer: how_to_get for peer, how_to_get in peers.items() if how_to_get}


def _flow(setup: Setup, flow_rate: Callable[[Node, int], float]) -> float:
    with fresh_node(setup.dsn) as node:
        return flow_rate(node, setup.messages)


def _percentiles(name: str, waits: list[float]) -> Values:
    return {f"{name}, p{percent}": latency.percentile(waits, percent) for percent in (50, 99)}


def _run(setup: Setup) -> Values:
    absent = _absent(setup.dsn)
    steps: list[tuple[str, Callable[[], Values]]] = [
        (PGQ, lambda: {"PgQ, COPY": _flow(setup, peer_pgq.flow_rate)}),
        ("Mailroom", lambda: {"Mailroom, send_many": _flow(setup, flow.flow_rate)}),
        (PGQUEUER, lambda: _percentiles(PGQUEUER, peer_pgqueuer.waits_ms(setup))),
        ("Mailroom", lambda: _percentiles("Mailroom", latency.waits_ms(setup))),
    ]
    if next(_turn) % 2:
        steps.reverse()
    values: dict[str, float] = {}
    for name, step in steps:
        if name not in absent:
            values |= step()
    return values


MEASUREMENT = Measurement(
    "peers",
    "the whole path beside PgQ, commit to handler beside PgQueuer",
    (
        Line("PgQ, COPY", peer=PGQ),
        Line("Mailroom, send_many", baseline="PgQ, COPY", bar=Bar(ratio_at_least=0.40)),
        Line("PgQueuer, p50", "ms", peer=PGQUEUER),
        Line("Mailroom, p50", "ms", baseline="PgQueuer, p50", bar=Bar(ratio_at_most=1.5)),
        Line("PgQueuer, p99", "ms", peer=PGQUEUER),
        Line("Mailroom, p99", "ms", baseline="PgQueuer, p99"),
    ),
    _run,
    absent=_absent,
)
