"""`Inbox`: order, one transaction per key at a time, which keys are left out, and that no message is forgotten."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from inbox import Inbox, Message
from inbox.by_key import claim
from inbox.by_key.claim import Course, Share
from inbox.claims import Claims
from mailroom import create_inbox
from mailroom.errors import DecodeError, InvalidMessage, InvalidName
from mailroom.sql.operation import Sql, Statement
from mailroom.sql.runner import run
from mailroom.testing import deliver
from outbox import Outbox, Outgoing
from tests.support.databases import Connect
from tests.support.node import failing
from tests.support.waiting import WITHIN_S, wait_until_blocked

pytestmark = pytest.mark.both_versions

SHIPPING = "mailroom.inbox_shipping"


@pytest.fixture
def filler(connect: Connect) -> psycopg.Connection[Any]:
    """A connection in autocommit, beside the ones under test, to an inbox `shipping`."""
    connection = connect(autocommit=True)
    with connection.transaction():
        create_inbox(connection, "shipping")
    return connection


def fill(connection: psycopg.Connection[Any], messages: Iterable[tuple[str, object]]) -> None:
    """Deliver values to `shipping`, each under its key."""
    with connection.transaction():
        Outbox().send_many(connection, [Outgoing("shipping", value, key=key) for key, value in messages])
        deliver(connection)


def values(messages: list[Message]) -> list[object]:
    return [message.value for message in messages]


def keys(messages: list[Message]) -> set[str]:
    return {message.key for message in messages}


def fail(connection: psycopg.Connection[Any], key: str, nth: int = 1) -> None:
    """Record a failure of the key's `nth` message, whose key then waits for a long time."""
    with connection.transaction():
        message = Inbox("shipping").peek(connection, key, limit=nth)[-1]
        assert run(connection, failing("shipping", message, ValueError("no"))).outcome != "gone"
        connection.execute("UPDATE mailroom.key_state SET retry_at = now() + interval '1 hour' WHERE key = %s", [key])


def due(connection: psycopg.Connection[Any]) -> None:
    connection.execute("UPDATE mailroom.key_state SET retry_at = now() - interval '1 hour'")


class Waiting:
    """A call in a thread that waits for a lock until the test lets it go on."""

    def __init__(self, observer: psycopg.Connection[Any], connection: psycopg.Connection[Any], key: str) -> None:
        self._result: list[list[Message]] = []
        self._thread = threading.Thread(
            target=lambda: self._result.append(Inbox("shipping").reap(connection, key, limit=3))
        )
        self._thread.start()
        wait_until_blocked(observer, connection.info.backend_pid)

    def result(self) -> list[Message]:
        self._thread.join(WITHIN_S)
        [messages] = self._result
        return messages


def test_messages_come_in_clock_order_whatever_the_order_of_the_heap(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(f"k{n % 7}", n) for n in range(700)])
    filler.execute(f"CREATE TABLE scrambled AS SELECT * FROM {SHIPPING} ORDER BY md5(clock::text)")
    filler.execute(f"TRUNCATE {SHIPPING}")
    filler.execute("INSERT INTO mailroom.inbox SELECT * FROM scrambled")
    connection = connect()
    assert values(Inbox("shipping").peek(connection, "k3", limit=100)) == list(range(3, 700, 7))
    assert values(Inbox("shipping").reap(connection, "k3")) == list(range(3, 700, 7))
    assert values(Inbox("shipping").reap_any(connection, per_key=100)) == [n for n in range(700) if n % 7 != 3]


def test_reap_takes_no_more_than_its_limit_and_then_goes_on(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("k", n) for n in range(5)])
    connection = connect()
    inbox = Inbox("shipping")
    assert [values(inbox.reap(connection, "k", limit=2)) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_rolled_back_reap_is_back_and_committed_one_is_gone(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("k", n) for n in range(5)])
    connection, inbox = connect(), Inbox("shipping")
    assert values(inbox.reap(connection, "k", limit=2)) == [0, 1]
    connection.rollback()
    with connection.transaction(force_rollback=True):
        assert values(inbox.reap_any(connection, per_key=3)) == [0, 1, 2]
    assert values(inbox.reap(connection, "k", limit=2)) == [0, 1]
    connection.commit()
    assert values(inbox.peek(filler)) == [2, 3, 4]
    assert inbox.backlog(filler) == inbox.backlog(filler, "k") == 3
    assert inbox.backlog(filler, "other") == 0


def test_reap_of_a_key_waits_for_its_holder_and_then_gets_what_comes_next(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [("k", n) for n in range(6)])
    holder, other = connect(), connect()
    assert values(Inbox("shipping").reap(holder, "k", limit=2)) == [0, 1]
    waiting = Waiting(filler, other, "k")
    holder.commit()
    assert values(waiting.result()) == [2, 3, 4]


def test_reap_of_a_key_waits_for_its_holder_and_gets_what_was_rolled_back(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [("k", n) for n in range(6)])
    holder, other = connect(), connect()
    assert values(Inbox("shipping").reap_any(holder, per_key=2)) == [0, 1]
    waiting = Waiting(filler, other, "k")
    holder.rollback()
    assert values(waiting.result()) == [0, 1, 2]


def test_reap_of_a_key_whose_holder_took_everything_comes_back_empty(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [("k", 0)])
    holder, other = connect(), connect()
    Inbox("shipping").reap(holder, "k")
    waiting = Waiting(filler, other, "k")
    holder.commit()
    assert waiting.result() == []


def test_reap_of_a_key_gets_what_was_delivered_while_it_waited(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [("k", 0)])
    holder, other = connect(), connect()
    Inbox("shipping").reap(holder, "k")
    waiting = Waiting(filler, other, "k")
    fill(filler, [("k", 1)])
    holder.commit()
    assert values(waiting.result()) == [1]


def test_reap_of_another_key_waits_for_nobody(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("a", 1), ("b", 2)])
    holder, other = connect(), connect()
    Inbox("shipping").reap(holder, "a")
    other.execute("SET LOCAL lock_timeout = '1s'")
    assert values(Inbox("shipping").reap(other, "b")) == [2]


def test_reap_any_leaves_out_keys_that_others_hold_to_the_last_message(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(key, n) for n in range(5) for key in ("held", "free")])
    holder, other = connect(), connect()
    assert values(Inbox("shipping").reap(holder, "held", limit=1)) == [0]
    assert keys(Inbox("shipping").reap_any(other)) == {"free"}
    assert Inbox("shipping").reap_any(other) == []
    holder.rollback()
    assert values(Inbox("shipping").reap_any(other)) == [0, 1, 2, 3, 4]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("sent", "held", "share", "is_all"),
    [
        ([], None, (10, 10, 10), True),
        (["a"], None, (10, 10, 10), True),
        (["a", "b"] * 3, None, (10, 10, 10), True),
        (["a"], None, (1, 1, 1), True),
        (["a", "b"], None, (1, 1, 1), False),
        (["a", "a"], None, (10, 1, 10), False),
        (["a", "b"] * 9, None, (10, 10, 10), False),
        (["a"] * 9 + ["b"], None, (10, 10, 10), False),  # each key has a share: five
        (["a", "held", "held"], "held", (10, 10, 10), True),
        (["held"] * 500 + ["a"], "held", (10, 10, 10), False),  # more than one window
        (["held"] * 500, "held", (10, 10, 10), True),
    ],
)
def test_claim_reports_whether_more_can_be_claimed(
    connect: Connect, filler: psycopg.Connection[Any], sent: list[str], held: str | None,
    share: tuple[int, int, int], is_all: bool,
) -> None:  # fmt: skip
    """If it reports too much, a worker claims once more for nothing; if too little, messages wait for the poll."""
    fill(filler, [(key, n) for n, key in enumerate(sent)])
    holder, connection = connect(), connect()
    if held is not None:
        Inbox("shipping").reap(holder, held, limit=1)
    keys, per_key, total = share
    claimed = run(connection, Claims("mailroom", "shipping").claiming(Share(keys, per_key, total, due_too=False)))
    assert claimed.is_all is is_all


def test_claim_leaves_what_does_not_fit_and_reports_it(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("k", n) for n in range(3)])
    filler.execute(f"UPDATE {SHIPPING} SET value = repeat('x', 20000000)::bytea, value_json = NULL")
    claimed = run(connect(), Claims("mailroom", "shipping").claiming(Share(10, 10, 10)))
    assert (len(claimed.messages), claimed.is_all) == (1, False)


def test_key_that_waits_is_left_out_and_the_others_go_on(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [(key, n) for n in range(3) for key in ("bad", "good")])
    fail(filler, "bad")
    connection, inbox = connect(), Inbox("shipping")
    assert inbox.reap(connection, "bad") == []
    assert keys(inbox.reap_any(connection)) == {"good"}
    connection.commit()
    due(filler)
    assert values(inbox.reap_any(connection)) == [0, 1, 2]


def test_key_state_row_is_deleted_with_the_message_that_failed_and_not_before(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(key, n) for n in range(4) for key in ("k", "other")])
    fail(filler, "k", nth=3)
    due(filler)
    connection, inbox = connect(), Inbox("shipping")
    noted = "SELECT count(*) FROM mailroom.key_state WHERE key = 'k'"
    inbox.reap(connection, "other")
    inbox.reap(connection, "k", limit=2)
    connection.commit()
    assert filler.execute(noted).fetchall() == [(1,)]
    inbox.reap_any(connection, per_key=1)
    connection.rollback()
    assert filler.execute(noted).fetchall() == [(1,)]
    assert values(inbox.reap_any(connection, per_key=1)) == [2]
    connection.commit()
    assert filler.execute(noted).fetchall() == [(0,)]


# More than any window of oldest messages.
DEEP = 4_100


@pytest.mark.parametrize("state", ["held", "waiting"])
def test_deep_key_that_is_locked_does_not_hold_up_other_keys(
    connect: Connect, filler: psycopg.Connection[Any], state: str
) -> None:
    fill(filler, [("m", n) for n in range(DEEP)])
    fill(filler, [(f"{letter}{n}", n) for letter in "az" for n in range(5)])
    holder, connection, inbox = connect(), connect(), Inbox("shipping")
    if state == "held":
        Inbox("shipping").reap(holder, "m", limit=1)
    else:
        fail(filler, "m")
    seen: list[str] = []
    # Every call takes something, wherever its walk starts, until nothing is left to be claimed.
    while messages := inbox.reap_any(connection, max_keys=3, per_key=1):
        seen += [message.key for message in messages]
    assert sorted(seen) == sorted(f"{letter}{n}" for letter in "az" for n in range(5))


def test_walk_goes_round_so_that_every_key_has_its_turn(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("m", n) for n in range(DEEP)])
    fill(filler, [(f"k{n}", step) for step in range(20) for n in range(6)])
    holder, connection, inbox = connect(), connect(), Inbox("shipping")
    Inbox("shipping").reap(holder, "m", limit=1)
    seen: list[str] = []
    for _ in range(10):
        seen += [message.key for message in inbox.reap_any(connection, max_keys=2, per_key=1)]
        connection.commit()
    assert {seen.count(f"k{n}") for n in range(6)} <= {2, 3, 4}


def test_key_whose_first_keys_all_wait_is_still_found(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [(f"bad{n:02}", step) for step in range(DEEP // 20) for n in range(20)])
    for n in range(20):
        fail(filler, f"bad{n:02}")
    fill(filler, [("good", 1)])
    connection = connect()
    assert values(Inbox("shipping").reap_any(connection, max_keys=2)) == [1]
    assert Inbox("shipping").reap_any(connection, max_keys=2) == []


def test_keys_that_begin_alike_are_all_walked(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("held", n) for n in range(DEEP)])
    alike = ["k", "k\x01", "k\x01\x01", "k\x02", "k ", "kü"]
    fill(filler, [(key, key) for key in alike])
    holder, connection, inbox = connect(), connect(), Inbox("shipping")
    Inbox("shipping").reap(holder, "held", limit=1)
    seen = [inbox.reap_any(connection, max_keys=1)[0].key for _ in alike]
    assert seen == sorted(alike)  # in the order of the walk, by their bytes


GUCS = ("enable_nestloop", "enable_indexscan", "enable_sort", "enable_tidscan", "enable_material", "enable_hashjoin")


@pytest.mark.sample(1)
@pytest.mark.parametrize("stats", ["none", "stale"])
def test_bounds_hold_under_every_combination_of_planner_settings(
    connect: Connect, filler: psycopg.Connection[Any], stats: str
) -> None:
    if stats == "stale":
        filler.execute(f"ANALYZE {SHIPPING}")
    fill(filler, [(f"k{n % 30:02}", n) for n in range(900)])
    # They lie in another order than that of their clocks, so a plan that returns them as they lie is found out.
    filler.execute(
        f"WITH gone AS (DELETE FROM {SHIPPING} RETURNING *) "
        f"INSERT INTO {SHIPPING} SELECT * FROM gone ORDER BY clock DESC"
    )
    connection = connect()
    for combination in product(("on", "off"), repeat=len(GUCS)):
        for name, value in zip(GUCS, combination, strict=True):
            connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        inbox = Inbox("shipping")
        assert values(inbox.reap(connection, "k00", limit=7)) == list(range(0, 210, 30))
        messages = inbox.reap_any(connection, max_keys=5, per_key=3)
        counts = [sum(message.key == key for message in messages) for key in keys(messages)]
        assert len(counts) == 5, combination
        assert set(counts) == {3}, combination
        clocks = [message.clock for message in messages]
        assert clocks == sorted(clocks)
        connection.rollback()


def test_settings_of_the_caller_are_restored_in_savepoints_too(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [("k", n) for n in range(4)])
    connection, inbox = connect(), Inbox("shipping")
    names = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit")
    mine = ["off", "on", "off", "on", "on"]

    def shown() -> list[str]:
        return [str(connection.execute(f"SHOW {name}".encode()).fetchall()[0][0]) for name in names]

    defaults = shown()
    for name, value in zip(names, mine, strict=True):
        connection.execute(f"SET LOCAL {name} = {value}".encode())
    inbox.reap(connection, "k", limit=1)
    inbox.reap(connection, "none")
    assert shown() == mine
    with connection.transaction(force_rollback=True):
        inbox.reap_any(connection, per_key=1)
        assert shown() == mine
    assert shown() == mine
    connection.commit()
    assert shown() == defaults


@pytest.mark.slow
def test_fifty_thousand_keys_are_reaped_in_one_transaction(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    filler.execute(
        "INSERT INTO mailroom.outbox (topic, key, value_json) "
        "SELECT 'shipping', n, '1' FROM generate_series(1, 50000) n"
    )
    with filler.transaction():
        deliver(filler)
    connection, inbox = connect(), Inbox("shipping")
    taken = 0
    while messages := inbox.reap_any(connection, max_keys=20_000, per_key=1):
        taken += len(messages)
    assert taken == 50_000
    connection.commit()
    assert inbox.backlog(filler) == 0


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_strict_isolation_gives_the_right_answer_or_40001(
    connect: Connect, filler: psycopg.Connection[Any], level: psycopg.IsolationLevel
) -> None:
    fill(filler, [("k", n) for n in range(6)])
    first, second, inbox = connect(), connect(), Inbox("shipping")
    for connection in (first, second):
        connection.set_isolation_level(level)
        assert inbox.backlog(connection) == 6  # its snapshot
    assert values(inbox.reap(first, "k", limit=2)) == [0, 1]
    first.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        inbox.reap(second, "k", limit=2)
    second.rollback()
    assert values(inbox.reap_any(second, per_key=2)) == [2, 3]


@pytest.mark.parametrize(
    "json_text",
    ['"' + "x" * 100 + '"', "[1.5, null, true]", "123456789012345678901234567890"],
)
def test_message_written_as_json_reads_as_it_was_written(
    connect: Connect, filler: psycopg.Connection[Any], json_text: str
) -> None:
    filler.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', %s::jsonb)", [json_text])
    with filler.transaction():
        deliver(filler)
    [message] = Inbox("shipping").reap_any(connect())
    assert message.raw.decode() == json_text
    assert filler.execute("SELECT %s::jsonb = %s", [json_text, Jsonb(message.value)]).fetchall() == [(True,)]


@pytest.mark.parametrize("bad", ["cut CBOR", "number of JSON too long for Python", "JSON nested too deep for Python"])
def test_value_that_cannot_be_decoded_fails_alone_and_only_when_read(
    connect: Connect, filler: psycopg.Connection[Any], bad: str
) -> None:
    fill(filler, [("k", 0)])
    written = {
        "cut CBOR": r"value) VALUES ('shipping', 'k', '\x8201')",
        "number of JSON too long for Python": "value_json) VALUES ('shipping', 'k', '1e5000')",
        "JSON nested too deep for Python": "value_json) VALUES ('shipping', 'k', "
        "(repeat('[', 3000) || repeat(']', 3000))::jsonb)",
    }
    filler.execute(f"INSERT INTO mailroom.outbox (topic, key, {written[bad]}".encode())
    fill(filler, [("k", 2)])
    first, broken, last = Inbox("shipping").reap(connect(), "k")
    with pytest.raises(DecodeError):
        _ = broken.value
    assert broken.raw[:2] in (b"\x82\x01", b"10", b"[[")
    assert (first.value, last.value) == (0, 2)


def test_message_shows_where_it_is_and_never_its_value(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    fill(filler, [("k", "4711-secret")])
    [message] = Inbox("shipping").peek(connect())
    assert "secret" not in repr(message)
    assert f"clock={message.clock}" in repr(message)
    assert message.sent_clock == message.clock
    assert message.sent_at.astimezone(UTC) <= message.delivered_at.astimezone(UTC)


def test_limit_that_is_no_count_is_refused(connect: Connect, filler: psycopg.Connection[Any]) -> None:
    connection, inbox = connect(), Inbox("shipping")
    calls: tuple[Callable[[Any], object], ...] = (
        lambda limit: inbox.reap(connection, "k", limit),
        lambda limit: inbox.reap_any(connection, max_keys=limit),
        lambda limit: inbox.reap_any(connection, per_key=limit),
        lambda limit: inbox.peek(connection, limit=limit),
    )
    for call, limit in product(calls, (0, -1, 1.5, True, None, 1_000_001)):
        with pytest.raises(InvalidMessage, match="1 to 1,000,000"):
            call(limit)


def test_inbox_name_outside_the_alphabet_is_refused() -> None:
    names: list[Any] = ["Shipping", "ship-ping", "", "x" * 42, 'a"; DROP TABLE x', None]
    for name in names:
        with pytest.raises(InvalidName):
            Inbox(name)


# -- What a claim learns for the next one -----------------------------------------------------------------------------


def test_claims_of_a_backlog_take_more_messages_of_fewer_keys(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(f"k{n:02}", step) for step in range(20) for n in range(60)])
    connection, shipping = connect(), Claims("mailroom", "shipping")
    share = Share(20, 20, 20)
    claims = [run(connection, shipping.claiming(share)).messages for _ in range(70)]
    assert {len(messages) for messages in claims[:30]} == {20}
    assert len(keys(claims[0])) > 10
    assert len(keys(claims[20])) == 2
    assert sum(map(len, claims)) == 60 * 20
    for key in keys(claims[0]):
        assert [each.value for messages in claims for each in messages if each.key == key] == list(range(20))


def test_claims_take_of_many_keys_again_once_these_have_few_messages(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(f"k{n:02}", step) for step in range(10) for n in range(60)])
    connection, shipping = connect(), Claims("mailroom", "shipping")
    share = Share(20, 20, 20)
    while run(connection, shipping.claiming(share)).messages:
        pass
    fill(filler, [(f"one{n}", n) for n in range(200)])
    sizes = [len(run(connection, shipping.claiming(share)).messages) for _ in range(5)]
    assert sizes[0] < 15
    assert min(sizes[1:]) >= 19


def test_claims_take_of_as_many_keys_as_before_if_they_may_take_one_message_of_each(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(f"k{n:02}", step) for step in range(20) for n in range(60)])
    connection, inbox = connect(), Inbox("shipping")
    assert [len(inbox.reap_any(connection, max_keys=20, per_key=1)) for _ in range(30)] == [20] * 30
    for _ in range(10):
        inbox.reap_any(connection, max_keys=4, per_key=5)
    assert len(inbox.reap_any(connection, max_keys=20, per_key=1)) == 20


@pytest.mark.slow
def test_claims_read_more_of_the_oldest_while_others_hold_some_of_their_keys(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(f"k{n:05}", n) for n in range(15_000)])
    connection, other, shipping = connect(), connect(), Claims("mailroom", "shipping")
    share, inbox = Share(400, 1, 400), Inbox("shipping")

    def claimed() -> int:
        return len(run(connection, shipping.claiming(share)).messages)

    assert len(inbox.reap_any(other, max_keys=100)) == 100
    assert [claimed(), claimed()] == [300, 400]
    other.commit()
    assert [claimed() for _ in range(claim.CROWDED)] == [400] * claim.CROWDED
    assert len(inbox.reap_any(other, max_keys=100)) == 100
    assert claimed() == 300
    other.rollback()
    connection.rollback()


def test_course_that_has_to_look_further_stays_with_the_larger_window() -> None:
    course = Course(is_plain=False)
    for _ in range(2 * claim.CROWDED):
        course = course.after("k", False, Share(1, 1, 1), taken=1, keys=1, by_key=True)
    assert course.crowded == claim.CROWDED
    assert course.after("k", True, Share(1, 1, 1), taken=1, keys=1, by_key=True).crowded == claim.CROWDED - 1


def test_small_claims_read_few_of_the_oldest_until_others_hold_them(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [("held", n) for n in range(10)] + [(f"k{n:03}", n) for n in range(100)])
    connection, other, inbox = connect(), connect(), Inbox("shipping")

    def claimed() -> str:
        [message] = inbox.reap_any(connection, max_keys=1, per_key=1)
        connection.commit()
        return message.key

    assert inbox.reap_any(other, max_keys=1, per_key=1)
    del run_claims[:]
    assert [claimed() for _ in range(1 + claim.CROWDED)] == [f"k{n:03}" for n in range(1 + claim.CROWDED)]
    assert run_claims == ["plain", "any", *["plain"] * (claim.CROWDED - 1), "plain", "any"]
    other.rollback()


@pytest.fixture
def run_claims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the statements of claims that were run so far."""
    ran: list[str] = []
    name_of = {id(claim.REAP_PLAIN): "plain", id(claim.REAP_ANY): "any"}
    render = Sql.at

    def at(sql: Sql, **names: str) -> Statement:
        ran.extend([name_of[id(sql)]] if id(sql) in name_of else [])
        return render(sql, **names)

    monkeypatch.setattr(Sql, "at", at)
    return ran


def test_claim_that_finds_its_keys_in_the_window_needs_the_plain_statement_only(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [(f"k{n}", n) for n in range(200)])
    connection, inbox = connect(), Inbox("shipping")
    while inbox.reap_any(connection, max_keys=50, per_key=1):
        pass
    assert run_claims == ["plain"] * 5


def test_claim_that_has_to_look_further_is_not_plain_until_it_has_no_need_to(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [("held", n) for n in range(DEEP)])
    fill(filler, [(f"k{n}", n) for n in range(40)])
    holder, connection, inbox = connect(), connect(), Inbox("shipping")
    Inbox("shipping").reap(holder, "held", limit=1)
    for _ in range(3):
        assert inbox.reap_any(connection, max_keys=10, per_key=1)
        connection.commit()
    assert run_claims == ["plain", "any", "any", "any"]
    holder.rollback()
    assert keys(inbox.reap_any(connection, max_keys=1, per_key=1)) == {"held"}
    assert keys(inbox.reap_any(connection, max_keys=1, per_key=1)) == {"held"}
    assert run_claims[4:] == ["any", "plain"]


def test_claim_takes_half_a_batch_rather_than_look_further(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [(f"k{n:03}", n) for n in range(150)])
    holder, connection, inbox = connect(), connect(), Inbox("shipping")
    assert len(Inbox("shipping").reap_any(holder, max_keys=35, per_key=1)) == 35
    del run_claims[:]
    assert len(inbox.reap_any(connection, max_keys=10, per_key=1)) == 5  # of the 40 oldest
    assert run_claims == ["plain"]
    assert Inbox("shipping").reap_any(connect(), max_keys=11, per_key=1)
    assert "any" in run_claims


def test_claim_takes_no_more_of_a_key_than_allowed_though_all_of_it_is_the_oldest(
    connect: Connect, filler: psycopg.Connection[Any]
) -> None:
    fill(filler, [(key, step) for key in ("a", "b") for step in range(3)])
    taken = Inbox("shipping").reap_any(connect(), max_keys=2, per_key=1)
    assert [message.key for message in taken] == ["a", "b"]


def test_claim_of_a_few_deep_keys_is_plain(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [(f"k{n}", step) for step in range(200) for n in range(3)])
    connection, shipping = connect(), Claims("mailroom", "shipping")
    share = Share(100, 100, 100)
    sizes = [len(run(connection, shipping.claiming(share)).messages) for _ in range(6)]
    assert sizes == [100] * 6
    assert run_claims == ["plain"] * 6


def test_claim_of_keys_that_are_due_is_not_plain(
    connect: Connect, filler: psycopg.Connection[Any], run_claims: list[str]
) -> None:
    fill(filler, [("bad", 1), ("good", 2)])
    fail(filler, "bad")
    connection, inbox = connect(), Inbox("shipping")
    assert keys(inbox.reap_any(connection, max_keys=1)) == {"good"}
    assert run_claims == ["plain"]
    connection.rollback()
    due(filler)
    assert keys(inbox.reap_any(connection)) == {"bad", "good"}
    assert run_claims == ["plain", "plain", "any"]
