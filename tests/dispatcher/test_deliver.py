"""Deliver: the outcome and clock of each message; one bad message stops no other."""

import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.delivery import deliverer
from dispatcher.delivery.dead import tell_of_dead
from dispatcher.delivery.deliver import DELIVERY_SESSION, Delivery, delivering
from dispatcher.delivery.deliverer import Deliverer
from dispatcher.delivery.floor import ScanStart
from dispatcher.lanes.leading import LANE
from mailroom.order.clock import CEILING_STEP, MAX_CLOCK, ClockOverflow, raising_ceiling
from mailroom.session.settings import connect_async
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from outbox import Outbox
from tests.models.clock import stamp
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node, send
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.both_versions

NOW = datetime.now(UTC)
SOON = NOW + timedelta(hours=1)
LATER = NOW + timedelta(hours=2)


@pytest.fixture
async def lane(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for name, value in DELIVERY_SESSION.items():
            await connection.execute(f"SET {name} = '{value}'".encode())
        yield connection


# -- What it costs ----------------------------------------------------------------------------------------------------


async def test_small_delivery_takes_no_memory_anew(node: Node) -> None:
    """The C library of the server keeps what the statement before has freed (`settings.FIRST`)."""
    node.inbox("shipping")
    async with await connect_async(node.dsn, "dispatcher", LANE) as connection:
        lane = Deliverer(connection, SCHEMA)

        async def faults_of(deliveries: int) -> int:
            before = page_faults(connection.info.backend_pid)
            for _ in range(deliveries):
                node.send("shipping", key="k")
                assert (await lane.deliver()).taken == 1
            return page_faults(connection.info.backend_pid) - before

        await faults_of(20)
        assert await faults_of(20) < 20 * 10


def page_faults(pid: int) -> int:
    """Return how often a process was given a page of memory."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        pytest.skip("only Linux tells a server's page faults, and only of its own processes")
    return int(stat.read_text().rpartition(")")[2].split()[7])


# -- Who gets it ------------------------------------------------------------------------------------------------------


def test_plain_message_command_and_reply_reach_the_inbox_of_the_topic_s_own_name(node: Node) -> None:
    node.inbox("shipping")
    for kind in "MCR":
        node.send("shipping", key="k", kind=kind)
    assert node.deliver_all().delivered == 3
    assert node.delivered("inbox, key, kind::text") == [("shipping", "k", kind) for kind in "MCR"]


def test_event_does_not_reach_the_inbox_of_the_topic_s_own_name(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping", kind="E")
    totals = node.deliver_all()
    assert (totals.taken, totals.unrouted, totals.delivered) == (1, 1, 0)
    assert node.delivered() == []
    assert node.waiting() == []
    assert node.dead() == []


def test_subscriber_gets_every_kind(node: Node) -> None:
    node.inbox("billing", "order.paid")
    for kind in "MECR":
        node.send("order.paid", key=kind, kind=kind)
    node.deliver_all()
    assert node.delivered("inbox, key") == [("billing", kind) for kind in "MECR"]


def test_inbox_that_is_reached_twice_gets_one_copy(node: Node) -> None:
    node.inbox("shipping", "shipping")
    node.send("shipping", key="k")
    node.send("shipping", key="k", kind="C")
    node.deliver_all()
    assert node.delivered("inbox, clock - min(clock) OVER ()") == [("shipping", 0), ("shipping", 1)]


def test_topics_are_matched_exactly(node: Node) -> None:
    node.inbox("billing", "order.paid")
    for topic in ("order.Paid", "order_paid", "order.paid.twice", "order"):
        node.send(topic, kind="E")
    assert node.deliver_all().unrouted == 4


def test_event_without_subscriber_is_counted_and_gone(node: Node) -> None:
    node.send("order.paid", kind="E")
    totals = node.deliver_all()
    assert (totals.taken, totals.unrouted) == (1, 1)
    assert node.waiting() == []
    assert node.dead() == []


def test_message_command_and_reply_that_nobody_gets_end_as_dead_letters(node: Node) -> None:
    ids = [node.send("nowhere", {"a": 1}, key="k", kind=kind, headers={"user": "u"}) for kind in "MCR"]
    assert node.deliver_all().dead == 3
    assert node.dead() == [("k", "deliver", "no inbox gets this topic")] * 3
    kept = "message_id, topic, kind::text, value, headers->>'user'"
    assert node.rows(f"SELECT {kept} FROM mailroom.dead_letter ORDER BY id") == [
        (message_id, "nowhere", kind, b"\xa1aa\x01", "u") for message_id, kind in zip(ids, "MCR", strict=True)
    ]


def test_command_that_two_inboxes_would_get_ends_as_a_dead_letter_and_reaches_neither(node: Node) -> None:
    node.inbox("billing", "order.pay")
    node.inbox("audit", "order.pay")
    node.send("order.pay", key="k", kind="C")
    assert node.deliver_all().dead == 1
    assert node.delivered() == []
    [(_, _, reason)] = node.dead()
    assert "exactly one inbox" in reason
    assert reason.endswith("2")


def test_message_arrives_as_it_was_sent(node: Node) -> None:
    node.inbox("shipping")
    message_id = node.send("shipping", {"a": [1, None]}, key="k", headers={"user": "u"}, expires_at=LATER)
    node.connection.execute(
        "INSERT INTO mailroom.outbox (topic, value_json, event_type) VALUES ('shipping', '{\"a\": 1}', 'D')"
    )
    kept = "message_id, topic, key, kind, message_type, event_type, value, value_json, headers, expires_at, source"
    sent = node.rows(f"SELECT {kept}, sent_at FROM mailroom.outbox ORDER BY position")
    node.deliver_all()
    assert node.delivered(f"{kept}, sent_at") == sent
    assert sent[0][0] == message_id
    assert node.rows("SELECT DISTINCT i.origin = n.id, sent_clock = clock FROM mailroom.inbox i, mailroom.node n") == [
        (True, True)
    ]


# -- When -------------------------------------------------------------------------------------------------------------


def test_expired_message_is_counted_and_dropped(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping", key="late", expires_at=SOON)
    node.send("shipping", key="in time", expires_at=LATER)
    totals = node.deliver_all(now=SOON)
    assert (totals.expired, totals.delivered) == (1, 1)
    assert node.delivered("key") == [("in time",)]
    assert node.dead() == []


def test_scheduled_message_waits_beside_and_is_delivered_when_it_is_due(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping", key="later", deliver_at=SOON)
    node.send("shipping", key="now")
    totals = node.deliver_all(now=NOW)
    assert (totals.scheduled, totals.delivered) == (1, 1)
    assert node.waiting() == []
    assert node.rows("SELECT key, deliver_at FROM mailroom.scheduled") == [("later", SOON)]
    assert node.deliver_all(now=SOON - timedelta(microseconds=1)).taken == 0
    assert node.deliver_all(now=SOON).delivered == 1
    assert node.delivered("key") == [("now",), ("later",)]
    assert node.value("SELECT count(*) FROM mailroom.scheduled") == 0


def test_scheduled_messages_come_back_in_the_order_they_are_due(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping", key="second", deliver_at=LATER)
    node.send("shipping", key="first", deliver_at=SOON)
    node.send("shipping", key="third", deliver_at=LATER)
    node.deliver_all(now=NOW)
    node.deliver_all(now=LATER)
    assert node.delivered("key") == [("first",), ("second",), ("third",)]


def test_scheduled_message_that_expired_meanwhile_is_dropped(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping", deliver_at=SOON, expires_at=LATER)
    assert node.deliver_all(now=NOW).scheduled == 1
    assert node.deliver_all(now=LATER).expired == 1
    assert node.delivered() == []


# -- Its clock --------------------------------------------------------------------------------------------------------


def test_each_message_has_one_clock_in_position_order_however_many_inboxes_get_it(node: Node) -> None:
    for inbox in ("audit", "billing", "search"):
        node.inbox(inbox, "order.paid")
    node.inbox("shipping", "order.sent")
    sent = [("order.paid", "d"), ("order.sent", "c"), ("order.paid", "b"), ("order.sent", "a")]
    with node.connection.transaction():
        for topic, key in sent:
            send(node.connection, topic, key=key, kind="E")
    node.deliver_all()
    by_clock = node.rows(
        "SELECT clock - (SELECT min(clock) FROM mailroom.inbox), key, count(*)::int FROM mailroom.inbox GROUP BY 1, 2 "
        "ORDER BY 1"
    )
    assert by_clock == [(0, "d", 3), (1, "c", 1), (2, "b", 3), (3, "a", 1)]


def test_clock_stands_where_the_last_message_was_stamped_and_stays_when_nothing_comes(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    assert node.deliver().clock is None
    for _ in range(3):
        node.send("shipping")
    assert node.deliver().clock == 3
    assert node.deliver() == Delivery(0, 0, last=None, clock=None, ceiling=None, woken=0, more=False, drawn=3)
    assert node.value("SELECT last_value FROM mailroom.clock") == 3
    node.send("shipping")
    assert node.deliver().clock == 4


def test_clock_first_rises_to_the_largest_after_clock_of_the_batch(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    for key, after_clock in [("a", None), ("b", 500), ("c", 70)]:
        node.send("shipping", key=key, after_clock=after_clock)
    node.deliver()
    node.send("shipping", key="d", after_clock=3)
    node.deliver()
    assert node.delivered("key, clock") == [("a", 501), ("b", 502), ("c", 503), ("d", 504)]


def test_after_clock_counts_only_for_the_batch_its_message_is_in(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    node.send("shipping", key="a")
    node.send("shipping", key="b", after_clock=500)
    node.deliver(rows=1)
    node.deliver(rows=1)
    assert node.delivered("key, clock") == [("a", 1), ("b", 501)]


@given(
    base=st.integers(0, 2**61),
    after_clocks=st.lists(st.none() | st.integers(0, 2**61), min_size=1, max_size=8),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sql_stamps_as_the_clock_s_rules_say(node: Node, base: int, after_clocks: list[int | None]) -> None:
    if not node.rows("SELECT FROM mailroom.inbox_registry"):
        node.inbox("shipping")
        node.allow_clocks(MAX_CLOCK)
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [base])
    for after_clock in after_clocks:
        node.send("shipping", after_clock=after_clock)
    delivery = node.deliver()
    clocks = [clock for (clock,) in node.rows("DELETE FROM mailroom.inbox RETURNING clock")]
    expected = stamp(base, len(after_clocks), max(clock or 0 for clock in after_clocks))
    assert sorted(clocks) == list(expected)
    assert delivery.clock == expected[-1]


def test_clock_above_the_ceiling_is_not_given_out(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks(2)
    for key in "abc":
        node.send("shipping", key=key)
    delivery = node.deliver()
    assert (delivery.taken, delivery.ceiling) == (0, 3)
    assert node.waiting() == ["a", "b", "c"]
    assert node.value("SELECT last_value FROM mailroom.clock") == 0
    assert node.deliver(rows=2).clock == 2


def test_ceiling_is_raised_by_a_step_before_the_clock_passes_it(node: Node) -> None:
    node.inbox("shipping")
    node.send("shipping")
    node.deliver_all()
    assert node.delivered("clock") == [(1,)]
    assert node.value("SELECT clock_ceiling FROM mailroom.node") == 1 + CEILING_STEP


def test_ceiling_is_raised_with_a_synchronous_commit_whatever_the_session_has(node: Node) -> None:
    node.connection.execute("SET synchronous_commit = off")
    with node.connection.transaction():
        run(node.connection, raising_ceiling(SCHEMA, 5))
        assert node.value("SHOW synchronous_commit") == "on"
    assert node.value("SHOW synchronous_commit") == "off"


def test_ceiling_never_falls(node: Node) -> None:
    node.allow_clocks(9 * CEILING_STEP)
    with node.connection.transaction():
        run(node.connection, raising_ceiling(SCHEMA, 5))
    assert node.value("SELECT clock_ceiling FROM mailroom.node") == 9 * CEILING_STEP


def test_no_clock_is_given_out_twice_after_a_crash_took_the_sequence_back(node: Node) -> None:
    node.inbox("shipping")
    for _ in range(5):
        node.send("shipping")
    node.deliver_all()
    given_out = {clock for (clock,) in node.rows("DELETE FROM mailroom.inbox RETURNING clock")}
    node.connection.execute("SELECT setval('mailroom.clock', 2)")
    node.send("shipping")
    node.deliver_all()
    [(clock,)] = node.delivered("clock")
    assert clock > max(given_out)


async def test_clock_at_its_end_is_refused_and_nothing_is_taken(node: Node, lane: psycopg.AsyncConnection) -> None:
    node.inbox("shipping")
    node.connection.execute("SELECT setval('mailroom.clock', %s)", [MAX_CLOCK - 10])
    node.allow_clocks(MAX_CLOCK - 10)
    node.send("shipping", key="k")
    with pytest.raises(ClockOverflow):
        await Deliverer(lane, SCHEMA).deliver()
    assert node.waiting() == ["k"]


# -- How much at once -------------------------------------------------------------------------------------------------


def test_batch_takes_the_oldest_messages_up_to_its_rows(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    for key in "abc":
        node.send("shipping", key=key)
    delivery = node.deliver(rows=2)
    assert (delivery.taken, delivery.more) == (2, True)
    assert node.waiting() == ["c"]
    delivery = node.deliver(rows=2)
    assert (delivery.taken, delivery.more) == (1, False)


def test_what_no_inbox_gets_goes_elsewhere_also_among_plain_messages(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    for nth, kind in enumerate("MCRE"):
        for key, topic, each in [("a", "shipping", "M"), ("b", "nobody", kind), ("c", "shipping", "C")]:
            node.send(topic, key=key, kind=each)
        delivery = node.deliver()
        assert (delivery.taken, delivery.delivered, delivery.dead + delivery.unrouted) == (3, 2, 1)
        assert [key for key, _, _ in node.dead()] == (["b"] if kind != "E" else [])
        assert node.delivered("key, clock") == [("a", 3 * nth + 1), ("c", 3 * nth + 3)]
        node.connection.execute("DELETE FROM mailroom.inbox; DELETE FROM mailroom.dead_letter")


def test_batch_takes_the_oldest_messages_up_to_its_bytes_and_at_least_one(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    for key, size in [("a", 100), ("b", 1_000), ("c", 100), ("d", 100)]:
        node.send("shipping", b"x" * size, key=key)
    assert node.deliver(max_bytes=500).more
    assert node.waiting() == ["b", "c", "d"]
    assert node.deliver(max_bytes=500).more
    assert node.waiting() == ["c", "d"]
    assert not node.deliver(max_bytes=500).more
    assert node.waiting() == []


def test_values_written_as_json_count_too(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    insert = "INSERT INTO mailroom.outbox (topic, key, value_json) VALUES ('shipping', %s, to_jsonb(repeat('x', 400)))"
    for key in "ab":
        node.connection.execute(insert, [key])
    assert node.deliver(max_bytes=500).taken == 1


async def test_drain_goes_on_until_a_batch_is_not_full(node: Node, lane: psycopg.AsyncConnection) -> None:
    node.inbox("shipping")
    for _ in range(7):
        node.send("shipping")
    seen: list[int] = []
    taken = await Deliverer(lane, SCHEMA, rows=3, progress=lambda delivery: seen.append(delivery.taken)).drain()
    assert (taken, seen) == (7, [3, 3, 1])
    assert node.waiting() == []


# -- A message that the database refuses ------------------------------------------------------------------------------


def forbid(node: Node, key: str) -> None:
    """Make the inbox refuse the key: stands for whatever a row may meet there."""
    node.connection.execute(
        f"ALTER TABLE mailroom.inbox_shipping ADD CONSTRAINT no_such_key CHECK (key <> '{key}')".encode()
    )


async def test_message_that_the_database_refuses_goes_alone_to_dead_letter(
    node: Node, lane: psycopg.AsyncConnection
) -> None:
    node.inbox("shipping")
    node.inbox("billing")
    forbid(node, "bad")
    for key in ("a", "b", "bad", "c", "d"):
        node.send("shipping", "payload", key=key)
    node.send("billing", key="e")
    totals: list[Delivery] = []
    await Deliverer(lane, SCHEMA, rows=4, progress=totals.append).drain()
    assert [key for _, key, _ in node.delivered()] == ["a", "b", "c", "d", "e"]
    assert node.waiting() == []
    assert sum(delivery.dead for delivery in totals) == 1
    [(key, stage, reason)] = node.dead()
    assert (key, stage) == ("bad", "deliver")
    assert "no_such_key" in reason
    assert "23514" in reason


async def test_many_refused_messages_cost_one_more_delivery(
    node: Node, lane: psycopg.AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.inbox("shipping")
    node.inbox("audit", "shipping")
    forbid(node, "bad")
    tries: list[int] = []

    def counted(schema: str, *, rows: int, **bounds: Any) -> Operation[Delivery]:
        tries.append(rows)
        return delivering(schema, rows=rows, **bounds)

    monkeypatch.setattr(deliverer, "delivering", counted)
    totals: list[Delivery] = []
    dispatcher = Deliverer(lane, SCHEMA, rows=101, progress=totals.append)
    node.send("shipping", key="first")  # raises the clock's ceiling
    await dispatcher.drain()
    tries.clear()
    totals.clear()
    for nth in range(100):
        node.send("shipping", key="bad" if nth % 5 == 3 else f"k{nth:02}")
    assert await dispatcher.drain() == 100
    # The first time, without those that were refused, and what came meanwhile.
    assert tries == [101, 80, 101]
    assert [len(node.dead()), sum(each.dead for each in totals)] == [20, 20]
    healthy = [f"k{nth:02}" for nth in range(100) if nth % 5 != 3]
    assert node.delivered("inbox, key")[2:] == [(inbox, key) for key in healthy for inbox in ("audit", "shipping")]


async def test_every_message_refused_leaves_nothing_behind(node: Node, lane: psycopg.AsyncConnection) -> None:
    node.inbox("shipping")
    forbid(node, "bad")
    for _ in range(5):
        node.send("shipping", key="bad")
    assert await Deliverer(lane, SCHEMA, rows=3).drain() == 5
    assert (len(node.dead()), node.waiting(), node.delivered()) == (5, [], [])


async def test_total_inbox_that_came_since_the_last_delivery_rises_in_the_transaction_of_its_message(
    node: Node, lane: psycopg.AsyncConnection
) -> None:
    """A crash in between would leave the message waiting for another one."""
    node.inbox("shipping")
    deliverer = Deliverer(lane, SCHEMA)
    for nth in range(2):
        node.send("shipping")
        await deliverer.deliver()
        if not nth:
            node.inbox("ordered", "shipping", order="total")
    delivered = "SELECT xmin::text FROM mailroom.inbox_ordered"
    assert node.value(delivered) == node.value("SELECT xmin::text FROM mailroom.stable ORDER BY clock DESC LIMIT 1")


async def test_message_that_would_be_refused_is_dropped_if_expired_and_put_aside_if_early(
    node: Node, lane: psycopg.AsyncConnection
) -> None:
    node.inbox("shipping")
    forbid(node, "bad")
    node.send("shipping", key="bad")
    node.send("shipping", key="bad", expires_at=SOON)
    node.send("shipping", key="bad", deliver_at=LATER + timedelta(hours=1))
    totals: list[Delivery] = []
    await Deliverer(lane, SCHEMA, progress=totals.append).drain(LATER)
    assert [sum(getattr(each, what) for each in totals) for what in ("dead", "expired", "scheduled")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("trigger", "condition", "sqlstate"),
    [
        ("AFTER INSERT ON mailroom.inbox_shipping FOR EACH ROW", "NEW.key = 'bad'", "22ABC"),
        ("AFTER DELETE ON mailroom.outbox REFERENCING OLD TABLE AS gone FOR EACH STATEMENT",
         "EXISTS (SELECT FROM gone WHERE key = 'bad')", "P0001"),
    ],
    ids=["of the inbox", "of the delivery only"],
)  # fmt: skip
async def test_message_that_a_trigger_refuses_goes_alone_to_dead_letter(
    node: Node, lane: psycopg.AsyncConnection, trigger: str, condition: str, sqlstate: str
) -> None:
    node.inbox("shipping")
    node.connection.execute(
        f"""CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF {condition} AND current_query() !~ 'refused' THEN RAISE EXCEPTION 'no' USING ERRCODE = '{sqlstate}';
                END IF; RETURN NULL; END $$;
            CREATE TRIGGER no {trigger} EXECUTE FUNCTION no()""".encode()
    )
    for key in ("a", "bad", "b", "c", "d", "e", "f"):
        node.send("shipping", key=key)
    await Deliverer(lane, SCHEMA).drain()
    assert [key for _, key, _ in node.delivered()] == ["a", "b", "c", "d", "e", "f"]
    [(key, _, reason)] = node.dead()
    assert key == "bad"
    assert sqlstate in reason


async def test_reason_and_log_of_a_refused_message_hold_nothing_of_it(
    node: Node, lane: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture
) -> None:
    node.inbox("shipping")
    forbid(node, "secret-key")
    node.send("shipping", "secret-value", key="secret-key", headers={"user": "secret-user"})
    await Deliverer(lane, SCHEMA).drain()
    assert "secret" not in node.dead()[0][2]
    assert "secret-key" in caplog.text
    assert not {"secret-value", "secret-user"} & set(re.findall(r"[\w-]+", caplog.text))
    assert "is a dead letter now" in caplog.text
    caplog.clear()
    node.connection.execute("UPDATE mailroom.dead_letter SET reason = 'a sentence.'")
    await tell_of_dead(lane, SCHEMA, ["deliver"], 1)
    assert "a sentence. See: mailroom dead-letter show" in caplog.text


async def test_message_that_commits_below_the_refused_one_is_not_buried_in_its_place(
    node: Node, lane: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("shipping")
    forbid(node, "bad")
    late = connect()
    send(late, "shipping", key="late")
    node.send("shipping", key="bad")

    class CommitsBeforeTheBurial(Deliverer):
        async def _dead_letter(self, *arguments: Any, **options: Any) -> int:
            late.commit()
            return await super()._dead_letter(*arguments, **options)

    await CommitsBeforeTheBurial(lane, SCHEMA).drain()
    assert [key for key, _, _ in node.dead()] == ["bad"]
    assert node.delivered("key") == [("late",)]


async def test_error_that_is_not_the_data_s_is_raised_and_buries_nothing(
    node: Node, lane: psycopg.AsyncConnection
) -> None:
    node.inbox("shipping")
    node.send("shipping", key="k")
    with node.connection.transaction():
        node.connection.execute("LOCK mailroom.inbox_shipping")
        await lane.execute("SET lock_timeout = '1ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await Deliverer(lane, SCHEMA).deliver()
    assert node.waiting() == ["k"]
    assert node.dead() == []


async def test_rolled_back_delivery_leaves_everything_where_it_was(node: Node) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    node.send("shipping", key="k")
    with node.connection.transaction(force_rollback=True):
        node.deliver()
        assert node.delivered("key") == [("k",)]
    assert node.waiting() == ["k"]
    assert node.delivered() == []
    node.deliver()
    # A clock that was given out to nobody is lost, not used twice.
    assert node.delivered("key, clock") == [("k", 2)]


def test_plain_insert_from_any_language_is_delivered(node: Node) -> None:
    node.inbox("shipping")
    node.connection.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '[1]')")
    with node.connection.transaction():
        Outbox().send(node.connection, "shipping", [1])
    assert node.deliver_all().delivered == 2


# -- Beside writers that are still at work, and beside another dispatcher ----------------------------------------------


async def test_lower_position_that_commits_late_is_delivered_with_a_later_clock(
    node: Node, lane: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("shipping")
    deliverer, slow = Deliverer(lane, SCHEMA), connect()
    send(slow, "shipping", key="slow")
    node.send("shipping", key="fast")
    assert await deliverer.drain() == 1
    slow.commit()
    assert await deliverer.drain() == 1
    assert node.delivered("key") == [("fast",), ("slow",)]


async def test_rolled_back_messages_are_never_delivered_and_hold_nothing_up(
    node: Node, lane: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("shipping")
    deliverer, writer = Deliverer(lane, SCHEMA), connect()
    send(writer, "shipping", key="rolled back")
    node.send("shipping", key="kept")
    writer.rollback()
    assert await deliverer.drain() == 1
    assert node.delivered("key") == [("kept",)]


async def test_messages_of_one_transaction_keep_their_order_around_savepoints(
    node: Node, lane: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("shipping")
    writer = connect()
    send(writer, "shipping", key="1")
    writer.execute("SAVEPOINT s")
    send(writer, "shipping", key="rolled back")
    writer.execute("ROLLBACK TO s")
    send(writer, "shipping", key="2")
    node.send("shipping", key="other")
    with writer.transaction():
        send(writer, "shipping", key="3")
    writer.commit()
    await Deliverer(lane, SCHEMA).drain()
    delivered = [key for (key,) in node.delivered("key")]
    assert sorted(delivered) == ["1", "2", "3", "other"]
    assert [key for key in delivered if key != "other"] == ["1", "2", "3"]


async def test_prepared_transaction_is_delivered_once_it_is_committed(
    node: Node, lane: psycopg.AsyncConnection, connect: Connect
) -> None:
    node.inbox("shipping")
    deliverer, writer = Deliverer(lane, SCHEMA), connect(autocommit=True)
    writer.execute("BEGIN")
    writer.execute("SET LOCAL mailroom.notify = off")
    send(writer, "shipping", key="prepared")
    writer.execute("PREPARE TRANSACTION 'two phases'")
    node.send("shipping", key="other")
    assert await deliverer.drain() == 1
    writer.execute("COMMIT PREPARED 'two phases'")
    assert await deliverer.drain() == 1
    assert node.delivered("key") == [("other",), ("prepared",)]


def test_second_dispatcher_waits_for_the_first_even_with_other_messages_to_take(node: Node, connect: Connect) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    first, second = Node(node.dsn, connect(autocommit=True)), Node(node.dsn, connect(autocommit=True))
    node.send("shipping", key="a")
    with ThreadPoolExecutor(1) as thread:
        with first.connection.transaction():
            assert first.deliver().taken == 1
            node.send("shipping", key="b")
            # Above the first one's rows nothing but the lock is in its way: without it, b would be seen before a.
            position = node.value("SELECT last_value FROM mailroom.outbox_position_seq")
            waiting = thread.submit(second.deliver, start=ScanStart(position - 1))
            blockers = wait_until_blocked(node.connection, second.connection.info.backend_pid)
            assert blockers == [first.connection.info.backend_pid]
        assert waiting.result().taken == 1
    assert node.delivered("key, clock") == [("a", 1), ("b", 2)]


def test_second_dispatcher_finds_nothing_left_and_doubles_nothing(node: Node, connect: Connect) -> None:
    node.inbox("shipping")
    node.allow_clocks()
    first, second = Node(node.dsn, connect(autocommit=True)), Node(node.dsn, connect(autocommit=True))
    for key in "abc":
        node.send("shipping", key=key)
    with ThreadPoolExecutor(1) as thread:
        with first.connection.transaction():
            assert first.deliver(rows=2).taken == 2
            waiting = thread.submit(second.deliver)
            wait_until_blocked(node.connection, second.connection.info.backend_pid)
        assert waiting.result().taken == 1
    assert node.delivered("key, clock") == [("a", 1), ("b", 2), ("c", 3)]
