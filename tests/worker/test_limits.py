"""Limits of an inbox hold for all its workers together: the rate, the slots, and the breaker."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from inbox import AsyncWorker, Inbox, Message, Unavailable, Worker, limits
from inbox.handling.batch import Batch
from inbox.handling.blame import blaming
from inbox.worker import limiting, loop, outcomes
from inbox.worker import worker as worker_module
from inbox.worker.limiting import Limiting
from inbox.worker.outcomes import Outcomes
from mailroom import drop_inbox, events, rename_inbox, set_inbox
from mailroom.errors import ConfigurationError
from mailroom.metrics.catalog import INBOX_BREAKER_OPEN, reading_catalog
from mailroom.metrics.process import HELD, ProcessMetrics
from mailroom.node.status import status
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    NO_TRY_BY_ITSELF,
    SHIPPING_WITH_LEDGER,
    deliver,
    ledger_keys,
    working,
    working_async,
    write_ledger,
)

pytestmark = [*SHIPPING_WITH_LEDGER, pytest.mark.node_sql(CLOCKS_ALLOWED)]

Session = psycopg.Connection[Any]
INBOX = Inbox("shipping")
# Times are arguments; the bucket's own clock begins when it is made.
BASE = datetime(2100, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BASE + timedelta(seconds=seconds)


def limit(node: Node, **given: Any) -> None:
    with node.connection.transaction():
        set_inbox(node.connection, "shipping", **given)


def take(connection: Session, wanted: int, seconds: float, back: int = 0) -> tuple[int, float] | None:
    with connection.transaction():
        return run(connection, limits.taking(SCHEMA, "shipping", wanted, back, at(seconds)))


# -- The bucket -------------------------------------------------------------------------------------------------------


def test_bucket_gives_what_it_has_and_fills_by_the_rate(node: Node) -> None:
    limit(node, rate=2, burst=4)
    assert take(node.connection, 3, 0) == (3, 0.0)
    assert take(node.connection, 3, 0) == (1, 0.0)
    assert take(node.connection, 3, 0) == (0, 0.5)
    assert take(node.connection, 3, 0.25) == (0, 0.25)
    assert take(node.connection, 3, 0.5) == (1, 0.0)
    assert take(node.connection, 9, 1_000) == (4, 0.0)
    # What is given back is there again, but no more than a bucket holds.
    assert take(node.connection, 9, 1_000, back=3) == (3, 0.0)
    assert take(node.connection, 9, 1_000, back=99) == (4, 0.0)
    # A clock that was set back fills nothing by that, and the rate goes on from there.
    assert take(node.connection, 9, 0)[0] == 0  # type: ignore[index]
    assert take(node.connection, 9, 1) == (2, 0.0)


def test_fast_bucket_is_not_asked_for_each_message(node: Node) -> None:
    limit(node, rate=1_000)
    assert take(node.connection, 1_000, 0) == (1_000, 0.0)
    granted, wait_s = take(node.connection, 1_000, 0.004)  # type: ignore[misc]
    assert (granted, wait_s) == (0, pytest.approx(0.096))
    assert take(node.connection, 1, 0.004) == (1, 0.0)
    assert take(node.connection, 1_000, 0.2) == (199, 0.0)


def test_grants_never_exceed_the_rate_whoever_takes(node: Node, connect: Connect) -> None:
    rate, burst = 50, 20
    limit(node, rate=rate, burst=burst)
    ticks = itertools.count()
    drawing = threading.Lock()
    ledger: list[tuple[float, int]] = []

    def taker(wanted: int) -> None:
        with connect() as connection:
            unused = 0
            for _ in range(60):
                with drawing:
                    seconds = next(ticks) * 0.007
                granted, _ = take(connection, wanted, seconds, unused)  # type: ignore[misc]
                ledger.append((seconds, granted - unused))
                unused = granted // 3

    with ThreadPoolExecutor(4) as takers:
        list(takers.map(taker, (1, 5, 16, 40)))
    # By the latest time that anybody had read, whatever the order in which they got the row.
    latest = max(seconds for seconds, _ in ledger)
    total = sum(granted for _, granted in ledger)
    assert 0 < total <= burst + rate * latest


def test_without_a_rate_nothing_is_taken(node: Node) -> None:
    assert take(node.connection, 5, 0) is None
    limit(node, concurrency=2)
    assert take(node.connection, 5, 0) is None


def test_a_changed_rate_keeps_what_is_in_the_bucket_and_no_more_than_it_holds(node: Node) -> None:
    limit(node, rate=1, burst=10)
    assert take(node.connection, 7, 0) == (7, 0.0)
    limit(node, rate=5, burst=2)
    assert take(node.connection, 9, 0)[0] == 2  # type: ignore[index]
    limit(node, rate=0)
    assert take(node.connection, 9, 0) is None


def test_wrong_limits_are_refused(node: Node) -> None:
    for given in (
        {"rate": -1}, {"rate": "1"}, {"rate": True}, {"rate": float("nan")}, {"burst": 5}, {"rate": 0, "burst": 5},
        {"rate": 1, "burst": 0}, {"concurrency": -1}, {"concurrency": 1.5}, {"breaker": 101}, {"breaker": -1},
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            limit(node, **given)
    assert node.rows("SELECT * FROM mailroom.limits") == []


# -- The rate of workers ----------------------------------------------------------------------------------------------


def held(counted: ProcessMetrics, limit: str) -> int:
    """Return how often the limit has held a claim."""
    times = dict(counted.read()[HELD]).get(("shipping", limit), 0)
    assert isinstance(times, int)
    return times


@pytest.fixture
def counted() -> Iterator[ProcessMetrics]:
    metrics = ProcessMetrics()
    end = metrics.listen()
    yield metrics
    end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers look often, and count all attempts, however long the test takes."""
    monkeypatch.setattr(limiting, "LOOK_S", 0.05)
    monkeypatch.setattr(outcomes, "WINDOW_S", NEVER_S)


@pytest.mark.usefixtures("quick")
def test_two_workers_share_a_rate(node: Node, counted: ProcessMetrics) -> None:
    limit(node, rate=0.001, burst=8)
    deliver(node, *(f"k{nth}" for nth in range(20)))
    workers = [Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S) for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        eventually(lambda: len(ledger_keys(node)) == 8)
        eventually(lambda: held(counted, "rate") >= 4)
        assert len(ledger_keys(node)) == 8
        # A change while they are held: each sees it when it looks again.
        limit(node, rate=0.001, burst=4)
        node.connection.execute("UPDATE mailroom.limits SET tokens = 4")
        eventually(lambda: len(ledger_keys(node)) == 12)
        limit(node, rate=0)
        eventually(lambda: len(ledger_keys(node)) == 20)
    assert len(set(ledger_keys(node))) == 20


def test_worker_stops_at_once_while_held(node: Node, monkeypatch: pytest.MonkeyPatch, counted: ProcessMetrics) -> None:
    monkeypatch.setattr(loop, "pause_s", lambda held: NEVER_S)
    limit(node, rate=0.001, burst=1)
    deliver(node, "a", "b")
    with working(Worker(node.dsn, "shipping", write_ledger)):
        eventually(lambda: held(counted, "rate") == 1)
    assert ledger_keys(node) == ["a"]


async def test_async_worker_keeps_to_limits_that_come_while_it_runs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiting, "KNOWN_S", 0.0)
    seen: list[str] = []
    looks: list[None] = []
    learning = Limiting.learning

    def counted(self: Limiting) -> Operation[None]:
        looks.append(None)
        return learning(self)

    monkeypatch.setattr(Limiting, "learning", counted)

    async def handler(message: Message, connection: Any) -> None:
        seen.append(message.key)

    worker = AsyncWorker(node.dsn, "shipping", handler, poll_interval_s=0.05)
    async with working_async(worker):
        deliver(node, "a")
        await eventually_async(lambda: seen == ["a"])
        limit(node, rate=0.001, burst=2)
        # A claim that has looked before may still take all that it finds; the second look from here on is a later one.
        before = len(looks)
        await eventually_async(lambda: len(looks) >= before + 2)
        deliver(node, "b", "c", "d")
        await eventually_async(lambda: len(seen) == 3)
        await eventually_async(lambda: node.value("SELECT tokens FROM mailroom.limits") < 1)
        await eventually_async(lambda: worker.health().ready)
    assert seen == ["a", "b", "c"]


def test_failed_attempts_use_up_tokens(node: Node) -> None:
    limit(node, rate=0.001, burst=3)
    deliver(node, "a", "b", "c", "d")
    tried: list[str] = []

    def handler(message: Message, connection: Any) -> None:
        tried.append(message.key)
        raise ValueError

    with working(Worker(node.dsn, "shipping", handler, batch=1)):
        eventually(lambda: len(tried) == 3)
        eventually(lambda: node.value("SELECT tokens FROM mailroom.limits") < 1)
    assert len(tried) == 3


# -- Slots ------------------------------------------------------------------------------------------------------------


class Gate:
    """Holds handlers until it is opened, and counts how many are at work."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.inside = self.most = 0

    def __call__(self, message: Message, connection: Any) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            assert self.open.acquire(timeout=WITHIN_S)
            write_ledger(message, connection)
        finally:
            with self._lock:
                self.inside -= 1


@pytest.mark.usefixtures("quick")
def test_no_more_batches_are_in_hand_than_there_are_slots(node: Node, counted: ProcessMetrics) -> None:
    limit(node, concurrency=2)
    deliver(node, *"abcdef")
    gate = Gate()
    workers = [Worker(node.dsn, "shipping", gate, batch=1, parallel=2, poll_interval_s=NEVER_S) for _ in range(2)]
    with working(workers[0]), working(workers[1]):
        eventually(lambda: gate.inside == 2)
        eventually(lambda: held(counted, "concurrency") >= 4)
        assert gate.inside == 2
        limit(node, concurrency=3)
        eventually(lambda: gate.inside == 3)
        limit(node, concurrency=1)
        for _ in range(6):
            gate.open.release()
        eventually(lambda: len(ledger_keys(node)) == 6)
    assert gate.most == 3


def test_slot_is_free_when_its_transaction_ends_and_lowering_does_not_wait(node: Node, connect: Connect) -> None:
    limit(node, concurrency=2)

    def locks(connection: Session, concurrency: int = 2) -> bool:
        return run(connection, limits.locking_slot(SCHEMA, "shipping", concurrency))

    one = connect()
    with connect() as two, connect() as three:
        assert (locks(one), locks(two), locks(three)) == (True, True, False)
        limit(node, concurrency=1)  # while both are in use
        node.connection.execute("SELECT pg_terminate_backend(%s, 60000)", [one.info.backend_pid])
        three.rollback()
        assert (locks(three, 1), locks(two, 1)) == (True, False)
        three.rollback()
        two.rollback()
        assert locks(two, 1)


# -- The breaker ------------------------------------------------------------------------------------------------------


def test_outcomes_trip_by_their_share_within_a_minute() -> None:
    now = [0.0]
    outcomes = Outcomes(lambda: now[0])
    outcomes.add(9, 0)
    outcomes.add(10, 10)
    assert not outcomes.tripped(50)  # too few to tell
    outcomes.add(1, 0)
    assert outcomes.tripped(50)
    assert not outcomes.tripped(51)
    now[0] = 59.0
    outcomes.add(1, 1)
    assert (outcomes.attempts, outcomes.failures) == (21, 11)
    now[0] = 60.0
    outcomes.add(0, 0)
    assert (outcomes.attempts, outcomes.failures) == (1, 1)
    outcomes.clear()
    assert (outcomes.attempts, outcomes.failures) == (0, 0)


def nothing() -> Operation[None]:
    """Claim nothing."""
    yield from ()


def allowed(connection: Session, of: Limiting) -> Batch:
    batch = Batch(False, 100)
    run(connection, of.claiming(batch, nothing()))
    return batch


def why(batch: Batch) -> str | None:
    return None if batch.allowed.held_by is None else batch.allowed.held_by.limit


def due_now(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.limits SET try_at = clock_timestamp()")


def breaker(node: Node) -> tuple[Any, ...]:
    [row] = node.rows("SELECT opened_at IS NOT NULL, tries, opened_why FROM mailroom.limits")
    return tuple(row)


@pytest.mark.node_sql(NO_TRY_BY_ITSELF)
def test_open_breaker_gives_nothing_and_has_one_message_tried(node: Node, connect: Connect) -> None:
    limit(node, breaker=50)
    with connect() as one, connect() as two:
        of_one, of_two = Limiting(SCHEMA, "shipping"), Limiting(SCHEMA, "shipping")
        assert why(allowed(one, of_one)) is None
        one.rollback()
        with node.connection.transaction():
            assert run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
            assert not run(node.connection, limits.opening(SCHEMA, "shipping", "again"))
        assert why(allowed(one, of_one)) == "breaker"
        one.rollback()
        due_now(node)
        tries = allowed(one, of_one)
        assert (why(tries), tries.allowed.is_try, tries.size) == (None, True, 1)
        other = allowed(two, of_two)
        assert (why(other), other.allowed.is_try) == ("breaker", False)
        # It fails: that is on record before the slot is free, so the other one sees it.
        with node.connection.transaction():
            run(node.connection, of_one.recording(tries, blaming(tries, ValueError(), ())))
        one.rollback()
        assert why(allowed(two, of_two)) == "breaker"
        two.rollback()
        assert breaker(node) == (True, 1, "why")
        # The second try closes it, with its batch.
        due_now(node)
        tries = allowed(two, of_two)
        run(two, of_two.ending(tries))
        assert breaker(node)[0]
        two.commit()
        assert tries.allowed.has_closed
        assert breaker(node) == (False, 0, None)
        assert why(allowed(one, of_one)) is None


def test_pause_between_tries_is_bounded(node: Node) -> None:
    limit(node, breaker=50)
    run(node.connection, limits.opening(SCHEMA, "shipping", "why", at(0)))
    waits = []
    for _ in range(40):
        run(node.connection, limits.moving_on(SCHEMA, "shipping", at(0)))
        waits.append(run(node.connection, limits.seeing(SCHEMA, "shipping", at(0))).try_in_s)
    assert waits[:6] == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert waits[-1] == 300.0
    set_back = run(node.connection, limits.seeing(SCHEMA, "shipping", at(-1)))
    assert set_back.try_in_s == 0, "it lies further ahead than any pause"


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.node_sql(NO_TRY_BY_ITSELF)
def test_workers_open_the_breaker_try_one_and_close_it(
    node: Node, caplog: pytest.LogCaptureFixture, counted: ProcessMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LEAST_IDLE_S", 0.3)
    caplog.set_level(logging.INFO, "mailroom.worker")
    node.inbox("shipping", backoff_s=3_600)
    limit(node, breaker=50)
    deliver(node, *(f"k{nth}" for nth in range(50)))
    is_down, tried = [True], []
    turns: list[events.BreakerTurned] = []
    end = events.subscribe(turns.append, events.BreakerTurned)

    def handler(message: Message, connection: Any) -> None:
        tried.append(message.key)
        if is_down[0]:
            raise ValueError("the carrier is down")
        write_ledger(message, connection)

    workers = [Worker(node.dsn, "shipping", handler, batch=1, poll_interval_s=0.1) for _ in range(2)]
    try:
        with working(workers[0]), working(workers[1]):
            eventually(lambda: breaker(node)[0])
            eventually(lambda: all(each._loops and why(each._loops[0]._batch) == "breaker" for each in workers))
            before = len(tried)  # both stand still
            since = held(counted, "breaker")
            eventually(lambda: held(counted, "breaker") >= since + 20)  # longer than they may idle
            assert before <= 2 * outcomes.LEAST
            due_now(node)
            eventually(lambda: breaker(node)[:2] == (True, 1))
            assert len(tried) == before + 1
            eventually(lambda: all(each.health().ready for each in workers))
            [shown] = status(node.connection).inboxes
            assert shown.breaker_opened_at is not None
            assert dict(run(node.connection, reading_catalog(SCHEMA))[INBOX_BREAKER_OPEN]) == {("shipping",): 1}
            is_down[0] = False
            due_now(node)
            eventually(lambda: not breaker(node)[0])
            eventually(lambda: len(ledger_keys(node)) == 50 - before - 1)
    finally:
        end()
    assert [each.is_open for each in turns] == [True, False]
    texts = [each.getMessage() for each in caplog.records]
    [opened] = [each for each in texts if "the breaker is open" in each]
    assert "20 of 20 attempts failed (100 %)" in opened
    assert "mailroom inbox resume shipping" in opened
    assert "carrier" not in opened
    assert len([each for each in texts if "the breaker is closed" in each]) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_unavailable_is_no_attempt_and_a_healthy_inbox_stays_closed(node: Node) -> None:
    limit(node, breaker=50)
    deliver(node, *(f"k{nth}" for nth in range(30)))
    times = itertools.count()

    def handler(message: Message, connection: Any) -> None:
        if next(times) < 25:
            raise Unavailable("the carrier is down", 0.001)
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handler, batch=1)):
        eventually(lambda: len(ledger_keys(node)) == 30)
    assert breaker(node) == (False, 0, None)


def test_operators_pause_and_the_breaker_are_apart(node: Node, connect: Connect) -> None:
    limit(node, breaker=50)
    deliver(node, "a")

    def acts(of: Callable[..., bool]) -> bool:
        with node.connection.transaction():
            return of(node.connection, actor="ada")

    assert acts(INBOX.pause)
    run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
    due_now(node)
    # The one who tries finds nothing in a paused inbox, which says nothing.
    worker = Worker(node.dsn, "shipping", write_ledger, poll_interval_s=0.05)
    with working(worker):
        eventually(lambda: bool(worker._loops) and worker._loops[0]._batch.allowed.is_try)
    assert breaker(node)[:2] == (True, 0)
    # A try that succeeds ends no pause: it has begun before.
    with connect() as session:
        of = Limiting(SCHEMA, "shipping")
        run(session, of.ending(allowed(session, of)))
    assert breaker(node)[0] is False
    assert status(node.connection).inboxes[0].paused_at is not None
    # An operator's resume ends both, and says so if there was only one of them.
    run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
    assert acts(INBOX.resume)
    assert breaker(node)[0] is False
    assert status(node.connection).inboxes[0].paused_at is None
    run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
    assert acts(INBOX.resume)
    assert not acts(INBOX.resume)
    assert node.rows("SELECT action FROM mailroom.audit WHERE action <> 'inbox set' ORDER BY id") == [
        ("inbox pause",),
        ("inbox resume",),
        ("inbox resume",),
    ]
    run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
    limit(node, breaker=0)
    assert breaker(node)[0] is False
    assert not run(node.connection, limits.opening(SCHEMA, "shipping", "why"))


# -- The inbox --------------------------------------------------------------------------------------------------------


def test_claims_by_hand_are_not_limited(node: Node) -> None:
    limit(node, rate=0.001, burst=1, concurrency=1, breaker=50)
    run(node.connection, limits.opening(SCHEMA, "shipping", "why"))
    deliver(node, "a", "b", "c")
    with node.connection.transaction():
        assert len(INBOX.reap_any(node.connection)) == 3


def test_limits_go_with_a_renamed_inbox_and_end_with_a_dropped_one(node: Node, connect: Connect) -> None:
    limit(node, rate=3, concurrency=2)
    with node.connection.transaction():
        rename_inbox(node.connection, "shipping", "dispatch", actor="ada")
    assert node.rows("SELECT inbox, rate_per_s, burst, concurrency FROM mailroom.limits") == [("dispatch", 3, 3, 2)]
    assert node.rows("SELECT inbox, slot FROM mailroom.slot ORDER BY slot") == [("dispatch", n) for n in range(3)]
    with node.connection.transaction():
        drop_inbox(node.connection, "dispatch", actor="ada")
    assert node.rows("SELECT inbox FROM mailroom.limits UNION ALL SELECT inbox FROM mailroom.slot") == []
