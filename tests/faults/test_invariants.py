"""The checker itself: each kind of corrupted ledger is noticed, by the invariant that it breaks."""

from uuid import UUID

import pytest

from tests.faults import invariants, ledger
from tests.faults.invariants import Sent
from tests.support.node import Node

MESSAGES = 6
HISTORY = [Sent(100 + nth, float(nth), nth + 0.5) for nth in range(MESSAGES)]  # one transaction each, well apart


def number(nth: int) -> UUID:
    return UUID(int=nth + 1)


@pytest.fixture
def node(node: Node) -> Node:
    """Six messages of one key: four reaped in two transactions, one waiting, one not delivered yet."""
    node.inbox("alpha")
    ledger.create(node.connection, [("alpha", "alpha")])
    for nth in range(MESSAGES):
        node.connection.execute(
            "INSERT INTO faults.w_ledger (mid, topic, key, wtx, pos) VALUES (%s, 'alpha', 'k', %s, 0)",
            [number(nth), 100 + nth],
        )
    with node.connection.transaction():
        node.connection.execute("DELETE FROM mailroom.outbox_executable")
        node.connection.execute("INSERT INTO mailroom.store (key, number) VALUES ('alpha', 4), ('all', 5)")
        insert = "INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', %s, %s)"
        node.connection.execute(insert, ["alpha", MESSAGES - 4])
        node.connection.execute(insert, ["all", MESSAGES - 5])
    for nth in range(4):
        node.connection.execute(
            "INSERT INTO faults.r_ledger (inbox, mid, key, clock, rtx) VALUES ('alpha', %s, 'k', %s, %s)",
            [number(nth), 10 + nth, 200 + nth // 2],
        )
    place(node, 4, clock=14)
    node.connection.execute(
        "INSERT INTO mailroom.outbox (message_id, topic, key, value_json) VALUES (%s, 'alpha', 'k', '1')", [number(5)]
    )
    node.connection.execute("UPDATE faults.d_ledger SET first = 10")
    return node


def place(node: Node, nth: int, clock: int, table: str = "inbox", inbox: str = "alpha") -> None:
    node.connection.execute(
        f"INSERT INTO mailroom.{table} (inbox, clock, sent_clock, origin, message_id, topic, key, kind, message_type, "
        "sent_at, value_json) VALUES (%s, %s, 1, gen_random_uuid(), %s, 'alpha', 'k', 'M', 'U', now(), '1')".encode(),
        [inbox, clock, number(nth)],
    )


def broken(node: Node, *, history: list[Sent] = HISTORY) -> set[str]:
    return {violation.invariant for violation in invariants.check(node.connection, history)}


def test_a_sound_ledger_breaks_nothing(node: Node) -> None:
    assert invariants.check(node.connection, HISTORY) == []


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("corruption", "invariant"),
    [
        pytest.param("DELETE FROM faults.r_ledger WHERE clock = 11", "I1", id="a reaped message is lost"),
        pytest.param("DELETE FROM mailroom.inbox", "I1", id="a delivered message is lost"),
        pytest.param("DELETE FROM mailroom.outbox", "I1", id="a sent message is lost"),
        pytest.param("DELETE FROM faults.w_ledger WHERE wtx = 101", "I2", id="reaped and never sent"),
        pytest.param("DELETE FROM faults.w_ledger WHERE wtx = 104", "I2", id="delivered and never sent"),
        pytest.param("DELETE FROM faults.w_ledger WHERE wtx = 105", "I2", id="in the outbox and rolled back"),
        pytest.param("UPDATE mailroom.store SET number = number + 1 WHERE key = 'all'", "I14", id="counted twice"),
        pytest.param("DELETE FROM mailroom.store WHERE key = 'alpha'", "I14", id="a counter is lost"),
        pytest.param("DELETE FROM mailroom.outbox_executable", "I14", id="an executable is lost"),
        pytest.param("INSERT INTO faults.smuggled VALUES ('{0}')", "I15", id="past the trigger and applied"),
        pytest.param(
            "INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, sent_at) "
            "VALUES ('execute', 'cancelled', '{0}', 'store.increment', 'k', 'M', 'U', now())",
            "I15", id="a good executable is dead",
        ),
        pytest.param("UPDATE faults.route SET inbox = 'beta'", "I2", id="in an inbox where it does not go"),
        pytest.param("UPDATE faults.r_ledger SET mid = '{1}' WHERE mid = '{0}'", "I3", id="reaped twice"),
        pytest.param("UPDATE faults.r_ledger SET mid = '{4}' WHERE mid = '{0}'", "I3", id="reaped and still there"),
        pytest.param("UPDATE faults.r_ledger SET mid = '{5}' WHERE mid = '{0}'", "I3", id="reaped and not delivered"),
        pytest.param(
            "UPDATE faults.r_ledger SET clock = CASE clock WHEN 11 THEN 12 WHEN 12 THEN 11 ELSE clock END", "I4",
            id="two messages swapped",
        ),
        pytest.param("UPDATE faults.r_ledger SET turn = 100 WHERE clock = 10", "I4", id="overtaken"),
        pytest.param("UPDATE faults.r_ledger SET clock = 99 WHERE clock = 13", "I4c", id="one left behind"),
        pytest.param("UPDATE faults.r_ledger SET clock = 12 WHERE clock = 11", "I5", id="a clock given out twice"),
        pytest.param("UPDATE faults.r_ledger SET mid = '{1}' WHERE clock = 12", "I5", id="a message with two clocks"),
        pytest.param(
            "UPDATE faults.w_ledger SET wtx = 101, pos = CASE mid WHEN '{0}' THEN 2 ELSE 1 END WHERE wtx < 102",
            "I7", id="a transaction out of its order",
        ),
        pytest.param(
            "INSERT INTO faults.d_ledger (inbox, first, last, messages) VALUES ('alpha', 14, 20, 1)", "I9",
            id="a delivery by a zombie",
        ),
    ],
)  # fmt: skip
def test_a_corrupted_ledger_is_noticed(node: Node, corruption: str, invariant: str) -> None:
    for nth in range(MESSAGES):
        corruption = corruption.replace(f"{{{nth}}}", str(number(nth)))
    node.connection.execute(corruption.encode())
    assert invariant in broken(node)


def test_a_clock_below_one_that_was_acknowledged_earlier_is_noticed(node: Node) -> None:
    later_first = [Sent(sent.wtx, -sent.invoked, -sent.invoked + 0.5) for sent in HISTORY]
    assert broken(node, history=later_first) == {"I6"}


def test_a_transaction_that_was_acknowledged_and_is_gone_is_noticed(node: Node) -> None:
    assert broken(node, history=[*HISTORY, Sent(999, 50, 51)]) == {"I1b"}


def test_a_clock_that_was_seen_and_is_given_to_another_message_is_noticed(node: Node) -> None:
    seen = f"{number(4)}\t14\n{number(5)}\t12\n".encode()
    assert {violation.invariant for violation in invariants.check(node.connection, HISTORY, [seen])} == {"I5b"}


def test_transactions_side_by_side_may_have_their_clocks_either_way(node: Node) -> None:
    assert broken(node, history=[Sent(sent.wtx, 0, 10 - sent.invoked) for sent in HISTORY]) == set()


def noted(node: Node, keys: int, attempts: int, retry_at: str = "2020-01-01") -> None:
    node.connection.execute(
        "INSERT INTO mailroom.key_state (inbox, key, clock, attempts, retry_at) "
        "SELECT 'alpha', 'idle ' || n, 1, %s, %s FROM generate_series(1, %s) AS n",
        [attempts, retry_at, keys],
    )


def test_notes_that_the_janitor_takes_away_are_no_violation(node: Node) -> None:
    noted(node, 100, attempts=0)
    assert broken(node) == set()


def test_notes_of_keys_that_failed_and_are_through_are_noticed(node: Node) -> None:
    noted(node, invariants.RACES + 1, attempts=1)
    assert broken(node) == {"I12"}


def test_notes_that_the_janitor_leaves_are_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(node, 1, attempts=0)
    monkeypatch.setattr(invariants, "LISTED", "SELECT name FROM mailroom.inbox_registry LIMIT 0")  # nothing is swept
    assert broken(node) == {"I12"}


def test_what_is_parked_or_dead_is_not_lost(node: Node) -> None:
    node.connection.execute("DELETE FROM mailroom.inbox")
    assert broken(node) == {"I1"}
    place(node, 4, clock=14, table="parked")
    assert broken(node) == set()
