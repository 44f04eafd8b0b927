"""`python -m tests.faults.bridges.away`: a broker that is away for long, under load; `make bridges-away` calls it.

One node with the dispatcher as it is shipped publishes a topic, and delivers another one to an inbox of its own. The
broker is there for half of the time that it is then away, and so on, and there again at the end. Meanwhile nothing but
the bridge may notice: the inbox's latency stays as it was, and no session of ours idles in a transaction. When it is
back everything that waited is published, each once and in its order.
"""

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import click
import psycopg
import sqlalchemy
from confluent_kafka import Consumer, TopicPartition

from inbox import Inbox
from mailroom import create_inbox, schema
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.record import Form
from mailroom.bridges.settings import OutSettings
from outbox import Outbox, Outgoing
from tests.faults.host import Host
from tests.faults.stage import home_of_campaign
from tests.support.kafka import Kafka

OUT, HERE = "order.placed", "invoice.due"
PARTITIONS = 6
KEYS = 200
STEP_S = 0.1  # between two transactions of the load
LOOK_S = 0.003
WINDOW_S = 10.0  # the p99 of so many seconds is one figure
SETTLE_S = 10.0  # behind a change, of which no figure is taken
MOST_RATIO = 1.2
MOST_IDLE_S = 30.0  # in a transaction; one that waits for the broker idles for as long as that is away
DRAINED_WITHIN_S = 300.0
REAPED_WITHIN_S = 60.0
READ_WITHIN_S = 120.0
IDLE = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - state_change)), 0)::float8 FROM pg_stat_activity
WHERE state LIKE 'idle in transaction%' AND application_name LIKE 'mailroom%'
"""
BACKLOG = """
SELECT greatest(coalesce((SELECT max(seq) FROM mailroom.transit), 0) - acked, 0),
       (SELECT coalesce(trouble, state) FROM mailroom.bridge_out) FROM mailroom.link
"""


@dataclass
class Seen:
    """What came of it. Of each state of the broker the p99 of each window, in milliseconds."""

    p99: dict[str, list[float]] = field(default_factory=lambda: {"there": [], "away": []})
    idle_s: float = 0.0  # the longest that a session of ours was idle in a transaction
    most_waiting: int = 0
    states: set[str] = field(default_factory=set)  # of the bridge while the broker was away
    drained_s: list[float] = field(default_factory=list)
    sent: int = 0
    in_log: int = 0
    handled: int = 0
    wrong: list[str] = field(default_factory=list)

    def ratio(self) -> float:
        """Return the median of the windows' p99 while the broker is away by that while it is there."""
        return statistics.median(self.p99["away"]) / statistics.median(self.p99["there"])


class _Load:
    """Sends to both topics and reaps the inbox, each from a thread; notes how long each message took to the reaper."""

    def __init__(self, host: Host, rate: int, seed: int) -> None:
        self.over = threading.Event()
        self.latencies: list[float] = []  # of the window
        self.sent: set[UUID] = set()  # what is to be published
        self.invoices = 0
        self.handled = 0
        self.errors: list[BaseException] = []
        self._host = host
        self._each = max(1, round(rate * STEP_S / 2))  # to each of the two topics
        self._dice = random.Random(seed)
        self._nth = 0
        self._is_sent = threading.Event()  # all of it

    @contextlib.contextmanager
    def at_work(self, *others: Callable[[], None]) -> Iterator[None]:
        """Have it work in this block, with others beside it until it is over."""
        works = (self._send, self._reap, *others)
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _send(self) -> None:
        try:
            with self._host.session() as session:
                while not self.over.wait(STEP_S):
                    self._send_once(session)
        finally:
            self._is_sent.set()

    def _send_once(self, session: psycopg.Connection[Any]) -> None:
        outgoing = []
        for _ in range(self._each):
            self._nth += 1
            id, key = uuid4(), f"k{self._dice.randrange(KEYS)}"
            self.sent.add(id)
            outgoing.append(Outgoing(OUT, {"nth": self._nth}, key=key, id=id))
            outgoing.append(Outgoing(HERE, {"at": time.monotonic()}, key=key))
        with session.transaction():
            Outbox().send_many(session, outgoing)
        self.invoices += self._each

    def _reap(self) -> None:
        inbox = Inbox("billing")
        deadline = math.inf
        with self._host.session() as session:
            while self.handled < self.invoices or not self._is_sent.is_set():
                if self._is_sent.is_set():
                    deadline = min(deadline, time.monotonic() + REAPED_WITHIN_S)
                if time.monotonic() > deadline:
                    return  # the figures say what is missing
                with session.transaction():
                    messages = inbox.reap_any(session, KEYS, 20)
                now = time.monotonic()
                self.latencies += [1_000 * (now - each.value["at"]) for each in messages]
                self.handled += len(messages)
                if not messages:
                    time.sleep(LOOK_S)


class _Watch:
    """Looks at the sessions and at the link, a few times a second."""

    def __init__(self, host: Host, load: _Load, seen: Seen) -> None:
        self.waiting = 0
        self.is_away = False
        self._host, self._load, self._seen = host, load, seen

    def run(self) -> None:
        with self._host.session() as session:
            while not self._load.over.wait(0.25):
                [(idle_s,)] = session.execute(IDLE).fetchall()
                [(self.waiting, state)] = session.execute(BACKLOG).fetchall()
                self._seen.idle_s = max(idle_s, self._seen.idle_s)
                self._seen.most_waiting = max(self.waiting, self._seen.most_waiting)
                if self.is_away:
                    self._seen.states.add(state)


def play(seconds: float, times: int, rate: int, how: str, seed: int, told: Callable[[str], None]) -> Seen:
    """Have the broker away `times` times for `seconds` each; return what came of it."""
    seen = Seen()
    with home_of_campaign() as home, ExitStack() as stack:
        kafka = stack.enter_context(Kafka(home / "kafka"))
        kafka.create(OUT, PARTITIONS)
        host = Host(home / "node")
        stack.callback(host.close)
        host.start()
        _make(host, kafka)
        stack.enter_context(_dispatcher(host, home))
        load = _Load(host, rate, seed)
        watch = _Watch(host, load, seen)
        with load.at_work(watch.run):
            for nth in range(times):
                _measure(load, seen, "there", seconds / 2)
                kafka.pause() if how == "paused" else kafka.kill()
                watch.is_away = True
                _measure(load, seen, "away", seconds)
                waiting, watch.is_away = watch.waiting, False
                kafka.resume() if how == "paused" else kafka.start()
                began = time.monotonic()
                _drained(watch, load)
                seen.drained_s.append(time.monotonic() - began)
                told(f"absence {nth + 1}: {waiting:,} waited, published after {seen.drained_s[-1]:.1f} s")
            _measure(load, seen, "there", seconds / 2)
        if load.errors:
            raise load.errors[0]
        _drained(watch, load, host)
        seen.sent, seen.handled = len(load.sent), load.handled
        _check_log(kafka, load, seen)
        if load.handled != load.invoices:
            seen.wrong.append(f"{load.invoices} were sent to the inbox, and {load.handled} reaped")
    return seen


def _make(host: Host, kafka: Kafka) -> None:
    url = host.dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    with sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool).begin() as migrating:
        schema.migrate(migrating)
    with host.session() as session, session.transaction():
        create_inbox(session, "billing", [HERE])
        settings = OutSettings("kafka", kafka.bootstrap, Form("{topic}"))
        Bridges().out(session, "kafka", settings, topics=[OUT], actor="campaign")


@contextlib.contextmanager
def _dispatcher(host: Host, home: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "mailroom", "dispatcher", "run", "--dsn", host.dsn]
    with (home / "dispatcher.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=Path(__file__).parents[3], env=os.environ | {"PYTHONPATH": ""}
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _measure(load: _Load, seen: Seen, state: str, seconds: float) -> None:
    """Note the p99 of each window of this time."""
    end = time.monotonic() + seconds
    load.over.wait(min(SETTLE_S, seconds / 4))
    window_s = min(WINDOW_S, seconds / 4)
    while not load.errors and end - time.monotonic() >= window_s * 0.9:
        load.latencies = []
        load.over.wait(window_s)
        if len(found := load.latencies) > 1:
            seen.p99[state].append(statistics.quantiles(found, n=100)[98])


def _drained(watch: _Watch, load: _Load, host: Host | None = None) -> None:
    """Wait until nothing is left but what was just sent; with `host` until nothing is left."""
    deadline = time.monotonic() + DRAINED_WITHIN_S
    time.sleep(1)  # the watch has looked since
    while (watch.waiting > load._each * 20) if host is None else _waits(host):
        if load.errors:
            raise load.errors[0]
        if time.monotonic() > deadline:
            raise click.ClickException(f"{watch.waiting:,} rows still wait {DRAINED_WITHIN_S:.0f} s after its return")
        time.sleep(0.1)


def _waits(host: Host) -> bool:
    with host.session() as session:
        [(outbox, waiting)] = session.execute(
            "SELECT (SELECT count(*) FROM mailroom.outbox), "
            "greatest(coalesce((SELECT max(seq) FROM mailroom.transit), 0) - acked, 0) FROM mailroom.link"
        ).fetchall()
    return bool(outbox or waiting)


def _check_log(kafka: Kafka, load: _Load, seen: Seen) -> None:
    """Read the log: everything that was sent is there, and the first of each key in its order."""
    options: dict[str, Any] = {**kafka.client, "group.id": "reader", "enable.partition.eof": True, "log_level": 0}
    consumer = Consumer(options | {"isolation.level": "read_committed"})
    consumer.assign([TopicPartition(OUT, part, 0) for part in range(PARTITIONS)])
    left, found, last = set(range(PARTITIONS)), set(), dict[str, int]()
    deadline = time.monotonic() + READ_WITHIN_S
    while left and time.monotonic() < deadline:
        for message in consumer.consume(1_000, 0.1):
            if message.error() is not None:
                left.discard(int(message.partition() or 0))
                continue
            seen.in_log += 1
            headers = dict(cast("list[tuple[str, bytes]]", message.headers()))
            id, nth = UUID(headers["ce_id"].decode()), json.loads(message.value() or b"{}")["nth"]
            key = (message.key() or b"").decode() if isinstance(message.key(), bytes) else str(message.key())
            if id not in found and nth <= last.get(key, 0):
                seen.wrong.append(f"{key}: {nth} behind {last[key]}")
            found.add(id)
            last[key] = max(nth, last.get(key, 0))
    consumer.close()
    if left:
        seen.wrong.append(f"the log's ends were not reached: {left}")
    if found != load.sent:
        seen.wrong.append(f"{len(load.sent - found)} are not in the log, {len(found - load.sent)} foreign")


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long the broker is away each time.")
@click.option("--times", default=1, show_default=True, help="How often.")
@click.option("--rate", default=200, show_default=True, help="Messages a second: half of them are published.")
@click.option("--how", type=click.Choice(["paused", "killed"]), default="paused", show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(seconds: float, times: int, rate: int, how: str, seed: int) -> None:
    """Take the broker away for long, and see that nothing but the bridge notices."""
    seen = play(seconds, times, rate, how, seed, click.echo)
    for state, figures in seen.p99.items():
        low, high = min(figures), max(figures)
        told = f"{statistics.median(figures):.1f} ms, windows {low:.1f} to {high:.1f}"
        click.echo(f"p99 of the other inbox, broker {state}: {told} ({len(figures)})")
    click.echo(f"ratio: {seen.ratio():.2f}, at most {MOST_RATIO}")
    click.echo(f"longest idle in a transaction: {seen.idle_s:.2f} s; at most {seen.most_waiting:,} rows waited")
    click.echo(f"the bridge was {', '.join(sorted(seen.states))} while the broker was away")
    click.echo(f"{seen.sent:,} sent, {seen.in_log:,} in the log; {seen.handled:,} reaped from the other inbox")
    wrong = list(seen.wrong[:10])
    if seen.ratio() > MOST_RATIO:
        wrong.append("the other inbox has become slower")
    if seen.idle_s > MOST_IDLE_S:
        wrong.append("a session was idle in a transaction")
    for each in wrong:
        click.echo(f"VIOLATED: {each}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
