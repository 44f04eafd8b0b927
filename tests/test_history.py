"""Generated histories: whatever writers, deliveries and reapers do, nothing is lost, doubled or overtaken.

A history is a list of steps on real sessions, a few statements each, and beside it a model keeps the ledgers: what was
sent in which transaction and what was reaped in which, each counting once its commit was acknowledged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.delivery import floor as floors
from dispatcher.delivery.floor import Floor
from inbox import Inbox
from mailroom.sql.runner import run
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node

WRITERS, REAPERS, KEYS = 3, 2, 3

writers = st.integers(0, WRITERS - 1)
reapers = st.integers(0, REAPERS - 1)
keys = st.integers(0, KEYS - 1).map("k{}".format)
steps = st.one_of(
    st.tuples(st.just("send"), writers, keys),
    st.tuples(st.just("send"), writers, keys),
    st.tuples(st.just("savepoint"), writers),
    st.tuples(st.just("rollback to savepoint"), writers),
    st.tuples(st.just("commit"), writers),
    st.tuples(st.just("commit"), writers),
    st.tuples(st.just("roll back"), writers),
    st.tuples(st.just("prepare and commit"), writers),
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, 10_000])),
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, 10_000])),
    st.tuples(st.just("deliver and roll back"), st.just(10_000)),
    st.tuples(st.just("reap any"), reapers, st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("reap key"), reapers, keys, st.integers(1, 3)),
    st.tuples(st.just("commit reap"), reapers),
    st.tuples(st.just("commit reap"), reapers),
    st.tuples(st.just("roll back reap"), reapers),
)

histories = st.lists(steps, min_size=5, max_size=60)


@dataclass
class Writer:
    connection: psycopg.Connection[Any]
    is_open: bool = False
    sent: list[int] = field(default_factory=list)
    marked: int | None = None  # how much it had sent at the savepoint


@dataclass
class Reaper:
    connection: psycopg.Connection[Any]
    taken: dict[str, list[int]] = field(default_factory=dict)  # by key, the numbers in the order given


class History:
    """The sessions, and the model beside them: messages are numbers, in the order their sends were called."""

    def __init__(
        self, node: Node, writing: Sequence[psycopg.Connection[Any]], reaping: Sequence[psycopg.Connection[Any]]
    ) -> None:
        self.node = node
        self.writers = [Writer(connection) for connection in writing]
        self.reapers = [Reaper(connection) for connection in reaping]
        self.floor = Floor("outbox")
        self.sent = 0
        self.key_of: dict[int, str] = {}
        self.transactions: list[list[int]] = []  # committed ones, in commit order
        self.committed_before: dict[int, int] = {}  # a message -> how many transactions were committed at its send
        self.reaped: list[int] = []  # committed reaps, in commit order
        self.clocks: dict[int, int] = {}

    def step(self, name: str, *arguments: Any) -> None:
        getattr(self, name.replace(" ", "_"))(*arguments)

    # Writers.

    def send(self, nth: int, key: str) -> None:
        writer = self.writers[nth]
        if not writer.is_open:
            writer.connection.execute("BEGIN; SET LOCAL mailroom.notify = off")
            writer.is_open = True
        number, self.sent = self.sent, self.sent + 1
        self.key_of[number] = key
        self.committed_before[number] = len(self.transactions)
        Outbox().send(writer.connection, "shipping", number, key=key)
        writer.sent.append(number)

    def savepoint(self, nth: int) -> None:
        writer = self.writers[nth]
        if writer.is_open:
            writer.connection.execute("SAVEPOINT s")
            writer.marked = len(writer.sent)

    def rollback_to_savepoint(self, nth: int) -> None:
        writer = self.writers[nth]
        if writer.marked is not None:
            writer.connection.execute("ROLLBACK TO s")
            del writer.sent[writer.marked :]

    def commit(self, nth: int) -> None:
        self._end(nth, "COMMIT", keeps=True)

    def roll_back(self, nth: int) -> None:
        self._end(nth, "ROLLBACK", keeps=False)

    def prepare_and_commit(self, nth: int) -> None:
        if self.writers[nth].is_open:
            gid = f"history-{self.writers[nth].connection.info.backend_pid}"
            self.writers[nth].connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            self._end(nth, f"COMMIT PREPARED '{gid}'", keeps=True)

    def _end(self, nth: int, statement: str, *, keeps: bool) -> None:
        writer = self.writers[nth]
        if writer.is_open:
            writer.connection.execute(statement.encode())
            if keeps and writer.sent:
                self.transactions.append(writer.sent)
            self.writers[nth] = Writer(writer.connection)

    # The dispatcher.

    def deliver(self, rows: int) -> None:
        delivery = self.node.deliver(start=self.floor.start(), rows=rows)
        run(self.node.connection, self.floor.raising(SCHEMA, delivery))

    def deliver_and_roll_back(self, rows: int) -> None:
        with self.node.connection.transaction(force_rollback=True):
            self.node.deliver(start=self.floor.start(), rows=rows)

    # Reapers.

    def reap_any(self, nth: int, max_keys: int, per_key: int) -> None:
        reaper = self.reapers[nth]
        busy = {key for other in self.reapers if other is not reaper for key in other.taken}
        messages = Inbox("shipping").reap_any(reaper.connection, max_keys, per_key)
        assert not busy & {message.key for message in messages}, "two transactions work on one key"
        self._take(reaper, messages)

    def reap_key(self, nth: int, key: str, limit: int) -> None:
        reaper = self.reapers[nth]
        if any(key in other.taken for other in self.reapers if other is not reaper):
            return  # it would wait
        self._take(reaper, Inbox("shipping").reap(reaper.connection, key, limit))

    def _take(self, reaper: Reaper, messages: list[Any]) -> None:
        clocks = [message.clock for message in messages]
        assert clocks == sorted(clocks)
        for message in messages:
            reaper.taken.setdefault(message.key, []).append(message.value)
            assert self.clocks.setdefault(message.value, message.clock) == message.clock, "a clock changed"

    def commit_reap(self, nth: int) -> None:
        reaper = self.reapers[nth]
        reaper.connection.commit()
        for numbers in reaper.taken.values():
            self.reaped += numbers
        self.reapers[nth] = Reaper(reaper.connection)

    def roll_back_reap(self, nth: int) -> None:
        self.reapers[nth].connection.rollback()
        self.reapers[nth] = Reaper(self.reapers[nth].connection)

    # The end of it.

    def finish(self) -> None:
        """End everything that is open, deliver and reap the rest."""
        for nth in range(WRITERS):
            self.commit(nth)
        for nth in range(REAPERS):
            self.roll_back_reap(nth)
        self.deliver(10_000)
        assert self.node.waiting() == [], f"stuck below the floor {self.floor.value}"
        while self.node.delivered():
            self.reap_any(0, 2, 2)
            self.commit_reap(0)

    def check(self) -> None:
        """Hold the guarantees against what happened."""
        committed = [number for numbers in self.transactions for number in numbers]
        assert sorted(self.reaped) == sorted(committed), "lost, doubled, or never committed"
        assert len(set(self.clocks.values())) == len(self.clocks), "a clock was given out twice"
        for key in {self.key_of[number] for number in committed}:
            clocks = [self.clocks[number] for number in self.reaped if self.key_of[number] == key]
            assert clocks == sorted(clocks), f"overtaken within {key}"
        for numbers in self.transactions:
            clocks = [self.clocks[number] for number in numbers]
            assert clocks == sorted(clocks), "G3(b): a transaction's messages lost their order"
        for number in committed:
            acknowledged = [one for numbers in self.transactions[: self.committed_before[number]] for one in numbers]
            earlier = max((self.clocks[one] for one in acknowledged), default=0)
            assert earlier < self.clocks[number], "G3(a): stamped before what was committed before it was sent"


Begin = Callable[[], History]


@pytest.fixture
def begin(dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Begin a history; all those of a test share its sessions, which cost more than a history does."""
    monkeypatch.setattr(floors, "STEP", 1)
    node = Node(dsn, connect(autocommit=True))
    node.inbox("shipping")
    node.allow_clocks()
    writing = [connect(autocommit=True) for _ in range(WRITERS)]
    reaping = [connect() for _ in range(REAPERS)]

    def begin() -> History:
        for connection in (*writing, *reaping):
            connection.rollback()  # what a history that failed has left open
        node.connection.execute("TRUNCATE mailroom.outbox, mailroom.inbox")
        return History(node, writing, reaping)

    return begin


def follow(history: History, steps: Sequence[tuple[Any, ...]]) -> None:
    for name, *arguments in steps:
        history.step(name, *arguments)
    history.finish()
    history.check()


NO_FIXTURE_CHECK = [HealthCheck.function_scoped_fixture]


@pytest.mark.slow
@given(steps=histories)
@settings(max_examples=100, deadline=None, suppress_health_check=NO_FIXTURE_CHECK)
def test_no_history_loses_doubles_or_overtakes_a_message(begin: Begin, steps: list[tuple[Any, ...]]) -> None:
    follow(begin(), steps)


@pytest.mark.slow
@pytest.mark.nightly
@given(steps=histories)
@settings(max_examples=1_500, deadline=None, suppress_health_check=NO_FIXTURE_CHECK)
@pytest.mark.timeout(600)
def test_no_history_out_of_many_loses_doubles_or_overtakes_a_message(
    begin: Begin, steps: list[tuple[Any, ...]]
) -> None:
    follow(begin(), steps)


WRONG: list[Callable[[History], object]] = [
    lambda history: history.reaped.pop(),  # lost
    lambda history: history.reaped.append(history.reaped[0]),  # doubled
    lambda history: history.reaped.reverse(),  # overtaken
    lambda history: history.clocks.update({1: history.clocks[0]}),  # a clock twice
    lambda history: history.clocks.update({0: history.clocks[2] + 1}),  # against real time
]


def test_check_that_never_fails_would_prove_nothing(begin: Begin) -> None:
    sends = [("send", 0, "k0"), ("commit", 0), ("send", 0, "k0"), ("send", 0, "k1"), ("commit", 0)]
    for wrong in WRONG:
        history = begin()
        follow(history, sends)
        wrong(history)
        with pytest.raises(AssertionError):
            history.check()
