"""The crash matrix of a link: each of its statements, struck in each way, and once more while it recovers."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
import sqlalchemy

from mailroom.embedded import Binaries
from mailroom.links.start import noting_place
from mailroom.schema import migrate
from mailroom.sql.runner import run
from tests.faults.crashing import SEED, Matrix, faults_at, sampled
from tests.faults.host import Host
from tests.faults.nursery import Nursery
from tests.faults.role_carrier import carry
from tests.support.node import SCHEMA, Node

SENT = 6  # messages before each fault: two batches
CRASHES = 24  # places at which both servers are killed, one after the other
PARTS = 4  # of the rest of the matrix, and of the servers' crashes, so that each ends within its time on a slow machine

# What a link consists of. A statement that is renamed, or no longer passed, is missed here.
STATEMENTS = {
    "dispatcher.delivery.deliver.DELIVER", "dispatcher.links.at_source.acknowledge.ACKNOWLEDGE",
    "dispatcher.links.at_source.acknowledge.FLUSH",
    "dispatcher.links.at_source.bounds.BOUNDS", "dispatcher.links.at_source.bounds.POSITION",
    "dispatcher.links.at_source.fetch.FETCH_UNDECODED",
    "dispatcher.links.receive.RECEIVE", "dispatcher.housekeeping.trim.RECEIPT", "dispatcher.housekeeping.trim.TRIM",
    "mailroom.order.clock.CEILING", "mailroom.order.clock.RECOVER", "mailroom.links.handshake.hello.NOTE",
    "mailroom.links.handshake.hello.MATCH",
}  # fmt: skip


class Ring(Matrix):
    """Two nodes with a link, and a nursery for those who carry."""

    role = "carrier"

    def __init__(self, source: Node, target: Node, nursery: Nursery, home: Path) -> None:
        super().__init__(nursery, home)
        self.source = source
        self.target = target
        self.sent: list[UUID] = []  # since the last check
        self.clocks = {"source": 0, "target": 0}

    def dsns(self) -> tuple[str, str]:
        return self.target.dsn, self.source.dsn

    def prepare(self) -> None:
        """Link the nodes; on both sides an inbox wants what is sent."""
        for node, name in ((self.source, "north"), (self.target, "south")):
            node.connection.execute("UPDATE mailroom.node SET name = %s", [name])
            with node.connection.transaction():
                run(node.connection, noting_place(SCHEMA))
        self.source.connection.execute("INSERT INTO mailroom.link (name, keep_s) VALUES ('south', 0)")
        self.target.connection.execute("INSERT INTO mailroom.origin (name, reader) VALUES ('north', 'south')")
        self.source.inbox("here", "order.paid")
        self.target.inbox("there")
        self.target.connection.execute(
            "INSERT INTO mailroom.subscription (topic, inbox, origin) VALUES ('order.paid', 'there', 'north')"
        )
        self.go_on()

    def send(self) -> None:
        """Send messages of several keys, some of them in one transaction."""
        for nth in range(SENT // 2):
            with self.source.connection.transaction():
                self.sent += [self.source.send("order.paid", nth, key=f"k{nth}") for _ in range(2)]

    def go_on(self) -> None:
        """Carry all there is in this process, which nothing strikes."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, carry(self.source.dsn, self.target.dsn)).result()

    def work_beside(self) -> None:
        # As a new leader does, which would wait for locks. Paused outside of a transaction it keeps its sessions.
        for node in (self.source, self.target):
            for pid in node.sessions("mailroom carrier", "state = 'idle in transaction'"):
                node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        self.go_on()
        assert len(self.target.rows("SELECT FROM mailroom.inbox")) == len(self.sent)

    def check(self, case: str) -> None:
        """Hold what has arrived against what was sent, and handle it."""
        here = self._taken("source", self.source)
        there = self._taken("target", self.target)
        assert [id for id, _, _ in here] == self.sent, f"{case}: lost, twice or in another order at home"
        assert [id for id, _, _ in there] == self.sent, f"{case}: lost, twice or in another order"
        assert [sent for _, _, sent in there] == [clock for _, clock, _ in here], f"{case}: not the source's clock"
        assert all(clock > sent for _, clock, sent in there), f"{case}: an effect before its cause"
        for node in (self.source, self.target):
            assert node.dead() == [], case
            assert node.waiting() == [], case
        [link] = self.source.rows(
            "SELECT acked, (SELECT array_agg(seq) FROM mailroom.transit), state FROM mailroom.link"
        )
        [(last, newest, state)] = self.target.rows(
            "SELECT r.last, count(*) OVER (), o.state FROM mailroom.receipt AS r, mailroom.origin AS o"
        )
        assert (link, newest, state) == ((last, [last], "open"), 1, "open"), f"{case}: not trimmed, or stopped"
        self.sent = []

    def _taken(self, name: str, node: Node) -> Sequence[tuple[UUID, int, int]]:
        rows = node.rows("DELETE FROM mailroom.inbox RETURNING message_id, clock, sent_clock")
        rows = sorted(rows, key=lambda row: row[1])
        clocks = [self.clocks[name], *(clock for _, clock, _ in rows)]
        assert all(before < after for before, after in pairwise(clocks)), "a clock was given twice"
        self.clocks[name] = clocks[-1]
        return rows


@pytest.fixture
def ring(source: Node, target: Node, tmp_path: Path) -> Iterator[Ring]:
    nursery = Nursery(tmp_path, {})
    try:
        ring = Ring(source, target, nursery, tmp_path)
        ring.prepare()
        yield ring
    finally:
        nursery.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_carrier_struck_at_any_statement_loses_nothing_and_brings_nothing_twice(ring: Ring) -> None:
    """T-52: a batch is received whole or not at all, and read again from its beginning."""
    points = ring.points()
    assert {name for name, _ in points} >= STATEMENTS
    some = sampled(faults_at(points))
    ring.run(some)
    assert ring.struck >= len(some) // 2  # what is passed at the first start only is not passed again


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_rest_of_the_crash_matrix(ring: Ring, part: int) -> None:
    all_of_them = faults_at(ring.points())
    some = sampled(all_of_them)
    ring.run([each for each in all_of_them if each not in some][part::PARTS])


# -- Either server crashes --------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(server_home: Path, binaries: Binaries) -> Iterator[tuple[Host, Host]]:
    """Two servers that lose, when they are killed, whatever was committed asynchronously."""
    settings = {"fsync": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
    with ExitStack() as stack:
        found = []
        for name in ("north", "south"):
            host = Host(server_home / name, binaries, settings)
            host.start()
            stack.callback(host.close)
            engine = sqlalchemy.create_engine(
                host.dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
            )
            with engine.begin() as migrating:
                migrate(migrating)
            found.append(host)
        yield found[0], found[1]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_server_of_either_node_crashes_at_any_statement(hosts: tuple[Host, Host], tmp_path: Path, part: int) -> None:
    nursery = Nursery(tmp_path, {})
    with ExitStack() as stack:
        stack.callback(nursery.close)

        def node(host: Host) -> Node:
            return Node(host.dsn, stack.enter_context(psycopg.connect(host.dsn, autocommit=True)))

        ring = Ring(node(hosts[0]), node(hosts[1]), nursery, tmp_path)
        ring.prepare()
        points = ring.points()
        random.Random(SEED).shuffle(points)

        def crash(host: Host) -> None:
            host.kill()
            host.start()
            if host is hosts[0]:
                ring.source = node(host)
            else:
                ring.target = node(host)

        for number, (name, nth) in enumerate(points[:CRASHES][part::PARTS]):
            for host in hosts if number % 2 else reversed(hosts):
                ring.send()
                ring.strike((name, "after" if number % 3 else "before", "stop", nth), partial(crash, host))
            ring.go_on()
            ring.check(f"crash at {name} {nth}")
        assert ring.struck > CRASHES / PARTS
