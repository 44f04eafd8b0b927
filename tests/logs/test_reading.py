"""Inboxes that read a log: each message once, in order by key, whatever fails."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from psycopg import IsolationLevel

from inbox import Inbox, Skip
from inbox.by_key.failure import last_clocks
from inbox.by_log import lanes, log_claim
from inbox.by_log.log_order import LogCourse
from mailroom import create_inbox, drop_inbox
from mailroom.errors import ConfigurationError, UnknownInbox
from mailroom.message.message import Message
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from tests.logs.support import Reader, days, in_order, keys_of, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node
from tests.support.waiting import wait_until_blocked

KEYS = [f"k{n % 7}" for n in range(40)]


def test_each_reader_gets_each_message_once_and_in_order(node: Node, connect: Connect) -> None:
    make(node, "billing", "search")
    write(node, KEYS)
    readers = [Reader(connect(), name) for name in ("billing", "search")]
    for reader in readers:
        taken = reader.take_all()
        assert sorted(keys_of(taken)) == sorted(KEYS)
        assert in_order(taken)
    write(node, ["late"])
    assert [keys_of(reader.take_all()) for reader in readers] == [["late"]] * 2
    assert node.value("SELECT count(*) FROM mailroom.log") == len(KEYS) + 1
    assert node.value("SELECT count(*) FROM mailroom.inbox") == 0


def test_a_lane_is_read_by_one_transaction_at_a_time(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, KEYS)
    one, two = (Reader(connect(), "billing") for _ in range(2))
    first = one.claim(1)
    [message] = first.messages
    others = [each for _ in range(60) for each in two.take(1)]
    lane = node.value("SELECT lane FROM mailroom.log WHERE clock = %s", message.clock)
    lane_of: dict[int, int] = dict(node.rows("SELECT clock, lane FROM mailroom.log"))
    assert {lane_of[each.clock] for each in others} == {1 - lane}
    one.connection.commit()
    rest = two.take_all()
    assert len(others) + len(rest) + 1 == len(KEYS)
    assert in_order([message, *rest])


def test_what_was_rolled_back_is_claimed_again(node: Node, connect: Connect) -> None:
    make(node, "billing")
    write(node, KEYS)
    reader = Reader(connect(), "billing")
    while reader.claim().messages:
        reader.connection.commit()
    write(node, KEYS)
    before = reader.claim().messages
    reader.connection.rollback()
    again = reader.take_all()
    assert len(again) == len(KEYS)
    assert {each.id for each in before} <= {each.id for each in again}


def test_a_failing_key_leaves_the_log_and_returns_to_it(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=0)
    write(node, ["a", "b", "a", "c", "a"])
    reader, apart = Reader(connect(), "billing"), node.connection
    claimed = reader.claim()
    assert keys_of(claimed.messages) == ["a", "b", "a", "c", "a"]
    recorded = reader.fail(claimed.messages[0], apart)
    assert (recorded.outcome, recorded.attempt) == ("retry", 1)
    assert keys_of(reader.take()) == ["b", "c"]  # the others of its lane go on at once
    assert node.delivered("key, clock") == [("a", 1), ("a", 3), ("a", 5)]
    write(node, ["a", "b"])
    assert keys_of(reader.take()) == ["b"]
    assert keys_of(Inbox("billing").peek(node.connection)) == ["a"] * 4
    assert [each.clock for each in reader.take(due=True)] == [1]
    assert in_order(handled := reader.take_all())
    assert keys_of(handled) == ["a"] * 3
    assert node.rows("SELECT FROM mailroom.key_state") == []
    write(node, ["a"])
    assert node.delivered() == []
    assert keys_of(reader.take()) == ["a"]  # from the log again


def test_the_second_message_of_a_key_fails(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=60)
    write(node, ["a", "b", "a", "a"])
    reader, apart = Reader(connect(), "billing"), node.connection
    reader.fail(reader.claim().messages[2], apart)
    assert keys_of(reader.take()) == ["b"]
    # The one before it is tried at once, and it when its own time comes.
    assert [each.clock for each in reader.take(due=True)] == [1]
    assert reader.take(due=True) == []
    assert node.value("SELECT retry_at > now() + interval '20 s' FROM mailroom.key_state")


def test_attempts_count_over_the_log_and_the_table(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=0, max_attempts=2)
    write(node, ["a", "a", "b"])
    reader, apart = Reader(connect(), "billing"), node.connection
    reader.fail(reader.claim().messages[0], apart)
    reader.take()
    [message] = reader.claim(due=True).messages
    assert reader.fail(message, apart).outcome == "park"
    ended = reader.claim(due=True).ended
    assert ended is not None
    assert ended.id == message.id
    reader.connection.commit()
    assert reader.take_all() == []
    write(node, ["a", "b"])
    assert keys_of(reader.take_all()) == ["b"]
    node.deliver_all()  # moves what is parked
    assert node.rows("SELECT key, count(*) FROM mailroom.parked GROUP BY key") == [("a", 3)]


def test_a_message_that_is_skipped_and_requeued_comes_after_what_is_in_hand(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1)
    write(node, ["a"])
    reader, apart = Reader(connect(), "billing"), node.connection
    reader.fail(reader.claim().messages[0], apart, Skip("no"))
    reader.take()
    assert reader.claim(due=True).ended
    reader.connection.commit()
    [(letter,)] = node.rows("SELECT id FROM mailroom.dead_letter")
    write(node, ["a"])
    held = reader.claim().messages
    operator = connect()
    operator.execute("SET lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        DeadLetters().requeue(operator, ids=[letter], actor="me")
    operator.rollback()
    reader.connection.commit()
    DeadLetters().requeue(operator, ids=[letter], actor="me")
    operator.commit()
    write(node, ["a"])
    later = reader.take_all()
    assert in_order([*held, *later])
    assert len(later) == 2


def test_lanes_of_a_dead_worker_wait_until_its_death_is_counted(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, KEYS)
    dead, reader = (Reader(connect(), "billing") for _ in range(2))
    messages = dead.claim(1).messages
    xact = dead.connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    keys = last_clocks(messages)
    assert xact is not None
    node.connection.execute(
        "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, xact)"
        " VALUES (%s, 'billing', 'host', 1, now(), %s, %s, %s, %s)",
        [uuid4(), len(keys), list(keys), list(keys.values()), xact[0]],
    )
    dead.connection.rollback()
    lane_of: dict[str, int] = dict(node.rows("SELECT key, lane FROM mailroom.log"))
    of_it = {key for key in KEYS if lane_of[key] == lane_of[messages[0].key]}
    for _ in range(9):
        assert of_it.isdisjoint(keys_of(reader.claim(hold=True).messages))
        reader.connection.rollback()
    node.connection.execute("DELETE FROM mailroom.worker")
    assert of_it <= set(keys_of(reader.take_all()))


def test_a_claim_that_only_diverts_does_not_hold_its_commit(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=60)
    write(node, ["a"])
    reader, apart = Reader(connect(), "billing"), node.connection
    reader.fail(reader.claim().messages[0], apart)
    claimed = reader.claim(hold=True)
    assert claimed.messages == []
    assert claimed.due_in_s is not None
    reader.connection.commit()
    assert node.delivered("key") == [("a",)]


def test_a_paused_inbox_gives_nothing_and_loses_nothing(node: Node, connect: Connect) -> None:
    make(node, "billing")
    write(node, KEYS)
    reader, inbox = Reader(connect(), "billing"), Inbox("billing")
    with node.connection.transaction():
        inbox.pause(node.connection, actor="me")
        inbox.pause(node.connection, "k1", actor="me")
    assert reader.take_all() == []
    with node.connection.transaction():
        inbox.resume(node.connection, actor="me")
    assert set(keys_of(reader.take_all())) == set(KEYS) - {"k1"}
    with node.connection.transaction():
        inbox.resume(node.connection, "k1", actor="me")
    assert set(keys_of(reader.take_all() + reader.take(due=True))) == {"k1"}


def test_a_transaction_that_could_see_an_old_position_is_refused(node: Node, connect: Connect) -> None:
    make(node, "billing")
    connection = connect()
    connection.isolation_level = IsolationLevel.REPEATABLE_READ
    with pytest.raises(ConfigurationError, match="repeatable read"):
        Inbox("billing").reap_any(connection)
    with pytest.raises(ConfigurationError, match="reads log"):
        Inbox("billing").reap(node.connection, "k1")


def test_large_messages_come_in_several_claims(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    for _ in range(5):
        node.send("order.paid", b"\0" * 12_000_000, key="a")
        node.deliver_all()
    reader = Reader(connect(), "billing")
    sizes = []
    while taken := reader.take():
        sizes.append(len(taken))
    assert sum(sizes) == 5
    assert max(sizes) <= 2


def test_peek_and_backlog_count_what_is_unread(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1, backoff_s=60)
    write(node, ["a", "b", "a"])
    inbox = Inbox("billing")
    assert (inbox.backlog(node.connection), inbox.backlog(node.connection, "a")) == (3, 2)
    assert [each.clock for each in inbox.peek(node.connection)] == [1, 2, 3]
    reader, apart = Reader(connect(), "billing"), node.connection
    reader.fail(reader.claim().messages[0], apart)
    reader.take()
    assert (inbox.backlog(node.connection), inbox.backlog(node.connection, "b")) == (2, 0)
    assert [each.clock for each in inbox.peek(node.connection, "a")] == [1, 3]
    assert run(node.connection, reader.order.was_in_batch("a", 1, "no")) is False
    assert node.value(f"SELECT count(*) FROM {SCHEMA}.attempt") == 1


# -- What a program knows of lanes is never taken for more than it is --------------------------------------------------


@pytest.mark.parametrize("savepoint", [False, True])
def test_lanes_of_several_claims_in_one_transaction_are_read_again_after_its_rollback(
    node: Node, connect: Connect, savepoint: bool
) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a", "b", "c"])
    inbox, connection = Inbox("billing"), connect()
    connection.execute("SAVEPOINT here")
    assert len(inbox.reap_any(connection)) == 3
    assert inbox.reap_any(connection) == []
    connection.execute("ROLLBACK TO SAVEPOINT here" if savepoint else "ROLLBACK")
    assert len(inbox.reap_any(connection)) == 3


def test_single_messages_of_many_lanes_are_taken_in_one_transaction(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=4)
    write(node, KEYS)
    inbox, connection = Inbox("billing"), connect()

    def taken() -> list[str]:
        return [found[0].key for _ in range(2 * len(KEYS)) if (found := inbox.reap_any(connection, 1, 1))]

    connection.execute("SAVEPOINT here")
    assert sorted(taken()) == sorted(KEYS)
    assert inbox.reap_any(connection, 1, 1) == []
    connection.execute("ROLLBACK TO SAVEPOINT here")
    assert sorted(taken()) == sorted(KEYS)


def test_a_lane_that_was_only_diverted_is_read_again_after_a_rollback(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2, backoff_s=0)
    [(a, b)] = node.rows(
        "SELECT min(k) FILTER (WHERE mailroom.lane_of(k, 2) = 0), min(k) FILTER (WHERE mailroom.lane_of(k, 2) = 1)"
        " FROM (SELECT 'k' || n AS k FROM generate_series(1, 20) AS n) AS keys"
    )
    write(node, [b] * 40)
    worker, another = (Reader(connect(), "billing") for _ in range(2))
    worker.take(10)
    write(node, [a])
    [message] = another.claim(1).messages
    another.fail(message, node.connection)
    assert set(keys_of(worker.claim(10).messages)) == {b}  # and a is diverted, in the same transaction
    worker.connection.rollback()
    for _ in range(20):
        worker.take(10)
        worker.take(10, due=True)
    assert Inbox("billing").backlog(node.connection) == 0


def test_an_idle_reader_takes_what_an_operator_puts_back(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a"])
    reader = Reader(connect(), "billing")
    reader.fail(reader.claim().messages[0], node.connection, Skip("no"))
    reader.take()
    assert reader.claim(due=True).ended
    reader.connection.commit()
    write(node, ["b"])
    assert keys_of(reader.take_all()) == ["b"]
    [(letter,)] = node.rows("SELECT id FROM mailroom.dead_letter")
    with node.connection.transaction():
        DeadLetters().requeue(node.connection, ids=[letter], actor="me")
    assert keys_of(reader.take()) == ["a"]


def test_an_inbox_that_was_made_anew_is_read_from_its_beginning(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    make(node, log="others")
    write(node, ["a", "b"])
    reader = Reader(connect(), "billing")
    assert len(reader.take_all()) == 2
    with node.connection.transaction():
        drop_inbox(node.connection, "billing", actor="me")
        create_inbox(node.connection, "billing", log="orders", since="start")
    assert len(reader.take_all()) == 2
    with node.connection.transaction():
        drop_inbox(node.connection, "billing", actor="me")
        create_inbox(node.connection, "billing", log="others", since="start")
    with pytest.raises(UnknownInbox, match="another log"):
        reader.take()


def test_a_claim_whose_lock_is_older_than_a_rewind_goes_by_the_rewind(
    node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(node, "billing", lanes=1)
    write(node, ["a", "a"])
    late, operator = Reader(connect(), "billing"), connect()
    assert len(late.take_all()) == 2
    text = lanes.LOCK.template.replace(
        "WHERE (SELECT is_open", "WHERE (SELECT pg_advisory_xact_lock_shared(77) IS NOT NULL) AND (SELECT is_open"
    )
    monkeypatch.setattr(log_claim, "LOCK", Sql(text, lanes.LOCK.columns))
    assert isinstance(late.course, LogCourse)
    late.course = replace(late.course, lanes=replace(late.course.lanes, dirty=frozenset({0})))
    operator.execute("SELECT pg_advisory_xact_lock(77)")
    with ThreadPoolExecutor(1) as thread:
        claiming = thread.submit(late.claim, 1)
        wait_until_blocked(node.connection, late.connection.info.backend_pid)
        Inbox("billing").rewind(operator, "start", actor="me")
        operator.commit()
        first = claiming.result(60).messages
    late.connection.commit()
    assert [each.clock for each in [*first, *late.take_all()]] == [1, 2]


def test_a_refused_transaction_holds_no_lane_and_keeps_its_settings(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=2)
    write(node, ["a"])
    connection = connect()
    connection.isolation_level = IsolationLevel.SERIALIZABLE
    with pytest.raises(ConfigurationError):
        Inbox("billing").reap_any(connection)
    assert connection.execute("SHOW enable_seqscan").fetchall() == [("on",)]
    assert keys_of(Reader(connect(), "billing").take_all()) == ["a"]


def test_a_lane_with_most_of_what_is_unread_gets_whole_batches(node: Node, connect: Connect) -> None:
    """Also where more days are unread than one claim reads; another worker goes on with the other lanes meanwhile."""
    make(node, "billing", lanes=8)
    days(node, 12, keys=["hot"] * 40 + [f"k{n}" for n in range(7)])
    reader, claims, taken = Reader(connect(), "billing"), 0, list[Message]()
    while (claimed := reader.claim(40)).messages or not claimed.is_all:
        taken += claimed.messages
        reader.connection.commit()
        claims += 1
    assert len(taken) == 12 * 47
    assert in_order(taken)
    assert claims <= 24  # 15 would be enough; a batch that all lanes share has 5 messages of this key


def test_lanes_that_wait_for_a_deep_one_are_read_while_another_worker_has_that(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=8)
    [deep, *lanes] = [node.value("SELECT mailroom.lane_of(%s, 8)", key) for key in ("hot", *KEYS[:7])]
    others = [key for key, lane in zip(KEYS, lanes, strict=False) if lane != deep]
    days(node, 12, keys=["hot"] * 10 + others)
    one, two = Reader(connect(), "billing"), Reader(connect(), "billing")
    taken = one.claim(60).messages
    while taken[-1].key != "hot" or {each.key for each in taken[-20:]} != {"hot"}:
        one.connection.commit()
        taken += one.claim(20).messages
    one.connection.commit()
    two.connection.execute("SELECT FROM mailroom.lanes_billing WHERE lane = %s FOR UPDATE", [deep])
    rest = one.take_all()
    assert set(keys_of(rest)) == set(others)
    two.connection.rollback()
    everything = [*taken, *rest, *two.take_all()]
    assert len(everything) == 12 * (10 + len(others))
    assert in_order(everything)
