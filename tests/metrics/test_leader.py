"""What the leader samples: each wait by its cause, each dead letter once, and that a failure disturbs nobody."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from typing import Any, get_args

import psycopg
import pytest

from dispatcher import Dispatcher
from inbox import Inbox
from mailroom.errors import ConnectionFailed
from mailroom.figures import waiting
from mailroom.metrics import leader
from mailroom.metrics.failing import INBOX_FAILING, Failing
from mailroom.metrics.family import Family, Samples
from mailroom.metrics.leader import Added, LeaderSamples, sampling
from mailroom.node.dead_letter import Stage
from mailroom.session.home import Home
from mailroom.sql.runner import run
from tests.support.databases import Connect
from tests.support.node import CLOCKS_ALLOWED, SCHEMA, Node, failing
from tests.support.roles import rights, role
from tests.support.waiting import eventually_async

HOUR_S = 3_600.0
LATER_H = 100
DEAD_LETTER = """
INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, value, sent_at)
VALUES (%s, 'no', gen_random_uuid(), 't', 'k', 'M', 'U', '\\x00', now())"""
NONE = dict.fromkeys(get_args(Stage), 0)


pytestmark = [
    pytest.mark.inbox("shipping", backoff_s=86_400),
    pytest.mark.inbox("billing"),
    pytest.mark.node_sql(CLOCKS_ALLOWED),
]


def clock(node: Node) -> datetime:
    now: datetime = node.value("SELECT clock_timestamp()")
    return now


def sample(node: Node, later_h: float = LATER_H) -> dict[Family, Samples]:
    """A sample that is taken so much later."""
    return sample_at(node, clock(node) + timedelta(hours=later_h))


def sample_at(node: Node, now: datetime) -> dict[Family, Samples]:
    return run(node.connection, sampling(SCHEMA, Added(SCHEMA), now=now))


def by_label(samples: Samples) -> dict[str, Any]:
    return {"/".join(labels): value for labels, value in samples}


def only(samples: Samples) -> Any:
    [(labels, value)] = samples
    assert labels == ()
    return value


def waits(node: Node, later_h: float = LATER_H) -> dict[str, int]:
    """What waits for whom, in hours."""
    found = sample(node, later_h)
    named = {"outbox": only(found[leader.OUTBOX_OLDEST]), "executables": only(found[leader.EXECUTABLES_OLDEST])}
    return {name: round(s / HOUR_S) for name, s in (named | by_label(found[leader.INBOX_OLDEST])).items()}


def fail_first(node: Node) -> None:
    """Record a failure of the first message of `shipping`."""
    with node.connection.transaction():
        [message] = Inbox("shipping").peek(node.connection, limit=1)
        run(node.connection, failing("shipping", message, ValueError("no")))


def test_what_waits_is_told_by_whom_it_waits_for(node: Node) -> None:
    none = {"outbox": 0, "executables": 0, "shipping": 0, "billing": 0}
    assert waits(node) == none
    node.send("shipping")
    node.connection.execute(
        "INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', 'k', 1)"
    )
    assert waits(node) == none | {"outbox": LATER_H, "executables": LATER_H}
    node.deliver()
    assert waits(node) == none | {"executables": LATER_H, "shipping": LATER_H}


def test_sent_at_of_the_future_is_no_lag(node: Node) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json, sent_at) VALUES ('shipping', '1', now() + interval '9 days')"
    )
    assert waits(node)["outbox"] == 0


def test_failing_key_waits_for_a_worker_only_once_its_time_has_come(node: Node) -> None:
    node.send("shipping", key="a")
    node.deliver()
    fail_first(node)
    [(retry_s,)] = node.rows("SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM mailroom.key_state")
    before = sample(node, retry_s / HOUR_S - 1)
    assert by_label(before[leader.INBOX_OLDEST])["shipping"] == 0
    keys = {"shipping/waiting": 1, "shipping/parked": 0, "billing/waiting": 0, "billing/parked": 0}
    assert by_label(before[leader.INBOX_KEYS]) == keys
    after = sample(node, retry_s / HOUR_S + 2)
    assert round(by_label(after[leader.INBOX_OLDEST])["shipping"] / HOUR_S) == 2
    assert by_label(after[leader.INBOX_KEYS])["shipping/waiting"] == 0


def test_healthy_message_behind_failing_ones_waits_for_a_worker(node: Node) -> None:
    node.send("shipping", key="a")
    node.send("shipping", key="a")
    node.deliver()
    fail_first(node)
    assert waits(node, 5)["shipping"] == 0
    node.send("shipping", key="b")
    node.deliver()
    assert waits(node, 5)["shipping"] == 5


def test_parked_key_waits_for_nobody_and_is_counted(node: Node) -> None:
    node.connection.execute("UPDATE mailroom.inbox_registry SET max_attempts = 1")
    node.send("shipping", key="a")
    node.send("shipping", key="a")
    node.deliver()
    fail_first(node)
    found = sample(node)
    assert by_label(found[leader.INBOX_OLDEST])["shipping"] == 0
    assert by_label(found[leader.INBOX_KEYS])["shipping/parked"] == 1


def test_paused_key_is_not_parked(node: Node) -> None:
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at, paused_at) "
        "VALUES ('shipping', 'a', 1, 0, 'infinity', now())"
    )
    assert set(by_label(sample(node)[leader.INBOX_KEYS]).values()) == {0}


def test_periodic_message_is_late_once_it_is_due(node: Node) -> None:
    now = clock(node)
    node.connection.execute(
        "INSERT INTO mailroom.periodic "
        "(name, cron, time_zone, topic, kind, value, missed, jitter_s, due_at, next_at, paused) SELECT "
        "name, '@daily', 'UTC', 't', 'M', '\\x00', 'skip', 0, now(), %s + in_s * interval '1 s', name = 'paused' "
        "FROM (VALUES ('late', -50), ('coming', 50), ('paused', -50)) AS p (name, in_s)",
        [now],
    )
    assert by_label(sample_at(node, now)[leader.PERIODIC_LATE]) == {"late": 50, "coming": 0}


def test_what_lies_below_the_floors_is_not_read(node: Node) -> None:
    node.send("shipping", key="a")
    node.deliver()
    node.connection.execute("UPDATE mailroom.inbox_registry SET healthy_floor = 1000000")
    assert waits(node)["shipping"] == 0


def test_inboxes_are_read_in_portions(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AT_ONCE", 2)
    names = ["a", "b", "c"]
    for name in names:
        node.inbox(name)
    for name in names[1:]:
        node.send(name)
    node.deliver()
    assert waits(node) == {
        "outbox": 0, "executables": 0, "a": 0, "b": LATER_H, "c": LATER_H, "billing": 0, "shipping": 0
    }  # fmt: skip


def test_inbox_made_after_the_grants_is_sampled_with_all_others(node: Node) -> None:
    with role(node.dsn, *rights("dispatcher", "billing", "shipping")) as (_, dsn), psycopg.connect(dsn) as session:
        node.inbox("late")
        for name in ("late", "shipping"):
            node.send(name, key="a")
        node.deliver()
        node.connection.execute("UPDATE mailroom.inbox_registry SET max_attempts = 1")
        fail_first(node)
        found = run(session, sampling(SCHEMA, Added(SCHEMA), now=clock(node) + timedelta(hours=LATER_H)))
    assert round(by_label(found[leader.INBOX_OLDEST])["late"] / HOUR_S) == LATER_H
    assert by_label(found[leader.INBOX_KEYS])["shipping/parked"] == 1


FLUSH = "SELECT pg_stat_force_next_flush()"


def test_inbox_fails_from_its_first_failure_to_what_is_reaped(node: Node, connect: Connect) -> None:
    """Whatever is claimed and rolled back meanwhile."""
    began, failing = clock(node), Failing()

    def failing_s(at_s: int) -> dict[str, float]:
        node.connection.execute(FLUSH)
        now = began + timedelta(seconds=at_s)
        return by_label(run(node.connection, sampling(SCHEMA, Added(SCHEMA), failing, now=now))[INBOX_FAILING])

    for key in "ab":
        node.send("shipping", key=key)
    node.deliver()
    assert failing_s(0) == {"shipping": 0, "billing": 0}
    fail_first(node)
    assert failing_s(5)["shipping"] == 0
    with node.connection.transaction(force_rollback=True):
        assert Inbox("shipping").reap(node.connection, "b")
    assert failing_s(65) == {"shipping": 60, "billing": 0}
    with node.connection.transaction():
        assert Inbox("shipping").reap(node.connection, "b")
    assert failing_s(70)["shipping"] == 0
    assert failing_s(80)["shipping"] == 0
    assert failing_s(90)["shipping"] == 10


def test_scheduled_messages_are_counted(node: Node) -> None:
    for _ in range(2):
        node.send("shipping", deliver_at=clock(node) + timedelta(days=1))
    node.deliver()
    assert only(sample(node)[leader.SCHEDULED]) == 2


def test_lag_of_a_link_is_the_longest_time_that_is_known(node: Node) -> None:
    now = clock(node)
    given = {"now": now}
    node.connection.execute(
        "INSERT INTO mailroom.origin (name, state, since, created_at) SELECT name, state, %(now)s - since_s * "
        "interval '1 s', %(now)s - interval '1 day' FROM (VALUES ('fine', 'open', NULL), ('late', 'open', NULL), "
        "('was_late', 'open', NULL), ('stopped', 'stopped', 500), ('out', 'excluded', 500)) "
        "AS o (name, state, since_s)",
        given,
    )
    node.connection.execute(
        "INSERT INTO mailroom.receipt (origin, last, first, last_id, stamped_at, sent_clock, received_at, ids) "
        "SELECT number, n, n, gen_random_uuid(), received_at - n * interval '100 s', n, received_at, '{}' FROM ("
        "    SELECT number, CASE name WHEN 'late' THEN 3 ELSE 9 END AS n,"
        "           %(now)s - CASE name WHEN 'late' THEN interval '1 s' ELSE interval '1 hour' END AS received_at"
        "    FROM mailroom.origin WHERE name IN ('late', 'was_late')) AS r",
        given,
    )
    node.connection.execute(
        "INSERT INTO mailroom.lease VALUES ('links', gen_random_uuid(), 1, %(now)s + interval '1 hour', 'h', 1, 1, "
        "now(), 'awake', '{}')",
        given,
    )
    lags = by_label(sample_at(node, now)[leader.LINK_LAG])
    assert lags == {"fine": 0, "late": 300, "was_late": 0, "stopped": 500}
    # Nobody reads any of them, so nobody has noted since when.
    node.connection.execute("UPDATE mailroom.lease SET until = %(now)s - interval '2000 s'", given)
    lags = by_label(sample_at(node, now)[leader.LINK_LAG])
    assert lags == dict.fromkeys(("fine", "late", "was_late", "stopped"), 2000)


def test_bridge_lags_by_what_its_broker_has_not_acknowledged(node: Node) -> None:
    now = clock(node)
    node.connection.execute(
        "INSERT INTO mailroom.link (name, acked, state) VALUES "
        "('idle', 0, 'open'), ('late', 1, 'open'), ('gone', 0, 'cut'), ('reader', 0, 'open')"
    )
    node.connection.execute(
        "INSERT INTO mailroom.bridge_out SELECT number, '{}' FROM mailroom.link WHERE name <> 'reader'"
    )
    node.connection.execute(
        "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, "
        "sent_at) SELECT number, n, n, %s - (500 - n * 100) * interval '1 s', gen_random_uuid(), 't', 'k', 'M', "
        "'U', now() FROM mailroom.link, generate_series(1, 3) AS n WHERE name <> 'idle'",
        [now],
    )
    assert by_label(sample_at(node, now)[leader.BRIDGE_LAG]) == {"idle": 0, "late": 300}


def test_dead_letters_are_counted_once_in_whatever_order_they_commit(node: Node, connect: Connect) -> None:
    added = Added(SCHEMA)

    def counted() -> dict[str, int]:
        run(node.connection, added.counting())
        return {stage: number for stage, number in added.counts.items() if number}

    node.connection.execute(DEAD_LETTER, ["deliver"])
    slow, slower = connect(), connect()
    slow.execute(DEAD_LETTER, ["reap"])
    assert counted() == {}  # it was there before
    slower.execute(DEAD_LETTER, ["execute"])
    node.connection.execute(DEAD_LETTER, ["deliver"])
    assert counted() == counted() == {"deliver": 1}
    slow.commit()
    assert counted() == {"deliver": 1, "reap": 1}
    slower.commit()
    node.connection.execute("DELETE FROM mailroom.dead_letter WHERE stage = 'reap'")
    assert counted() == counted() == {"deliver": 1, "reap": 1, "execute": 1}


def test_what_was_counted_long_ago_is_not_looked_at_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "WINDOW", 3)
    added = Added(SCHEMA)
    run(node.connection, added.counting())
    for _ in range(4):
        for _ in range(2):
            node.connection.execute(DEAD_LETTER, ["deliver"])
        run(node.connection, added.counting())
    assert (added.counts["deliver"], added._floor, added._seen) == (8, 5, "{[5,9)}")


class Clocked:
    """A clock that goes on by so much each time it is asked."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
async def session(node: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await Home(node.dsn).connect_async("dispatcher metrics", leader.SAMPLER_SESSION) as connection:
        yield connection


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.01, 5.0), (0.5, 50.0)])
async def test_samples_take_a_hundredth_of_the_time_at_most(
    node: Node, session: psycopg.AsyncConnection, took_s: float, pause_s: float
) -> None:
    samples = LeaderSamples(Home(node.dsn), schema=SCHEMA, monotonic=Clocked(took_s))
    assert await samples.sample(session, Added(SCHEMA), Failing()) == pytest.approx(pause_s)


class FailsOnce(Home):
    """A way to the database that fails at first."""

    failures = 0

    async def connect_async(self, role: str, session: Mapping[str, str]) -> psycopg.AsyncConnection:
        if not self.failures:
            self.failures += 1
            raise ConnectionFailed("no way")
        return await super().connect_async(role, session)


async def test_failure_is_told_once_and_the_next_try_samples(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    samples, leading = LeaderSamples(FailsOnce(node.dsn), schema=SCHEMA), asyncio.Event()
    running = asyncio.create_task(samples.run(leading))
    try:
        with caplog.at_level(logging.WARNING, "mailroom.metrics"):
            assert samples.families() == {}
            leading.set()
            found = await eventually_async(samples.families)
        assert only(found[leader.SAMPLE_AGE]) >= 0
        assert set(by_label(found[leader.INBOX_OLDEST])) == {"billing", "shipping"}
        [told] = caplog.messages
        assert told.startswith("dispatcher metrics: failed (no way")
        leading.clear()
        assert samples.families() == {}  # another process tells of the node now
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_leading_dispatcher_samples_beside_its_work(node: Node) -> None:
    dispatcher = Dispatcher(node.dsn)
    samples = dispatcher._sampled()
    running = asyncio.create_task(dispatcher.run())
    try:
        assert by_label((await eventually_async(samples.families))[leader.DEAD_LETTERS_ADDED]) == NONE
    finally:
        dispatcher.stop()
        await running
    await eventually_async(lambda: not node.sessions("mailroom dispatcher metrics"))
