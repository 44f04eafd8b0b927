"""Inboxes that read a log: each message once, in order by key, whatever fails."""

from uuid import uuid4

import psycopg
import pytest
from psycopg import IsolationLevel

from inbox import Inbox, Skip
from inbox.by_key.failure import last_clocks
from mailroom.errors import ConfigurationError
from mailroom.node.dead_letter import DeadLetters
from mailroom.sql.runner import run
from tests.logs.support import Reader, in_order, keys_of, make, write
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node

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
    lanes: dict[int, int] = dict(node.rows("SELECT clock, lane FROM mailroom.log"))
    assert {lanes[each.clock] for each in others} == {1 - lane}
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
    lanes: dict[str, int] = dict(node.rows("SELECT key, lane FROM mailroom.log"))
    of_it = {key for key in KEYS if lanes[key] == lanes[messages[0].key]}
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
