"""Execute: rows that bypassed the trigger of their table. Each becomes a dead letter; none stops the others."""

import re
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from dispatcher.executor.batch.fold import STORE_RULES, OperationRefused, applied
from dispatcher.executor.batch.rules import RULES
from mailroom.errors import DecodeError
from mailroom.message import executable
from mailroom.node.dead_letter import DeadLetters
from outbox import Store
from tests.executor.test_fold import taken
from tests.support.databases import Connect
from tests.support.executing import (
    STORE,
    THINGS,
    dead_of,
    execute,
    execute_all,
    make_things,
    sent,
    store_of,
    told_of,
    waiting,
)
from tests.support.node import Node

MIB = 2**20


def smuggled(node: Node, **columns: Any) -> UUID:
    """Insert a row past the trigger, as a session that replicates does, and return its id."""
    id = uuid4()
    columns = {"message_id": id, "operation": "increment", "key": "k", "amount": 1} | columns
    columns = {name: value for name, value in columns.items() if value is not None}
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    with node.connection.transaction():
        node.connection.execute("SET LOCAL session_replication_role = replica")
        statement = f"INSERT INTO mailroom.outbox_executable ({names}) VALUES ({places})"
        node.connection.execute(statement.encode(), list(columns.values()))
    return id


ACCOUNT: dict[str, Any] = {"operation": "account", "target": "accounting", "bytes": 1}
PUT: dict[str, Any] = {"operation": "put", "amount": None}
RANGE: dict[str, Any] = {"operation": "delete_range", "amount": None}
Broken: TypeAlias = tuple[str, dict[str, Any]]  # the rule, and the columns that break it
BROKEN: list[Broken] = [
    ("operation", {"operation": "merge"}),
    ("operation", {"operation": ""}),
    ("operation", {"operation": "Delete", "amount": None}),
    ("operation", {"operation": "delete"}),
    ("operation", {"amount": None}),
    ("operation", {"key": ""}),
    ("operation", PUT),
    ("operation", RANGE | {"value": b"v"}),
    ("operation", ACCOUNT | {"target": "store"}),
    ("operation", {"operation": "call", "target": "f", "row_limit": 1}),
    ("length", {"version": 2, "operation": "x" * 42}),
    ("target", {"target": "No Such; Target"}),
    ("key", {"key": "k" * 1_025}),
    ("levels", ACCOUNT | {"key": "k/" * 40}),
    ("end_key", RANGE | {"end_key": ""}),
    ("at", ACCOUNT | {"at": "infinity"}),
    ("at", ACCOUNT | {"at": "-infinity"}),
    ("at", ACCOUNT | {"at": "20000-01-01"}),
    ("at", ACCOUNT | {"at": "0044-03-15 BC"}),
    ("row_limit", RANGE | {"row_limit": -1}),
    ("row_limit", RANGE | {"row_limit": 0}),
    ("notify", {"notify": "not a topic"}),
    ("notify", {"notify": "t" * 201}),
    ("notify", {"version": 2, "notify": ""}),
    ("headers", {"notify": "t", "headers": Jsonb(["saga"])}),
    ("headers", {"notify": "t", "headers": Jsonb({"saga": 1})}),
    ("headers", {"notify": "t", "headers": Jsonb({"saga": "s" * 8_192})}),
    ("after_clock", {"notify": "t", "after_clock": 2**62 + 1}),
    ("after_clock", {"notify": "t", "after_clock": 2**62}),
    ("after_clock", {"notify": "t", "after_clock": -1}),
    ("source", {"source": "s" * 201}),
    ("sent_at", {"sent_at": "infinity"}),
    ("sent_at", ACCOUNT | {"sent_at": "-infinity"}),
]
LARGE: list[Broken] = [
    ("value", PUT | {"value": b"v" * (4 * MIB + 1)}),
    ("value", PUT | {"value": b"v" * (17 * MIB)}),
    ("expected", PUT | {"value": b"", "expected": b"v" * (4 * MIB + 1)}),
    ("arguments", {"operation": "call", "target": "f", "amount": None, "arguments": Jsonb("v" * (4 * MIB))}),
]


@pytest.mark.parametrize("rows", [BROKEN, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_row_past_the_trigger_ends_alone_as_a_dead_letter(node: Node, rows: list[Broken]) -> None:
    for rule, columns in rows:
        node.connection.execute("DELETE FROM mailroom.store; DELETE FROM mailroom.dead_letter")
        sent(node, STORE.put, "k", b"v")
        id = smuggled(node, **columns)
        sent(node, STORE.increment, "n")
        execute(node)
        assert list(waiting(node.connection)) == []
        assert store_of(node.connection) == {"k": b"v", "n": 1}, columns
        [(buried, reason)] = dead_of(node.connection)
        assert buried == id
        assert f"(outbox_executable_{rule})" in reason
        assert told_of(node.connection) == []
        with node.connection.transaction(force_rollback=True):
            [letter] = DeadLetters().find(node.connection)
            if rule in ("at", "sent_at"):  # the nearest time that there is
                assert DeadLetters().requeue(node.connection, [letter.id], actor="test") == 1
                continue
            with pytest.raises(
                (psycopg.errors.CheckViolation, DecodeError)
            ):  # the second for what no message could hold
                DeadLetters().requeue(node.connection, [letter.id], actor="test")


def test_rows_past_the_trigger_that_are_right_are_executed(node: Node) -> None:
    smuggled(node)
    smuggled(node, **ACCOUNT, at="0001-01-01 UTC", sent_at="9998-12-31 23:59:59 UTC")
    smuggled(node, notify="t", headers=Jsonb({}), after_clock=2**32, source="s" * 200)
    execute(node)
    assert dead_of(node.connection) == []
    assert store_of(node.connection) == {"k": 2}


def test_rules_are_those_of_the_trigger(node: Node) -> None:
    function = node.value("SELECT prosrc FROM pg_proc WHERE proname = 'check_executable'")
    broken = re.search(r"broken := CASE(.*?) END;\s+IF broken", function, re.DOTALL)
    assert broken is not None
    ours = " ".join(f"WHEN NOT ({rule}) THEN 'outbox_executable_{name}'" for name, rule in RULES.items())
    # Each has lines of its own.
    assert "".join(broken[1].replace("new.", "").split()) == "".join(ours.split())


def test_operation_that_is_not_known_is_none_of_those_that_are() -> None:
    with pytest.raises(OperationRefused, match="not known"):
        applied(taken("merge"), None, STORE_RULES)


@pytest.mark.sample(1)
@pytest.mark.parametrize("setting", ["quote_all_identifiers=on", "array_nulls=off", "standard_conforming_strings=off"])
def test_executables_are_executed_whatever_the_server_s_settings(node: Node, connect: Connect, setting: str) -> None:
    make_things(node.connection)
    sent(node, STORE.increment, "n")
    sent(node, STORE.put, "v", b"NULL")
    sent(node, THINGS.put, "1", b"NULL")
    sent(node, THINGS.increment, "2")
    sent(node, STORE.account, "a")
    sent(node, Store(target="nowhere").put, "k", b"\\x00")
    connection = connect(autocommit=True, options=f"-c {setting}")
    execute_all(connection)
    assert store_of(node.connection) == {"n": 1, "v": b"NULL"}
    assert node.rows("SELECT id, body, total FROM app.thing ORDER BY id") == [(1, "NULL", 0), (2, None, 1)]
    [(letter, raw)] = node.rows("SELECT id, value FROM mailroom.dead_letter")
    assert executable.unwired(raw)["value"] == b"\\x00"
    name, _, value = setting.partition("=")
    with connection.transaction():
        assert DeadLetters().requeue(connection, [letter], actor="test") == 1
        assert connection.execute(f"SHOW {name}".encode()).fetchone() == (value,)
    columns = "end_key, value, amount, arguments, notify, headers"
    assert node.rows(f"SELECT {columns} FROM mailroom.outbox_executable") == [(None, b"\\x00", *(None,) * 4)]
