"""Peers: Mailroom beside other queues of PostgreSQL, on the same server and in the same run.

The whole path, as in `flow`: beside PgQ's fastest, a log without keys, numbering, routing or parked keys, read by one
consumer; beside PgQueuer's jobs, a fifth as many; and beside the queue that one writes by hand. The latency from commit
to handler, as in `latency`, beside those of the last two, which have one hop. And the processor time of a message where
all do the same work (`same_work`), for one reader and for ten, beside PgQ and the queue by hand: over inboxes by key,
and over those of a log. Who is first changes from run to run. A peer that is not installed is left out.
"""

from collections.abc import Callable
from functools import partial
from itertools import count

from . import flow, latency, peer_handwritten, peer_pgq, peer_pgqueuer, same_work
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

MAILROOM, PGQ, PGQUEUER, HANDWRITTEN = "Mailroom", "PgQ", "PgQueuer", "hand-written"
PEERS = (PGQ, PGQUEUER, HANDWRITTEN)
PERCENTS = (50, 99)
SAME_WORK = {"same work": 1, "ten readers": same_work.READERS}
_turn = count()


def _absent(dsn: str) -> dict[str, str]:
    peers = {PGQ: peer_pgq.missing(dsn), PGQUEUER: peer_pgqueuer.missing()}
    return {peer: how_to_get for peer, how_to_get in peers.items() if how_to_get}


def _rate(name: str, setup: Setup, flow_rate: Callable[[Node, int], float], share: int = 1) -> Values:
    with fresh_node(setup.dsn) as node:
        return {f"{name}, rate": flow_rate(node, setup.messages // share)}


def _same_work(name: str, setup: Setup, spent_us: Callable[[Setup, int], float], kind: str = "") -> Values:
    return {f"{name}, {work}{kind}": spent_us(setup, readers) for work, readers in SAME_WORK.items()}


def _percentiles(name: str, waits: list[float]) -> Values:
    return {f"{name}, p{percent}": latency.percentile(waits, percent) for percent in PERCENTS}


def _ours(found: Values) -> Values:
    """Return our figures once for each peer, beside whose they stand."""
    return {name.replace(MAILROOM, _beside(peer)): value for name, value in found.items() for peer in PEERS}


def _beside(peer: str) -> str:
    return f"{MAILROOM} beside {peer}"


def _run(setup: Setup) -> Values:
    absent = _absent(setup.dsn)
    steps: list[tuple[str, Callable[[], Values]]] = [
        (PGQ, lambda: _rate(PGQ, setup, peer_pgq.flow_rate)),
        (MAILROOM, lambda: _ours(_rate(MAILROOM, setup, flow.flow_rate))),
        (HANDWRITTEN, lambda: _rate(HANDWRITTEN, setup, peer_handwritten.flow_rate)),
        (PGQ, lambda: _same_work(PGQ, setup, same_work.pgq_us)),
        (MAILROOM, lambda: _ours(_same_work(MAILROOM, setup, partial(same_work.ours_us, "by key")))),
        (MAILROOM, lambda: _ours(_same_work(MAILROOM, setup, partial(same_work.ours_us, "log"), ", log"))),
        (HANDWRITTEN, lambda: _same_work(HANDWRITTEN, setup, same_work.handwritten_us)),
        (PGQUEUER, lambda: _rate(PGQUEUER, setup, peer_pgqueuer.flow_rate, share=5)),
        (PGQUEUER, lambda: _percentiles(PGQUEUER, peer_pgqueuer.waits_ms(setup))),
        (MAILROOM, lambda: _ours(_percentiles(MAILROOM, latency.waits_ms(setup)))),
        (HANDWRITTEN, lambda: _percentiles(HANDWRITTEN, peer_handwritten.waits_ms(setup))),
    ]
    if next(_turn) % 2:
        steps.reverse()
    values: dict[str, float] = {}
    for name, step in steps:
        if name not in absent:
            values |= step()
    return values


def _pair(peer: str, what: str, unit: str, bar: Bar | None = None) -> tuple[Line, Line]:
    theirs = f"{peer}, {what}"
    return Line(theirs, unit, peer=peer), Line(f"{_beside(peer)}, {what}", unit, theirs, bar, peer)


def _work(peer: str, work: str) -> tuple[Line, ...]:
    pair = _pair(peer, work, "us")
    return (*pair, Line(f"{_beside(peer)}, {work}, log", "us", pair[0].name, peer=peer))


MEASUREMENT = Measurement(
    "peers",
    "the whole path, its latency and its work beside other queues",
    (
        *_pair(PGQ, "rate", "messages/s", Bar(ratio_at_least=0.45)),
        *_pair(PGQUEUER, "rate", "messages/s", Bar(ratio_at_least=4)),
        *_pair(HANDWRITTEN, "rate", "messages/s", Bar(ratio_at_least=0.40)),
        *(line for work in SAME_WORK for peer in (PGQ, HANDWRITTEN) for line in _work(peer, work)),
        *_pair(PGQUEUER, "p50", "ms", Bar(ratio_at_most=1.2)),
        *_pair(HANDWRITTEN, "p50", "ms", Bar(ratio_at_most=4)),
        *_pair(PGQUEUER, "p99", "ms"),
        *_pair(HANDWRITTEN, "p99", "ms"),
    ),
    _run,
    absent=_absent,
)
