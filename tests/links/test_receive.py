"""Receive: the clock, the outcome and the receipt of each row of another node's batch."""

import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.links.at_source.bounds import START, Position
from dispatcher.links.receive import RECEIVING_SESSION, receiving
from dispatcher.links.receiver import LinkStopped, Receiver
from mailroom.links.handshake.wire import FURTHEST
from mailroom.node.identity import advance_clock
from mailroom.order.clock import CEILING_STEP, MAX_CLOCK, receive
from mailroom.sql.runner import run
from tests.models.clock import receive_all
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = pytest.mark.both_versions

KINDS = "MECR"
NOW = datetime.now(UTC)
SOON = NOW + timedelta(hours=1)
LATER = NOW + timedelta(hours=2)


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    target.allow_clocks()
    return linked(source, target, ["#"])


@pytest.fixture
async def lane(target: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection as the daemon has one to receive."""
    async with await psycopg.AsyncConnection.connect(target.dsn, autocommit=True) as connection:
        for name, value in RECEIVING_SESSION.items():
            await connection.execute(f"SET {name} = '{value}'".encode())
        yield connection


async def receive_all_there_is(pair: Linked, lane: psycopg.AsyncConnection, **options: Any) -> None:
    receiver, position = Receiver(lane, SCHEMA), pair.position()
    newest = pair.source.value("SELECT max(seq) FROM mailroom.transit WHERE link = %s", pair.link)
    while position.seq < newest:
        reception = await receiver.receive(pair.origin, pair.batch(position), position, **options)
        assert reception.outcome == "taken"
        assert reception.position is not None
        position = reception.position


def outcomes(reception: Any) -> dict[str, int]:
    names = ("rows", "marks", "delivered", "expired", "unrouted", "dead", "known")
    return {name: getattr(reception, name) for name in names if getattr(reception, name)}


# -- The clock --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    clock=st.integers(0, 2**61),
    sent=st.lists(st.tuples(st.integers(1, 2**61), st.booleans()), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sql_numbers_as_the_clock_s_rules_say(pair: Linked, clock: int, sent: list[tuple[int, bool]]) -> None:
    if not pair.target.rows("SELECT FROM mailroom.inbox_registry"):
        pair.inbox("billing", "order.paid")
        pair.target.allow_clocks(MAX_CLOCK)
    for table in ("transit", "receipt", "inbox"):
        (pair.source if table == "transit" else pair.target).connection.execute(
            f"DELETE FROM mailroom.{table}".encode()
        )
    pair.target.connection.execute("SELECT setval('mailroom.clock', %s)", [clock])
    pair.put(*({"sent_clock": each, "kind": "H" if is_mark else "M"} for each, is_mark in sent))
    reception = pair.take()
    now, expected = clock, []
    for each, is_mark in sent:
        now = max(now, each) if is_mark else receive(now, each)
        if not is_mark:
            expected.append(now)
    assert [each for (each,) in pair.target.delivered("clock")] == expected
    assert reception.clock == now == pair.target.value("SELECT last_value FROM mailroom.clock")
    if not any(is_mark for _, is_mark in sent):
        assert expected == receive_all(clock, [each for each, _ in sent])


def test_local_message_is_stamped_later_than_what_was_received(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({"sent_clock": 500})
    pair.take()
    pair.target.send("billing", key="here")
    pair.target.deliver()
    assert pair.target.delivered("key, clock, sent_clock") == [("k", 501, 500), ("here", 502, 502)]


def test_mark_shows_a_clock_and_is_no_message(pair: Linked) -> None:
    pair.inbox("billing", "#")
    pair.put({"sent_clock": 500, "kind": "H"})
    assert outcomes(pair.take()) == {"rows": 1, "marks": 1}
    assert pair.target.value("SELECT last_value FROM mailroom.clock") == 500
    assert pair.target.delivered() == []
    assert pair.target.dead() == []
    assert pair.receipts("first, last, sent_clock, cardinality(ids)") == [(1, 1, 500, 1)]


def test_clock_above_the_ceiling_takes_nothing(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({"sent_clock": 2_000_000})
    reception = pair.take()
    assert (reception.outcome, reception.ceiling, outcomes(reception)) == ("ceiling", 2_000_001, {})
    assert pair.receipts() == []
    assert pair.target.value("SELECT last_value FROM mailroom.clock") == 0


async def test_ceiling_is_raised_before_the_clock_passes_it(pair: Linked, lane: psycopg.AsyncConnection) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({"sent_clock": 2**55})
    await receive_all_there_is(pair, lane)
    assert pair.target.delivered("clock") == [(2**55 + 1,)]
    assert pair.target.value("SELECT clock_ceiling FROM mailroom.node") == 2**55 + 1 + CEILING_STEP


async def test_no_clock_is_given_out_twice_after_a_crash_took_the_sequence_back(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({}, {})
    await receive_all_there_is(pair, lane)
    given_out = [clock for (clock,) in pair.target.rows("DELETE FROM mailroom.inbox RETURNING clock")]
    pair.target.connection.execute("SELECT setval('mailroom.clock', 1)")
    pair.put({})
    await receive_all_there_is(pair, lane)
    [(clock,)] = pair.target.delivered("clock")
    assert clock > max(given_out)


def furthest(node: Node) -> int:
    """Return the largest clock that a node takes now."""
    return int(node.value(f"SELECT {FURTHEST.format(now='now()')} FROM mailroom.node"))


async def test_clock_that_no_node_counts_to_stops_the_link_and_what_is_before_it_comes(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({"key": "a"}, {"key": "b", "sent_clock": 2**61 + 2**60}, {"key": "c", "sent_clock": 2**62})
    with pytest.raises(LinkStopped, match=f"Row 3 has a clock above .* {2**62}. .* mailroom node advance {2**62}"):
        await receive_all_there_is(pair, lane)
    assert pair.target.delivered("key") == [("a",), ("b",)]
    assert pair.receipts("first, last") == [(1, 2)]


async def test_node_that_has_taken_the_largest_clock_is_read_by_its_neighbours_all_the_same(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    back = linked(pair.target, pair.source, ["order.paid"], name="south", reader="north")
    back.inbox("ledger", "order.paid")
    pair.put({"sent_clock": furthest(pair.target)})
    await receive_all_there_is(pair, lane)
    pair.target.deliver_all()
    for _ in range(3):
        pair.target.send("order.paid")
    pair.target.deliver_all()
    async with await psycopg.AsyncConnection.connect(pair.source.dsn, autocommit=True) as neighbour:
        await receive_all_there_is(back, neighbour)
    assert len(back.target.delivered("clock")) == 3


async def test_operator_lets_a_node_follow_one_whose_clock_was_driven_up(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    driven_up = 2**62 + 5
    pair.put({"key": "a", "sent_clock": driven_up}, {"key": "b"})
    with pytest.raises(LinkStopped, match="mailroom node advance") as stopped:
        await receive_all_there_is(pair, lane)
    with pair.target.connection.transaction():
        advance_clock(pair.target.connection, int(str(stopped.value).split()[-1]), actor="ada")
    await receive_all_there_is(pair, lane)
    assert pair.target.delivered("key, clock") == [("a", driven_up + 1), ("b", driven_up + 2)]
    # And has room beyond, for what both count and for their starts.
    pair.put({"key": "c", "sent_clock": driven_up + 2**45})
    await receive_all_there_is(pair, lane)
    assert pair.target.delivered("key")[-1] == ("c",)


async def test_largest_clock_overflows_nothing(pair: Linked, lane: psycopg.AsyncConnection) -> None:
    for clock in (MAX_CLOCK, 2**62):
        pair.source.connection.execute("DELETE FROM mailroom.transit")
        pair.put({"sent_clock": clock})
        with pytest.raises(LinkStopped):
            await receive_all_there_is(pair, lane)
        assert pair.receipts() == []


# -- The receipt ------------------------------------------------------------------------------------------------------


def test_receipt_tells_what_came(pair: Linked) -> None:
    ids = pair.put({}, {"kind": "H"}, {"kind": "E"})
    reception = pair.take(rows=2)
    pair.take()
    assert pair.receipts("first, last, last_id, sent_clock, ids") == [
        (1, 2, ids[1], 2, ids[:2]),
        (3, 3, ids[2], 3, ids[2:]),
    ]
    stamped = pair.source.rows("SELECT stamped_at FROM mailroom.transit ORDER BY seq")
    assert pair.receipts("stamped_at") == stamped[1:]
    assert reception.position == Position(2, ids[1], stamped[1][0], 2)
    assert pair.position() == Position(3, ids[2], stamped[2][0], 3)


def test_second_daemon_with_the_same_batch_does_nothing(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({}, {})
    batch = pair.batch(START)
    for outcome in ("taken", "elsewhere"):
        with pair.target.connection.transaction():
            assert run(pair.target.connection, receiving(SCHEMA, pair.origin, batch, START)).outcome == outcome
    assert len(pair.target.delivered()) == 2
    assert pair.receipts() == [(1, 2, 2)]


@pytest.mark.parametrize("first", ["commits", "rolls back"])
def test_two_daemons_at_once_receive_a_batch_once(pair: Linked, first: str) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({}, {})
    batch = pair.batch(START)

    def receive_it(connection: psycopg.Connection[Any]) -> str:
        with connection.transaction():
            return run(connection, receiving(SCHEMA, pair.origin, batch, START)).outcome

    with (
        psycopg.connect(pair.target.dsn, autocommit=True) as one,
        psycopg.connect(pair.target.dsn, autocommit=True) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        with one.transaction(force_rollback=first == "rolls back"):
            assert receive_it(one) == "taken"
            waiting = thread.submit(receive_it, other)
            wait_until_blocked(pair.target.connection, other.info.backend_pid)
        assert waiting.result(WITHIN_S) == ("elsewhere" if first == "commits" else "taken")
    assert len(pair.target.delivered()) == 2
    assert pair.receipts() == [(1, 2, 2)]


def test_position_that_is_not_the_newest_receipt_takes_nothing(pair: Linked) -> None:
    pair.put({}, {})
    pair.take()
    pair.put({})
    here = pair.position()
    batch = pair.batch(here)
    changes: list[dict[str, Any]] = [
        {"last_id": uuid4()}, {"stamped_at": NOW - timedelta(days=1)}, {"seq": 1}, {"seq": 0},
    ]  # fmt: skip
    for changed in changes:
        with pair.target.connection.transaction():
            reception = run(pair.target.connection, receiving(SCHEMA, pair.origin, batch, replace(here, **changed)))
        assert reception.outcome == "elsewhere", changed
        assert pair.receipts() == [(1, 2, 2)]


async def test_rows_with_a_hole_stop_the_link(pair: Linked, lane: psycopg.AsyncConnection) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({}, {}, {})
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 2")
    with pytest.raises(LinkStopped, match="missing"):
        await Receiver(lane, SCHEMA).receive(pair.origin, pair.batch(START), START)
    assert pair.target.delivered() == []
    assert pair.receipts() == []


def test_origin_that_is_not_open_any_more_gives_nothing(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({})
    for change in ("UPDATE mailroom.origin SET state = 'stopped'", "UPDATE mailroom.origin SET state = 'excluded'",
                   "DELETE FROM mailroom.origin"):  # fmt: skip
        pair.target.connection.execute(change.encode())
        assert pair.take().outcome == "closed", change
        assert pair.target.delivered() == []
        assert pair.receipts() == []


def test_rolled_back_reception_leaves_nothing_and_comes_again(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({})
    with pair.target.connection.transaction(force_rollback=True):
        assert pair.take().delivered == 1
    assert pair.receipts() == []
    assert pair.take().delivered == 1
    assert len(pair.target.delivered()) == 1


def test_two_origins_have_positions_of_their_own(pair: Linked) -> None:
    other = pair.target.value(
        "INSERT INTO mailroom.origin (name, id, link) VALUES ('west', gen_random_uuid(), 7) RETURNING number"
    )
    pair.inbox("billing", "order.paid", origin="*")
    pair.put({}, {})
    batch = pair.batch(START)
    for origin in (pair.origin, other):
        with pair.target.connection.transaction():
            assert run(pair.target.connection, receiving(SCHEMA, origin, batch, START)).outcome == "taken"
    assert pair.target.rows("SELECT origin, last FROM mailroom.receipt ORDER BY origin") == [
        (pair.origin, 2),
        (other, 2),
    ]
    assert len(pair.target.delivered()) == 4


# -- Who gets it ------------------------------------------------------------------------------------------------------


def test_subscriber_gets_every_kind(pair: Linked) -> None:
    pair.inbox("billing", "order.paid", origin="north")
    for origin in ("north", "*"):
        pair.target.connection.execute("UPDATE mailroom.subscription SET origin = %s", [origin])
        pair.put(*({"kind": kind} for kind in KINDS))
        assert outcomes(pair.take()) == {"rows": 4, "delivered": 4}, origin
    assert pair.target.delivered("inbox, kind::text") == [("billing", kind) for kind in 2 * KINDS]


def test_pattern_gets_messages_and_events_only(pair: Linked) -> None:
    pair.inbox("billing", "order.*")
    pair.put(*({"kind": kind, "key": kind} for kind in KINDS))
    pair.take()
    assert pair.target.delivered("key") == [("M",), ("E",)]
    reason = "no inbox gets this topic: patterns get no commands and no replies"
    assert pair.target.dead() == [("C", "receive", reason), ("R", "receive", reason)]


def test_pattern_fits_by_words(pair: Linked) -> None:
    pair.inbox("one", "order.*")
    pair.inbox("all", "order.#")
    pair.put(
        {"topic": "order.paid", "key": "a"}, {"topic": "order.paid.twice", "key": "b"}, {"topic": "order", "key": "c"}
    )
    pair.take()
    assert pair.target.delivered("inbox, key") == [("all", "a"), ("one", "a"), ("all", "b"), ("all", "c")]


def test_neither_the_inbox_s_name_nor_a_subscription_to_another_node_is_a_way(pair: Linked) -> None:
    pair.inbox("billing", "billing", origin="west")
    for origin in ("west", ""):
        pair.target.connection.execute("UPDATE mailroom.subscription SET origin = %s", [origin])
        pair.put(*({"topic": "billing", "kind": kind, "value": b"\xa1aa\x01", "headers": '{"user": "u"}'}
                   for kind in "MCR"))  # fmt: skip
        assert outcomes(pair.take()) == {"rows": 3, "dead": 3}, origin
    assert pair.target.dead() == [("k", "receive", "no inbox subscribes to this topic of north")] * 6
    kept = "SELECT origin, sent_clock, value, headers->>'user' FROM mailroom.dead_letter ORDER BY id"
    assert pair.target.rows(kept) == [(pair.source_id, nth, b"\xa1aa\x01", "u") for nth in range(1, 7)]


def test_event_that_nobody_wants_is_counted_and_gone(pair: Linked) -> None:
    pair.put({"kind": "E"})
    assert outcomes(pair.take()) == {"rows": 1, "unrouted": 1}
    assert pair.target.dead() == []


def test_subscription_begins_behind_its_since(pair: Linked) -> None:
    pair.inbox("billing", "order.paid", since=11)
    pair.inbox("audit", "order.paid", since=10)
    pair.put({"sent_clock": 10, "key": "a"}, {"sent_clock": 11, "key": "b"}, {"sent_clock": 12, "key": "c"})
    assert outcomes(pair.take()) == {"rows": 3, "delivered": 3, "dead": 1}
    assert pair.target.delivered("inbox, key") == [("audit", "b"), ("audit", "c"), ("billing", "c")]
    assert pair.target.dead() == [("a", "receive", "no inbox subscribed to this topic of north as early as that")]


def test_several_subscriptions_of_one_inbox_give_one_copy_from_the_earliest_on(pair: Linked) -> None:
    pair.inbox("billing", "order.paid", since=20)
    pair.inbox("billing", "order.paid", since=30, origin="*")
    pair.inbox("billing", "order.*", since=10)
    pair.put({"sent_clock": 11, "kind": "E", "key": "a"}, {"sent_clock": 12, "kind": "C", "key": "b"},
             {"sent_clock": 21, "kind": "C", "key": "c"}, {"sent_clock": 31, "kind": "C", "key": "d"})  # fmt: skip
    pair.take()
    assert pair.target.delivered("key") == [("a",), ("c",), ("d",)]
    assert [key for key, _, _ in pair.target.dead()] == ["b"]


def test_command_that_two_inboxes_would_get_reaches_neither(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.inbox("audit", "order.paid", since=2)
    pair.put({"kind": "C", "key": "one"}, {"kind": "M", "key": "all"}, {"kind": "C", "key": "two"})
    assert outcomes(pair.take()) == {"rows": 3, "delivered": 2, "dead": 1}
    assert pair.target.delivered("inbox, key") == [("billing", "one"), ("billing", "all")]
    assert pair.target.dead() == [("two", "receive", "a command needs exactly one inbox, its topic has 2")]


def test_expired_message_is_dropped_but_by_no_total_inbox(pair: Linked) -> None:
    pair.inbox("billing", "order.paid", "order.sent")
    pair.inbox("ledger", "order.paid", order="total")
    pair.put({"key": "a", "expires_at": SOON}, {"key": "b", "expires_at": SOON, "topic": "order.sent"},
             {"key": "c", "expires_at": LATER}, {"key": "d", "expires_at": SOON, "topic": "nobody"})  # fmt: skip
    assert outcomes(pair.take(now=SOON)) == {"rows": 4, "delivered": 3, "expired": 2}
    assert pair.target.delivered("inbox, key") == [("ledger", "a"), ("billing", "c"), ("ledger", "c")]
    assert pair.target.dead() == []


def test_expired_command_to_a_total_inbox_alone_comes(pair: Linked) -> None:
    pair.inbox("ledger", "order.paid", order="total")
    pair.put({"kind": "C", "expires_at": SOON})
    pair.take(now=LATER)
    assert pair.target.delivered("inbox") == [("ledger",)]


def test_known_message_is_left_out_of_this_origin_only(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    a, b = uuid4(), uuid4()
    pair.target.connection.execute(
        "INSERT INTO mailroom.known (origin, message_id) VALUES (%s, %s), (%s, %s)",
        [pair.origin, a, pair.origin + 1, b],
    )
    pair.put({"key": "a", "message_id": a}, {"key": "b", "message_id": b})
    assert outcomes(pair.take()) == {"rows": 2, "known": 1, "delivered": 1}
    assert pair.target.delivered("key") == [("b",)]
    assert pair.receipts("ids") == [([a, b],)]


def test_messages_come_in_the_order_sent_and_lie_by_key(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.inbox("audit", "order.paid")
    pair.put({"key": "b"}, {"key": "a"}, {"key": "b"})
    pair.take()
    assert pair.target.rows("SELECT key, sent_clock FROM mailroom.inbox_billing ORDER BY clock") == [
        ("b", 1), ("a", 2), ("b", 3),
    ]  # fmt: skip
    assert pair.target.rows("SELECT key, sent_clock FROM mailroom.inbox_billing ORDER BY ctid") == [
        ("a", 2), ("b", 1), ("b", 3),
    ]  # fmt: skip


def test_what_arrived_from_elsewhere_is_not_carried_on(pair: Linked) -> None:
    pair.target.connection.execute("INSERT INTO mailroom.link (name) VALUES ('east')")
    pair.target.connection.execute(
        "INSERT INTO mailroom.link_topic (topic, link) SELECT '#', number FROM mailroom.link"
    )
    pair.inbox("billing", "order.paid")
    pair.put({})
    pair.take()
    assert pair.target.rows("SELECT FROM mailroom.transit") == []


def test_sleeping_workers_of_the_inboxes_that_got_something_are_woken(pair: Linked) -> None:
    pair.inbox("billing", "order.paid")
    pair.inbox("audit", "order.sent")
    with psycopg.connect(pair.target.dsn, autocommit=True) as worker:
        [(channel, key)] = worker.execute(
            "SELECT 'mailroom:' || c::oid, (c::oid::bigint - 2147483648)::int "
            "FROM (SELECT 'mailroom.inbox_billing'::regclass AS c) AS p"
        ).fetchall()
        worker.execute(f'LISTEN "{channel}"'.encode())
        worker.execute("SELECT pg_advisory_lock_shared(1835100527, %s)", [key])
        pair.put({})
        reception = pair.take()
        assert (reception.woken, reception.inboxes) == (1, ["billing"])
        assert [each.channel for each in worker.notifies(timeout=WITHIN_S, stop_after=1)] == [channel]
    pair.put({})
    assert pair.take().woken == 0


# -- A message that the database refuses ------------------------------------------------------------------------------


def forbid(node: Node, inbox: str = "billing", key: str = "bad") -> None:
    """Make an inbox refuse a key: stands for whatever a row may meet there."""
    node.connection.execute(
        f"ALTER TABLE mailroom.inbox_{inbox} ADD CONSTRAINT no_such_key CHECK (key <> '{key}')".encode()
    )


async def test_refused_rows_go_to_dead_letter_and_a_thousand_others_come(
    pair: Linked, lane: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture
) -> None:
    pair.inbox("billing", "order.paid")
    pair.inbox("audit", "order.paid")
    forbid(pair.target)
    pair.put(*({"key": "bad" if nth % 100 == 7 else f"k{nth:04}", "kind": "M"} for nth in range(1_010)))
    receiver = Receiver(lane, SCHEMA)
    reception = await receiver.receive(pair.origin, pair.batch(START), START)
    assert outcomes(reception) == {"rows": 1_010, "delivered": 1_998, "dead": 11}
    healthy = [f"k{nth:04}" for nth in range(1_010) if nth % 100 != 7]
    assert pair.target.delivered("inbox, key") == [(inbox, key) for key in healthy for inbox in ("audit", "billing")]
    letters = pair.target.rows("SELECT stage, reason, origin, sent_clock FROM mailroom.dead_letter ORDER BY id")
    reason = "CheckViolation (23514) no_such_key inbox_billing"
    assert letters == [("receive", reason, pair.source_id, nth + 1) for nth in range(7, 1_010, 100)]
    assert pair.receipts() == [(1, 1_010, 1_010)]
    assert caplog.text.count("is a dead letter now: CheckViolation (23514) no_such_key inbox_billing") == 11


async def test_refused_row_that_a_total_inbox_wants_stops_the_link_and_what_is_before_it_comes(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid", "order.sent")
    pair.inbox("ledger", "order.paid", order="total")
    forbid(pair.target)
    forbid(pair.target, "ledger")
    pair.put({"key": "a"}, {"key": "bad", "topic": "order.sent"}, {"key": "bad"}, {"key": "d"})
    with pytest.raises(LinkStopped, match=r"refuses message 3 \(CheckViolation"):
        await receive_all_there_is(pair, lane)
    assert pair.target.delivered("inbox, key") == [("billing", "a"), ("ledger", "a")]
    assert [key for key, _, _ in pair.target.dead()] == ["bad"]
    assert pair.receipts("first, last") == [(1, 2)]
    for inbox in ("billing", "ledger"):
        pair.target.connection.execute(f"ALTER TABLE mailroom.inbox_{inbox} DROP CONSTRAINT no_such_key".encode())
    await receive_all_there_is(pair, lane)
    assert pair.target.rows("SELECT key FROM mailroom.inbox_ledger ORDER BY clock") == [("a",), ("bad",), ("d",)]


async def test_row_that_is_refused_only_within_the_statement_is_found_by_halving(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    pair.target.connection.execute(
        """CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF EXISTS (SELECT FROM came WHERE key = 'bad') AND current_query() !~ 'sift' THEN
                   RAISE EXCEPTION 'no' USING ERRCODE = '22ABC'; END IF; RETURN NULL; END $$;
           CREATE TRIGGER no AFTER INSERT ON mailroom.inbox REFERENCING NEW TABLE AS came
               FOR EACH STATEMENT EXECUTE FUNCTION no()"""
    )
    pair.put({"key": "a"}, {"key": "b"}, {"key": "bad"}, {"key": "c"}, {"key": "d"})
    await receive_all_there_is(pair, lane)
    assert pair.target.delivered("key") == [("a",), ("b",), ("c",), ("d",)]
    [(key, stage, reason)] = pair.target.dead()
    assert (key, stage) == ("bad", "receive")
    assert "22ABC" in reason


async def test_refused_row_that_has_expired_or_is_known_is_no_dead_letter(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    forbid(pair.target)
    known = uuid4()
    pair.target.connection.execute("INSERT INTO mailroom.known VALUES (%s, %s)", [pair.origin, known])
    pair.put({"key": "bad", "expires_at": SOON}, {"key": "bad", "message_id": known}, {"key": "bad"}, {"key": "a"})
    await receive_all_there_is(pair, lane, now=LATER)
    assert [key for key, _, _ in pair.target.dead()] == ["bad"]
    assert pair.target.delivered("key") == [("a",)]


async def test_reason_and_log_of_a_refused_message_hold_nothing_of_it(
    pair: Linked, lane: psycopg.AsyncConnection, caplog: pytest.LogCaptureFixture
) -> None:
    pair.inbox("billing", "order.paid")
    forbid(pair.target, key="secret-key")
    pair.put({"key": "secret-key", "value": b"secret-value", "headers": '{"user": "secret-user"}'})
    await receive_all_there_is(pair, lane)
    assert "secret" not in pair.target.dead()[0][2]
    assert "secret-key" in caplog.text
    assert not {"secret-value", "secret-user"} & set(re.findall(r"[\w-]+", caplog.text))


async def test_error_that_is_not_the_data_s_is_raised_and_buries_nothing(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.inbox("billing", "order.paid")
    pair.put({})
    with pair.target.connection.transaction():
        pair.target.connection.execute("LOCK mailroom.inbox_billing")
        await lane.execute("SET lock_timeout = '1ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await receive_all_there_is(pair, lane)
    assert (pair.target.dead(), pair.receipts()) == ([], [])
