"""The checker itself: each kind of corrupted ledger is noticed, by the invariant that it breaks."""

from uuid import UUID

import pytest

from inbox import Inbox
from tests.faults import invariants, ledger
from tests.faults.invariants import Sent
from tests.faults.ledger import READ, REWOUND, SENT
from tests.logs.support import Reader, make
from tests.support.databases import Connect
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


CORRUPTIONS = [
    ("a reaped message is lost", "DELETE FROM faults.r_ledger WHERE clock = 11", "I1"),
    ("a delivered message is lost", "DELETE FROM mailroom.inbox", "I1"),
    ("a sent message is lost", "DELETE FROM mailroom.outbox", "I1"),
    ("reaped and never sent", "DELETE FROM faults.w_ledger WHERE wtx = 101", "I2"),
    ("delivered and never sent", "DELETE FROM faults.w_ledger WHERE wtx = 104", "I2"),
    ("in the outbox and rolled back", "DELETE FROM faults.w_ledger WHERE wtx = 105", "I2"),
    ("counted twice", "UPDATE mailroom.store SET number = number + 1 WHERE key = 'all'", "I14"),
    ("a counter is lost", "DELETE FROM mailroom.store WHERE key = 'alpha'", "I14"),
    ("an executable is lost", "DELETE FROM mailroom.outbox_executable", "I14"),
    ("past the trigger and applied", "INSERT INTO faults.smuggled VALUES ('{0}')", "I15"),
    (
        "a good executable is dead",
        (
            "INSERT INTO mailroom.dead_letter (stage, reason, message_id, topic, key, kind, message_type, sent_at) "
            "VALUES ('execute', 'cancelled', '{0}', 'store.increment', 'k', 'M', 'U', now())"
        ),
        "I15",
    ),
    ("in an inbox where it does not go", "UPDATE faults.route SET inbox = 'beta'", "I2"),
    ("reaped twice", "UPDATE faults.r_ledger SET mid = '{1}' WHERE mid = '{0}'", "I3"),
    ("reaped and still there", "UPDATE faults.r_ledger SET mid = '{4}' WHERE mid = '{0}'", "I3"),
    ("reaped and not delivered", "UPDATE faults.r_ledger SET mid = '{5}' WHERE mid = '{0}'", "I3"),
    (
        "two messages swapped",
        "UPDATE faults.r_ledger SET clock = CASE clock WHEN 11 THEN 12 WHEN 12 THEN 11 ELSE clock END",
        "I4",
    ),
    ("overtaken", "UPDATE faults.r_ledger SET turn = 100 WHERE clock = 10", "I4"),
    ("one left behind", "UPDATE faults.r_ledger SET clock = 99 WHERE clock = 13", "I4c"),
    ("a clock given out twice", "UPDATE faults.r_ledger SET clock = 12 WHERE clock = 11", "I5"),
    ("a message with two clocks", "UPDATE faults.r_ledger SET mid = '{1}' WHERE clock = 12", "I5"),
    (
        "a transaction out of its order",
        "UPDATE faults.w_ledger SET wtx = 101, pos = CASE mid WHEN '{0}' THEN 2 ELSE 1 END WHERE wtx < 102",
        "I7",
    ),
    (
        "a delivery by a zombie",
        "INSERT INTO faults.d_ledger (inbox, first, last, messages) VALUES ('alpha', 14, 20, 1)",
        "I9",
    ),
]


def test_a_corrupted_ledger_is_noticed(node: Node) -> None:
    unnoticed = []
    for what, corruption, invariant in CORRUPTIONS:
        for nth in range(MESSAGES):
            corruption = corruption.replace(f"{{{nth}}}", str(number(nth)))
        with node.connection.transaction(force_rollback=True):
            node.connection.execute(corruption.encode())
            if invariant not in broken(node):
                unnoticed.append(what)
    assert unnoticed == []


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
    monkeypatch.setattr(invariants, "LISTED", "SELECT name, 1 FROM mailroom.inbox_registry LIMIT 0")  # nothing is swept
    assert broken(node) == {"I12"}


def test_what_is_parked_or_dead_is_not_lost(node: Node) -> None:
    node.connection.execute("DELETE FROM mailroom.inbox")
    assert broken(node) == {"I1"}
    place(node, 4, clock=14, table="parked")
    assert broken(node) == set()


# -- Logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(node: Node, connect: Connect) -> Node:
    """Six more messages in a log: four were read, two of them twice, one waits, and one is unread."""
    node.connection.execute(
        "DELETE FROM faults.w_ledger; DELETE FROM faults.r_ledger; DELETE FROM mailroom.outbox; "
        "DELETE FROM mailroom.inbox; DELETE FROM mailroom.store; DELETE FROM mailroom.outbox_executable; "
        "DELETE FROM faults.d_ledger; DELETE FROM faults.smuggled"
    )
    make(node, "billing", lanes=1)
    node.connection.execute("INSERT INTO faults.log_route VALUES ('order.paid', 'billing')")
    node.connection.execute(REWOUND.encode(), [0, "billing"])
    reader = Reader(connect(), "billing")

    def send(first: int, after: int) -> None:
        for nth in range(first, after):
            mid = node.send("order.paid", key="k", id=number(nth))
            node.connection.execute(SENT, [[mid], ["order.paid"], ["k"], [nth]])
        node.deliver_all()

    def read(most: int) -> None:
        messages = reader.take(most)
        columns = [[one.id for one in messages], [one.key for one in messages], [one.clock for one in messages]]
        node.connection.execute(READ.encode(), [["billing"] * most, *columns])

    send(0, 5)
    read(4)
    with node.connection.transaction():
        place = Inbox("billing").rewind(node.connection, 3, actor="me")
        node.connection.execute(REWOUND.encode(), [place.clock, "billing"])
    read(2)
    reader.fail(reader.claim(1).messages[0], node.connection)
    assert reader.take(1) == []
    assert node.delivered("clock") == [(5,)]
    send(5, 6)
    return node


OF_LOGS = [
    ("one is lost", "DELETE FROM faults.l_ledger WHERE clock = 1", "L1"),
    ("one is not read again", "DELETE FROM faults.l_ledger WHERE clock = 3 AND epoch = {last}", "L1"),
    ("what was diverted is lost", "DELETE FROM mailroom.inbox_billing", "L1"),
    ("a segment goes with what is unread", "DELETE FROM mailroom.log WHERE segment = 1", "L1"),
    ("skipped, and no dead letter", "DELETE FROM faults.l_ledger WHERE clock = 2", "L1"),
    ("read and never sent", "DELETE FROM faults.w_ledger WHERE pos = 0", "L2"),
    ("unread and never sent", "DELETE FROM faults.w_ledger WHERE pos = 5", "L2"),
    ("twice", "INSERT INTO faults.l_ledger SELECT * FROM faults.l_ledger WHERE clock = 2", "L3"),
    ("twice since it was set back", "UPDATE faults.l_ledger SET epoch = {last} WHERE clock = 3", "L3"),
    ("read and waiting", "UPDATE faults.l_ledger SET mid = '{4}', clock = 5 WHERE clock = 4", "L3"),
    ("read, and unread again", "DELETE FROM mailroom.receipts_billing WHERE epoch = {last} AND clock > 2", "L3"),
    ("overtaken", "UPDATE faults.l_ledger SET turn = 1000 WHERE clock = 1", "L4"),
    ("one left behind", "UPDATE faults.l_ledger SET clock = 99 WHERE clock = 4", "L4c"),
    ("a clock of two", "UPDATE faults.l_ledger SET clock = 1 WHERE clock = 2", "I5"),
]  # fmt: skip


def test_a_corrupted_ledger_of_a_log_is_noticed(log: Node) -> None:
    assert invariants.check(log.connection) == []
    unnoticed = []
    for what, corruption, invariant in OF_LOGS:
        last = str(log.value("SELECT max(epoch) FROM faults.rewound"))
        corruption = corruption.replace("{last}", last).replace("{4}", str(number(4)))
        with log.connection.transaction(force_rollback=True):
            log.connection.execute(corruption.encode())
            if invariant not in broken(log, history=[]):
                unnoticed.append(what)
    assert unnoticed == []
