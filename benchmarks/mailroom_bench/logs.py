"""Logs: what a message costs in a log beside inboxes by key, in turn; processor time, of this machine's server.

`all` and the workers' backends are those of `live`: publisher, dispatcher and two workers run, with one inbox.

`inboxes` are 10 and 100 that get a tenth of `--messages`, each in claims of up to 1,000. `server` is the time of the
sessions that deliver and claim, for each message and inbox; `WAL` is what deliveries write, for each message, and what
claims write, for each message and inbox.

`deliver` and `claim` are the same sessions' time, 1,000 messages at a time, where all that was delivered is read, and
where ten times `--messages` are unread: 10^6 unless it is given. Then the outbox is vacuumed. Claims of lanes take
the one message that has come.

`p50` is that of `latency`, from COMMIT to the handler at 200 messages/s.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from math import nan
from statistics import median

import psycopg

from dispatcher.daemon import DRAIN
from dispatcher.delivery.deliverer import Deliverer
from inbox.by_key.claim import Share
from inbox.claims import Claims
from mailroom.session import settings
from mailroom.sql.runner import run

from . import live_side, processor
from .latency import AT_MOST, percentile, waits_between_ms
from .log_node import LANES, reading_node
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node
from .pipeline import WORKER_BATCH, Pipeline
from .processor import Meter
from .workload import INBOX

KINDS = ("by key", "log")
KEYS = (1_000, 50_000, 20)
INBOXES = (10, 100)
ROUNDS = 20
SHARE = Share(WORKER_BATCH, WORKER_BATCH, WORKER_BATCH, due_too=False)
FEW = Share(WORKER_BATCH // 10, WORKER_BATCH // 10, WORKER_BATCH // 10, due_too=False)


def _flow(setup: Setup, kind: str, keys: int) -> dict[str, float]:
    with reading_node(setup, kind) as (node, _):
        found = live_side.PARTS[f"live, {keys:,} keys"](node, setup.messages)
    return {f"{what}, {keys:,} keys, {kind}": found[f"{what}, {keys:,} keys"] for what in ("all", "workers' backends")}


class _Server:
    """Deliveries and claims, and what the sessions of both use and write."""

    def __init__(self, node: Node, delivering: psycopg.AsyncConnection, claiming: psycopg.Connection) -> None:
        self._node = node
        self._deliverer = Deliverer(delivering, node.schema)
        self._claiming = claiming
        self.delivered = Meter({"deliver": delivering.info.backend_pid})
        self.claimed = Meter({"claim": claiming.info.backend_pid})
        self.wal = {"deliver": 0, "claim": 0}

    async def deliver(self, messages: int, keys: int = 1_000) -> None:
        """Send and deliver so many; the delivery counts."""
        self._node.send(messages, keys)
        before = self._written()
        with self.delivered.running():
            await self._deliverer.drain()
        self.wal["deliver"] += self._written() - before

    def claim(self, claims: Claims, share: Share = SHARE) -> int:
        """Take and commit a batch, as a worker does."""
        before = self._written()
        with self.claimed.running(), self._claiming.transaction():
            taken = len(run(self._claiming, claims.claiming(share)).messages)
        self.wal["claim"] += self._written() - before
        return taken

    def _written(self) -> int:
        with self._node.connect(autocommit=True) as connection:
            [(wal,)] = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()
        return int(wal)


@contextmanager
def _claiming(node: Node) -> Iterator[psycopg.Connection]:
    with node.connect(autocommit=True, role="bench claims") as connection:
        yield connection


async def _fan_out(setup: Setup, kind: str, inboxes: int) -> dict[str, float]:
    messages = max(1, setup.messages // 10)
    read_s, written, copies = 0.0, 0, 0
    with reading_node(setup, kind, inboxes) as (node, names):
        async with await settings.connect_async(node.dsn, "dispatcher", DRAIN) as delivering:
            with _claiming(node) as claiming:
                server = _Server(node, delivering, claiming)
                await server.deliver(WORKER_BATCH)
                begun_s, begun = server.delivered.used_s["deliver"], server.wal["deliver"]
                await server.deliver(messages)
            for name in names:
                with _claiming(node) as claiming:  # as each worker has sessions of its own
                    claims, server_of_it = Claims(node.schema, name), _Server(node, delivering, claiming)
                    # So often that the session has prepared its statements.
                    first = sum(server_of_it.claim(claims, FEW) for _ in range(WORKER_BATCH // FEW.most))
                    reading, left = _Server(node, delivering, claiming), WORKER_BATCH + messages - first
                    copies += left
                    while left > 0:
                        left -= reading.claim(claims)
                    read_s += reading.claimed.used_s["claim"]
                    written += reading.wal["claim"]
    delivered_s = (server.delivered.used_s["deliver"] - begun_s) / messages / inboxes
    return {
        f"server, {inboxes} inboxes, {kind}": (delivered_s + read_s / copies) * 1e6,
        f"WAL of a delivery, {inboxes} inboxes, {kind}": (server.wal["deliver"] - begun) / messages,
        f"WAL of a read, {inboxes} inboxes, {kind}": written / copies,
    }


async def _waiting(setup: Setup) -> dict[str, float]:
    rounds = max(1, min(ROUNDS, setup.messages // WORKER_BATCH))
    values: dict[str, float] = {}
    with reading_node(setup, "log") as (node, _), _claiming(node) as claiming:
        async with await settings.connect_async(node.dsn, "dispatcher", DRAIN) as delivering:
            warm, claims = _Server(node, delivering, claiming), Claims(node.schema, INBOX)
            await warm.deliver(WORKER_BATCH)  # which is planned then
            while warm.claim(claims):
                pass
            for unread, name in ((0, "empty"), (10 * setup.messages, "10 x unread")):
                if unread:
                    await warm.deliver(unread)
                    # What has just passed the outbox costs each delivery a quarter more until it is vacuumed.
                    node.execute(f"VACUUM {node.schema}.outbox")
                server, taken = _Server(node, delivering, claiming), 0
                for _ in range(rounds):
                    await server.deliver(WORKER_BATCH)
                    taken += server.claim(claims)
                values[f"deliver, {name}"] = server.delivered.used_s["deliver"] / (rounds * WORKER_BATCH) * 1e6
                values[f"claim, {name}"] = server.claimed.used_s["claim"] / taken * 1e6 if taken else nan
    return values


async def _of_lanes(setup: Setup, lanes: int) -> float:
    """Return what a claim of the one message that has come costs."""
    used = []
    with reading_node(setup, "log", lanes=lanes) as (node, _), _claiming(node) as claiming:
        async with await settings.connect_async(node.dsn, "dispatcher", DRAIN) as delivering:
            server, claims, so_far = _Server(node, delivering, claiming), Claims(node.schema, INBOX), 0.0
            for nth in range(ROUNDS + 2):
                await server.deliver(1)
                if server.claim(claims) != 1:
                    raise RuntimeError("the claim did not find the message")
                now = server.claimed.used_s["claim"]
                if nth > 1:  # the first ones look for where to read
                    used.append(now - so_far)
                so_far = now
    return median(used) * 1e6


def _p50(setup: Setup, kind: str) -> float:
    with reading_node(setup, kind) as (node, _), Pipeline(node) as pipeline:
        pipeline.dispatch()
        return percentile(waits_between_ms(node, pipeline, min(AT_MOST, setup.messages)), 50)


_turn = count()


def _run(setup: Setup) -> Values:
    kinds = KINDS[::-1] if next(_turn) % 2 else KINDS  # who is first finds the server as the part before has left it
    values: dict[str, float] = {}
    for keys in KEYS:
        for kind in kinds:
            values |= _flow(setup, kind, keys)
    for inboxes in INBOXES:
        for kind in kinds:
            values |= asyncio.run(_fan_out(setup, kind, inboxes))
    values |= asyncio.run(_waiting(setup))
    for lanes, name in ((1, "the only lane"), (LANES, f"one of {LANES} lanes")):
        values[f"claim, {name}"] = asyncio.run(_of_lanes(setup, lanes))
    for kind in kinds:
        values[f"p50, {kind}"] = _p50(setup, kind)
    return values


def _lines() -> Iterator[Line]:
    for keys in KEYS:
        for what, most in (("all", 0.70 if keys == KEYS[-1] else 0.80), ("workers' backends", 0.45)):
            yield Line(f"{what}, {keys:,} keys, by key", "us")
            yield Line(f"{what}, {keys:,} keys, log", "us", f"{what}, {keys:,} keys, by key", Bar(ratio_at_most=most))
    for inboxes, most in zip(INBOXES, (0.40, 0.30), strict=True):
        for what, unit, bar in (
            ("server", "us", Bar(ratio_at_most=most)),
            ("WAL of a delivery", "bytes", Bar(at_most=550)),
            ("WAL of a read", "bytes", Bar(at_most=15)),
        ):
            yield Line(f"{what}, {inboxes} inboxes, by key", unit)
            yield Line(f"{what}, {inboxes} inboxes, log", unit, f"{what}, {inboxes} inboxes, by key", bar)
    for what in ("deliver", "claim"):
        yield Line(f"{what}, empty", "us")
        yield Line(f"{what}, 10 x unread", "us", f"{what}, empty", Bar(ratio_at_most=1.1))
    yield Line("claim, the only lane", "us")
    yield Line(f"claim, one of {LANES} lanes", "us", "claim, the only lane", Bar(ratio_at_most=1.2))
    yield Line("p50, by key", "ms")
    yield Line("p50, log", "ms", "p50, by key", Bar(ratio_at_most=1.1))


MEASUREMENT = Measurement(
    "logs",
    "a log beside inboxes by key",
    tuple(_lines()),
    _run,
    processor.missing,
)
