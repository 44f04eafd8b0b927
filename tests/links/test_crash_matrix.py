"""The crash matrix of a link: each of its statements, struck in each way, and once more while it recovers."""

import asyncio
import json
import random
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
import sqlalchemy

from mailroom.embedded import Binaries
from mailroom.links.start import noting_place
from mailroom.schema import migrate
from mailroom.sql.runner import run
from tests.faults.host import Host
from tests.faults.nursery import Nursery
from tests.faults.role_carrier import carry
from tests.faults.task import READ_COMMITTED, USUAL, Task
from tests.support.node import SCHEMA, Node
from tests.support.waiting import eventually

Point = tuple[str, int]  # a statement's name, and at which of its passes
Fault = tuple[str, str, str, int]  # as `Failpoint` has it
# Name, when and action. Where a session is cut before a statement, the server sees the end of a process as well. A
# carrier does one thing after the other: killed after a statement, it is killed before the next one.
WAYS = {
    "killed": ("before", "kill"),
    "cut": ("before", "cut"),
    "sent and killed": ("before", "kill when sent"),
    "sent and its answer lost": ("before", "cut when sent"),
    "paused": ("before", "stop"),
}
COMMANDS = ("BEGIN", "COMMIT")
PASSES = 2  # of a statement; all of a command, since each belongs to another transaction
SENT = 6  # messages before each fault: two batches
SEED = 18
CRASHES = 24  # places at which both servers are killed, one after the other
SAMPLE = 4  # faults of each way that the bounded part has
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


@dataclass
class Ring:
    """Two nodes with a link, and a nursery for those who carry."""

    source: Node
    target: Node
    nursery: Nursery
    home: Path
    sent: list[UUID] = field(default_factory=list)  # since the last check
    struck: int = 0
    clocks: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})

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
        self.carry()

    def send(self) -> None:
        """Send messages of several keys, some of them in one transaction."""
        for nth in range(SENT // 2):
            with self.source.connection.transaction():
                self.sent += [self.source.send("order.paid", nth, key=f"k{nth}") for _ in range(2)]

    def carry(self) -> None:
        """Carry all there is in this process, which nothing strikes."""
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, carry(self.source.dsn, self.target.dsn)).result()

    def strike(self, fault: Fault | None, beside: Callable[[], None] | None = None) -> dict[str, int] | None:
        """Carry in a child that is struck; return what it passed, if it lived to tell. `beside`: while it is paused."""
        task = Task(
            "carrier", "carrier", self.target.dsn, self.source.dsn, str(self.home), 0, "", False, 0.0, USUAL,
            READ_COMMITTED, fault,
        )  # fmt: skip
        passes: dict[str, int] | None = None
        pid = 0
        with self.nursery.start(task) as connection:
            connection.settimeout(60)
            for said in _lines(connection):
                pid = said.get("pid", pid)
                passes = said.get("passes", passes)
                self.struck += "hit" in said
                if said.get("action") == "stop":
                    paused = psutil.Process(pid)
                    eventually(lambda: paused.status() == psutil.STATUS_STOPPED)  # noqa: B023
                    try:
                        (beside or self._work_beside)()
                    finally:
                        paused.send_signal(signal.SIGCONT)
                if said.get("ended"):
                    raise AssertionError(f"{fault}: {said}")
        return passes

    def _work_beside(self) -> None:
        # As a new leader does, which would wait for locks. Paused outside of a transaction it keeps its sessions.
        for node in (self.source, self.target):
            for pid in node.sessions("mailroom carrier", "state = 'idle in transaction'"):
                node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
        self.carry()
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

    def points(self) -> list[Point]:
        """Return what a carrier passes that nobody strikes."""
        self.send()
        passes = self.strike(None)
        assert passes is not None
        self.check("nothing was struck")
        return [
            (name, nth)
            for name, count in sorted(passes.items())
            if not name.startswith("await ") and name != "?"
            for nth in range(1, count + 1 if name in COMMANDS else min(count, PASSES) + 1)
        ]


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    try:
        with connection.makefile("r") as lines:
            yield from map(json.loads, lines)
    except (ConnectionResetError, ValueError):
        pass  # killed in the middle of a line


@pytest.fixture
def ring(source: Node, target: Node, tmp_path: Path) -> Iterator[Ring]:
    nursery = Nursery(tmp_path, {})
    try:
        ring = Ring(source, target, nursery, tmp_path)
        ring.prepare()
        yield ring
    finally:
        nursery.close()


def faults(points: Sequence[Point]) -> list[Fault]:
    """Return each point in each way, shuffled."""
    found = [(name, when, action, nth) for name, nth in points for when, action in WAYS.values()]
    random.Random(SEED).shuffle(found)
    return found


def sampled(faults: Sequence[Fault]) -> list[Fault]:
    """Return some of each way."""
    return [each for way in WAYS.values() for each in [found for found in faults if found[1:3] == way][:SAMPLE]]


def run_cases(ring: Ring, faults: Sequence[Fault]) -> None:
    """Strike with one half of the faults, each time strike what recovers with one of the other, and let one through."""
    half = len(faults) // 2
    for case in zip(faults[:half], faults[half : 2 * half], strict=True):
        for fault in case:
            ring.send()
            lived = ring.strike(fault) is not None
        if not lived:
            ring.carry()
        ring.check(str(case))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_carrier_struck_at_any_statement_loses_nothing_and_brings_nothing_twice(ring: Ring) -> None:
    """T-52: a batch is received whole or not at all, and read again from its beginning."""
    points = ring.points()
    assert {name for name, _ in points} >= STATEMENTS
    some = sampled(faults(points))
    run_cases(ring, some)
    assert ring.struck >= len(some) // 2  # what is passed at the first start only is not passed again


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_rest_of_the_crash_matrix(ring: Ring, part: int) -> None:
    all_of_them = faults(ring.points())
    some = sampled(all_of_them)
    run_cases(ring, [each for each in all_of_them if each not in some][part::PARTS])


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
            ring.carry()
            ring.check(f"crash at {name} {nth}")
        assert ring.struck > CRASHES / PARTS
