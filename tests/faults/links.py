"""`python -m tests.faults.links`, which is `make links-soak`: three nodes in a ring, under load and under fire.

Each node is on a server of its own, and reads the one before it by daemons as shipped, two per node. What is sent and
what is handled is noted in ledgers, by the very transactions that do it. A part of what is handled is sent on to the
next node, as an answer is sent after a question.
"""

import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import click
import psutil
import psycopg
import sqlalchemy

from inbox import Inbox
from mailroom import schema
from mailroom.links import Links
from mailroom.node import rename_node
from mailroom.schema import create_inbox
from outbox import Outbox, Outgoing
from tests.faults.host import Host
from tests.faults.network import QUIET, Network, Trouble
from tests.faults.stage import home_of_campaign

NAMES = ("east", "north", "west")
TOPIC = "ring"
KEYS = 50
HOPS = 3  # how far a message is sent on, at most
SENT_ON = 0.2
WAITING = 5_000  # rows not handled, at which writers rest
SETTLED_WITHIN_S = 180.0
SETTINGS = {"shared_buffers": "64MB", "wal_writer_delay": "200ms"}

# No constraints: a ledger that refused a duplicate would hide it. `nth` rises along each key of a sender, `turn` in the
# order in which a key is handled.
LEDGERS = """
CREATE SCHEMA ring;
CREATE SEQUENCE ring.turn;
CREATE TABLE ring.sent (id uuid NOT NULL, key text NOT NULL, nth bigint NOT NULL, cause uuid);
CREATE TABLE ring.handled (
    id uuid NOT NULL, origin uuid NOT NULL, key text NOT NULL, clock bigint NOT NULL, sent_clock bigint NOT NULL,
    turn bigint NOT NULL DEFAULT nextval('ring.turn'));
"""
LOST = (psycopg.OperationalError, psycopg.InterfaceError)


class RingNode:
    """One node: its server, the network before it, two daemons, a writer and a reaper."""

    def __init__(self, home: Path, name: str, seed: int) -> None:
        self.name = name
        self.home = home
        self.host = Host(home / name, settings=SETTINGS)
        self.dice = random.Random(f"{seed} {name}")
        self.network: Network
        self.daemons: list[Daemon] = []
        self.id = UUID(int=0)
        self._seed = seed
        self._numbers = count(1)  # drawn by both of its threads

    def start(self) -> None:
        """Start the server and make the node."""
        self.host.start()
        engine = sqlalchemy.create_engine(
            self.host.dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
        )
        with engine.begin() as migrating:
            schema.migrate(migrating)
        server = urlsplit(self.host.dsn)
        self.network = Network(server.hostname or "127.0.0.1", server.port or 5432, self._seed)
        with self.host.session() as session, session.transaction():
            rename_node(session, self.name, actor="campaign")
            session.execute(LEDGERS)
            [(self.id,)] = session.execute("SELECT id FROM mailroom.node").fetchall()

    def link(self, source: "RingNode", reader: "RingNode") -> None:
        """Let `reader` read this node, and read `source`; start the daemons."""
        with self.host.session() as session, session.transaction():
            Links().allow(session, reader.name, actor="campaign", keep_s=2.0)
            Links().add(session, source.name, actor="campaign")
            create_inbox(session, "from_others", [TOPIC], origin=source.name)
        environment = {f"MAILROOM_DSN_{source.name.upper()}": source.network.dsn(source.host.dsn)}
        for nth, dsn in enumerate((self.host.dsn, self.network.dsn(self.host.dsn))):
            self.daemons.append(Daemon(self.home / f"{self.name}-{nth}.log", {"MAILROOM_DSN": dsn, **environment}))

    def close(self) -> None:
        """End all of it."""
        for daemon in self.daemons:
            daemon.end()
        if hasattr(self, "network"):
            self.network.close()
        self.host.close()

    def write(self, session: psycopg.Connection[Any]) -> None:
        """Send a few messages in one transaction."""
        keys = [f"{self.name}-{self.dice.randrange(KEYS)}" for _ in range(self.dice.randint(1, 20))]
        with session.transaction():
            self._send(session, [(key, HOPS, None) for key in keys])

    def reap(self, session: psycopg.Connection[Any]) -> int:
        """Handle what there is, in one transaction, and send a part of it on; some transactions are rolled back."""
        with session.transaction(force_rollback=self.dice.random() < 0.1):
            messages = Inbox("from_others").reap_any(session, 20, 5)
            onwards = []
            for message in messages:
                session.execute(
                    "INSERT INTO ring.handled (id, origin, key, clock, sent_clock) VALUES (%s, %s, %s, %s, %s)",
                    [message.id, message.origin, message.key, message.clock, message.sent_clock],
                )
                if message.value > 1 and self.dice.random() < SENT_ON:
                    onwards.append((f"on-{self.name}-{message.key[-1]}", message.value - 1, message.id))
            self._send(session, onwards)
        return len(messages)

    def _send(self, session: psycopg.Connection[Any], messages: Sequence[tuple[str, int, UUID | None]]) -> None:
        outgoing = []
        for key, hops, cause in messages:
            id = uuid4()
            outgoing.append(Outgoing(TOPIC, hops, key=key, id=id))
            session.execute("INSERT INTO ring.sent VALUES (%s, %s, %s, %s)", [id, key, next(self._numbers), cause])
        if outgoing:
            Outbox().send_many(session, outgoing)

    def waiting(self) -> int:
        """Count what is to be handled, here or elsewhere."""
        with self.host.session() as session:
            [(rows,)] = session.execute(
                "SELECT (SELECT count(*) FROM mailroom.outbox) + (SELECT count(*) FROM mailroom.inbox) + "
                "(SELECT coalesce(sum((SELECT max(seq) FROM mailroom.transit t WHERE t.link = l.number) - acked), 0) "
                " FROM mailroom.link l)"
            ).fetchall()
        return int(rows)


class Daemon:
    """`mailroom dispatcher run`, started again whenever it is gone."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._environment = os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = False
        self.keep()

    def keep(self) -> None:
        """Start it if it is gone."""
        if self._ends or (self._process is not None and self._process.poll() is None):
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mailroom", "dispatcher", "run", "--poll-interval-s", "0.5"],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """End it for good."""
        self._ends = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Ring:
    """The nodes, their load, and what is done to them."""

    def __init__(self, nodes: Sequence[RingNode], seed: int) -> None:
        self.nodes = nodes
        self.done: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._over = threading.Event()
        self._rests = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, seconds: float) -> None:
        """Strike for so long, and then let everything come to an end."""
        threads = [threading.Thread(target=self._guarded, args=(self._keep_daemons,))]
        for node in self.nodes:
            for work in (self._write, self._reap):
                threads.append(threading.Thread(target=self._guarded, args=(work, node)))
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self._errors:
                self._strike()
                time.sleep(self._dice.uniform(0, 0.6))
            self._rests.set()
            self._settle()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._errors.append(error)

    def _keep_daemons(self) -> None:
        while not self._over.wait(0.3):
            for node in self.nodes:
                for daemon in node.daemons:
                    daemon.keep()

    def _write(self, node: RingNode) -> None:
        while not self._over.is_set() and not self._rests.is_set():
            with contextlib.suppress(*LOST), node.host.session() as session:
                while not self._rests.wait(0.02) and not self._over.is_set():
                    if node.dice.random() < 0.05 and max(each.waiting() for each in self.nodes) > WAITING:
                        self._over.wait(1)
                    node.write(session)
            self._over.wait(0.2)

    def _reap(self, node: RingNode) -> None:
        while not self._over.is_set():
            with contextlib.suppress(*LOST), node.host.session() as session:
                while not self._over.is_set():
                    if not node.reap(session):
                        self._over.wait(0.02)
            self._over.wait(0.2)

    def _strike(self) -> None:
        node = self._dice.choice(self.nodes)
        daemon = self._dice.choice(node.daemons)
        [kind] = self._dice.choices(
            ("daemon killed", "daemon paused", "connections cut", "network", "server killed", "server stopped"),
            (40, 15, 20, 15, 6, 4),
        )
        match kind:
            case "daemon killed":
                daemon.signal(signal.SIGKILL)
            case "daemon paused":
                daemon.signal(signal.SIGSTOP)
                time.sleep(self._dice.choice((0.3, 1.0, 5.0)))  # the lease lasts for three seconds
                daemon.signal(signal.SIGCONT)
            case "connections cut":
                node.network.cut()
            case "network":
                kind = self._dice.choice(
                    ("cut before COMMIT", "COMMIT answer lost", "half of COMMIT", "COMMIT delayed", "black hole")
                )
                node.network.be(Trouble(kind, 0.5, 0.2))
                time.sleep(1.0)
                node.network.be(QUIET)
            case "server killed":
                node.host.kill()
                node.host.start()
            case _:
                node.host.stop(self._dice.choice((signal.SIGINT, signal.SIGQUIT)))
                node.host.start()
        self.done[kind] += 1

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLED_WITHIN_S
        quiet = 0
        while quiet < 3:
            time.sleep(0.5)
            waiting = {node.name: node.waiting() for node in self.nodes}
            quiet = 0 if any(waiting.values()) else quiet + 1
            if self._errors or time.monotonic() > deadline:
                for node in self.nodes:
                    with node.host.session() as session:
                        rows = session.execute("SELECT name, state, why FROM mailroom.origin").fetchall()
                    click.echo(f"{node.name}: {rows}")
                raise click.ClickException(f"not settled: {waiting}")


def violations(nodes: Sequence[RingNode]) -> Iterator[str]:
    """Hold the ledgers of each node against those of the one before it."""
    clocks: dict[UUID, int] = {}  # at which a message was handled
    causes: dict[UUID, UUID] = {}
    for source, target in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        where = f"{source.name} to {target.name}"
        with source.host.session() as session:
            sent = {id: (key, nth) for id, key, nth in session.execute("SELECT id, key, nth FROM ring.sent")}
            causes |= dict(session.execute("SELECT id, cause FROM ring.sent WHERE cause IS NOT NULL").fetchall())
        with target.host.session() as session:
            handled = session.execute(
                "SELECT id, key, clock, sent_clock, origin FROM ring.handled ORDER BY turn"
            ).fetchall()
            dead = session.execute("SELECT stage, reason FROM mailroom.dead_letter").fetchall()
        clocks |= {id: clock for id, _, clock, _, _ in handled}
        times = Counter(id for id, *_ in handled)
        click.echo(f"{where}: {len(sent):,} sent, {len(handled):,} handled")
        if lost := sent.keys() - times.keys():
            yield f"{where}: {len(lost)} lost"
        if foreign := times.keys() - sent.keys():
            yield f"{where}: {len(foreign)} handled that nobody sent"
        if twice := [id for id, number in times.items() if number > 1]:
            yield f"{where}: {len(twice)} handled twice"
        if dead:
            yield f"{where}: dead letters: {dead[:3]}"
        if early := [id for id, _, clock, sent_clock, _ in handled if clock <= sent_clock]:
            yield f"{where}: {len(early)} effects before their causes"
        if any(origin != source.id for *_, origin in handled):
            yield f"{where}: messages of another origin"
        of_key: dict[str, list[tuple[int, int, int]]] = {}
        for id, key, clock, sent_clock, _ in handled:
            of_key.setdefault(key, []).append((clock, sent_clock, sent.get(id, (key, 0))[1]))
        for key, rows in of_key.items():
            if any(not all(a < b for a, b in zip(one, other, strict=True)) for one, other in pairwise(rows)):
                yield f"{where}: inversion in key {key}"
        by_clock = sorted((clock, sent_clock) for _, _, clock, sent_clock, _ in handled)
        if any(one[0] == other[0] or one[1] >= other[1] for one, other in pairwise(by_clock)):
            yield f"{where}: inversion of the origin"
    before = [id for id, cause in causes.items() if id in clocks and clocks[id] <= clocks.get(cause, 0)]
    if before:
        yield f"{len(before)} answers handled at a clock before that of their question"


def play(seconds: float, seed: int, logs: Path | None = None) -> list[str]:
    """Run a campaign; return what is violated."""
    with home_of_campaign() as home:
        nodes = [RingNode(home, name, seed) for name in NAMES]
        try:
            for node in nodes:
                node.start()
            for nth, node in enumerate(nodes):
                node.link(source=nodes[nth - 1], reader=nodes[(nth + 1) % len(nodes)])
            ring = Ring(nodes, seed)
            ring.run(seconds)
            click.echo(", ".join(f"{number} x {kind}" for kind, number in ring.done.most_common()))
            return list(violations(nodes))
        finally:
            for node in nodes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    node.close()
            if logs is not None:
                logs.mkdir(exist_ok=True)
                for log in home.glob("*.log"):
                    (logs / log.name).write_bytes(log.read_bytes())


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long faults are made.")
@click.option("--seed", type=int, help="The same seed makes the same faults in the same order; drawn if not given.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep what the daemons logged here.")
def main(seconds: float, seed: int | None, logs: Path | None) -> None:
    """Break three nodes in a ring and hold their ledgers against the guarantees."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    click.echo(f"seed {seed}")
    found = play(seconds, seed, logs)
    for each in found:
        click.echo(f"VIOLATED: {each}")
    click.echo(f"seed {seed}: {len(found)} violations")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
