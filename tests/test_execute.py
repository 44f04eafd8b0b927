"""Execute: what becomes of each executable, what is said of it, and that one that fails stops no other."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import TupleRow

from dispatcher import range as ranges
from dispatcher import target as targets
from dispatcher.applier import Applier
from dispatcher.execute import HIDDEN, Execution
from dispatcher.floor import FULL_SCAN_S
from dispatcher.outcome import UNTOLD
from inbox import Inbox
from mailroom import codec, executable
from outbox import Executable, Outbox, Store
from tests.databases import Connect
from tests.executing import (
    LARGEST,
    SCHEMA,
    SMALLEST,
    UNREGISTERED,
    Model,
    Things,
    check_equal,
    dead_of,
    execute_all,
    make_things,
    register,
    store_of,
    things_of,
    told_of,
    waiting,
)
from tests.node import Node
from tests.waiting import wait_until_blocked

executor = import_module("dispatcher.execute")  # the package has a function of that name

STORE = Store()
THINGS = Store(target="things")
AT = datetime(2026, 7, 1, 12, 0, 30, tzinfo=UTC)
MINUTE = AT.replace(second=0)


@pytest.fixture
def node(dsn: str, connect: Connect) -> Node:
    return Node(dsn, connect(autocommit=True))


def sent(node: Node, send: Callable[..., UUID], *given: Any, **named: Any) -> UUID:
    """Send one executable in a transaction of its own."""
    with node.connection.transaction():
        return send(node.connection, *given, **named)


def inserted(node: Node, **columns: Any) -> UUID:
    """Send one executable by plain SQL."""
    id = uuid4()
    columns = {"message_id": id, **columns}
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    statement = f"INSERT INTO mailroom.outbox_executable ({names}) VALUES ({places})"
    node.connection.execute(statement.encode(), list(columns.values()))
    return id


def execute(node: Node, rows: int = 10_000, max_bytes: int = 2**25) -> list[Execution]:
    return execute_all(node.connection, rows=rows, max_bytes=max_bytes)


def function(node: Node, name: str, body: str, returns: str = "jsonb", timeout_s: float = 10) -> None:
    """Make a function and register it."""
    node.connection.execute("CREATE SCHEMA IF NOT EXISTS app")
    node.connection.execute(
        f"CREATE FUNCTION app.{name}(given jsonb) RETURNS {returns} LANGUAGE plpgsql AS $$ {body} $$".encode()
    )
    node.connection.execute(
        "INSERT INTO mailroom.executable_function VALUES (%s, 'app', %s, %s)", [name, name, timeout_s]
    )


# -- Each operation ---------------------------------------------------------------------------------------------------


def test_each_operation_of_the_api_is_applied(node: Node) -> None:
    sent(node, STORE.put, "a", b"v")
    sent(node, STORE.increment, "n", 5)
    sent(node, STORE.increment, "n")
    for key in ("b", "c", "d"):
        sent(node, STORE.put, key, b"w")
    sent(node, STORE.delete, "a")
    sent(node, STORE.delete_range, "c", "d")
    sent(node, STORE.account, "x/y", 2, 30, AT)
    execute(node)
    assert store_of(node.connection) == {"n": 6, "b": b"w", "d": b"w"}
    with node.connection.transaction():
        assert STORE.get(node.connection, "n") == 6
        assert STORE.get(node.connection, "b") == b"w"
        assert STORE.get(node.connection, "a") is None
        books = STORE.books(node.connection, "x", MINUTE, MINUTE + timedelta(minutes=1))
        assert (books.count, books.bytes) == (2, 30)
        assert STORE.books(node.connection, "x", MINUTE + timedelta(minutes=1)).count == 0
    assert list(waiting(node.connection)) == []
    assert dead_of(node.connection) == []


def test_each_operation_of_plain_sql_is_applied(node: Node) -> None:
    inserted(node, operation="put", key="a", value=b"v")
    inserted(node, operation="increment", key="n", amount=5)
    inserted(node, operation="put", key="b", value=b"v", expected=b"")
    inserted(node, operation="delete", key="a")
    inserted(node, operation="put", key="c", value=b"v")
    inserted(node, operation="put", key="d", value=b"v")
    inserted(node, operation="delete_range", key="c", row_limit=1)
    inserted(node, operation="account", target="accounting", key="x/y", amount=1, bytes=2, at=AT)
    function(node, "noted", "BEGIN INSERT INTO mailroom.store VALUES (given->>'key', 'called'); RETURN null; END")
    inserted(node, operation="call", target="noted", arguments=json.dumps({"key": "f"}))
    execute(node)
    assert store_of(node.connection) == {"n": 5, "b": b"v", "d": b"v", "f": b"called"}
    assert node.rows("SELECT key, minute, count, bytes FROM mailroom.accounting ORDER BY key") == [
        ("x", MINUTE, 1, 2),
        ("x/y", MINUTE, 1, 2),
    ]


def test_one_batch_and_many_come_to_the_same(node: Node) -> None:
    keys = [str(nth % 7) for nth in range(60)]
    for size in (1, 7, 1_000):
        node.connection.execute("TRUNCATE mailroom.store")
        with node.connection.transaction():
            STORE.send_many(node.connection, [Executable("increment", key, amount=1) for key in keys])
        executions = execute(node, rows=size)
        assert sum(each.taken for each in executions) == 60
        assert max(each.taken for each in executions) == min(size, 60)
        assert store_of(node.connection) == {key: keys.count(key) for key in keys}


def test_operations_on_one_key_are_one_write(node: Node) -> None:
    sent(node, STORE.increment, "n")
    execute(node)
    for _ in range(100):
        sent(node, STORE.increment, "n")
    node.connection.execute("CREATE TABLE writes (number bigint)")
    node.connection.execute(
        "CREATE FUNCTION wrote() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO public.writes VALUES (new.number); RETURN new; END $$"
    )
    node.connection.execute(
        "CREATE TRIGGER wrote BEFORE UPDATE ON mailroom.store FOR EACH ROW EXECUTE FUNCTION wrote()"
    )
    execute(node)
    assert node.rows("SELECT number FROM writes") == [(101,)]


def test_batch_is_bounded_by_the_bytes_of_values_too(node: Node) -> None:
    for key in "abc":
        sent(node, STORE.put, key, b"x" * 600)
    assert [each.taken for each in execute(node, max_bytes=1_000)] == [2, 1]


def test_account_without_a_time_is_booked_when_it_was_sent(node: Node) -> None:
    inserted(node, operation="account", target="accounting", key="a", amount=1, bytes=2, sent_at=AT)
    execute(node)
    assert node.value("SELECT minute FROM mailroom.accounting") == MINUTE


def test_times_at_the_end_of_what_is_allowed_are_taken_whatever_the_server_s_zone(node: Node, connect: Connect) -> None:
    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)
    inserted(node, operation="account", target="accounting", key="a", amount=1, bytes=2, at=first, sent_at=first)
    inserted(node, operation="account", target="accounting", key="a", amount=1, bytes=2, at=last, sent_at=last)
    inserted(node, operation="increment", target="nowhere", key="a", amount=1, sent_at=first)
    inserted(node, operation="account", target="accounting", key="a", amount=1, bytes=2, at=first, version=2)
    for zone in ("America/New_York", "Pacific/Auckland"):
        connection = connect(autocommit=True, options=f"-c TimeZone={zone}")
        execute_all(connection)
    years = "SELECT extract(year FROM minute AT TIME ZONE 'UTC')::integer FROM mailroom.accounting ORDER BY 1"
    assert node.rows(years) == [(1,), (9998,)]


# -- What cannot be applied -------------------------------------------------------------------------------------------


def test_what_cannot_be_applied_goes_to_dead_letter_and_the_others_go_on(node: Node) -> None:
    sent(node, STORE.increment, "n", LARGEST)
    over = sent(node, STORE.increment, "n", 1)
    sent(node, STORE.increment, "n", -1)
    sent(node, STORE.increment, "low", SMALLEST)
    under = sent(node, STORE.increment, "low", -1)
    sent(node, STORE.put, "v", b"secret", headers={"saga": "s"}, after_clock=7)
    mixed = sent(node, STORE.increment, "v")
    compared = sent(node, STORE.put, "v", b"secret too", expected=b"")
    sent(node, STORE.account, "a", LARGEST, 0, AT)
    booked = sent(node, STORE.account, "a/b", 1, 0, AT)
    [execution] = execute(node)
    assert (execution.taken, execution.dead, execution.told) == (10, 5, 0)
    assert store_of(node.connection) == {"n": LARGEST - 1, "low": SMALLEST, "v": b"secret"}
    range_of = f"{SMALLEST} to {LARGEST}"
    assert dead_of(node.connection) == [
        (over, f"the number would leave its range, {range_of}"),
        (under, f"the number would leave its range, {range_of}"),
        (mixed, "the key holds a value, not a number"),
        (compared, "the key does not hold the expected value"),
        (booked, f"a sum would leave its range, {range_of}"),
    ]
    assert node.rows("SELECT key FROM mailroom.accounting") == [("a",)]
    assert told_of(node.connection) == []


def test_dead_letter_holds_the_executable_whole_as_cbor(node: Node) -> None:
    parts: dict[str, Any] = {
        "version": 1, "operation": "put", "target": "nowhere", "key": "k", "value": b"v", "expected": b"e",
        "notify": "outcomes",
    }  # fmt: skip
    id = inserted(node, **parts, headers='{"saga": "s", "other": "o"}', after_clock=7)
    source, sent_at = node.rows("SELECT source, sent_at FROM mailroom.outbox_executable")[0]
    execute(node)
    [row] = node.rows(
        "SELECT message_id, stage, reason, topic, key, kind::text, message_type::text, headers, after_clock, source, "
        "sent_at, value FROM mailroom.dead_letter"
    )
    headers = {"saga": "s", "other": "o"}
    assert row[:-1] == (
        id, "execute", UNREGISTERED, "nowhere.put", "k", "M", "U", headers, 7, source, sent_at
    )  # fmt: skip
    assert executable.unwired(row[-1]) == dict.fromkeys(executable.NAMES) | parts


@pytest.mark.parametrize("operation", ["put", "delete_range", "merge"])
def test_unknown_version_is_parked_and_never_guessed_at(node: Node, operation: str) -> None:
    sent(node, STORE.put, "k", b"v")
    parts = {"value": b"new", "amount": 3} if operation != "delete_range" else {}
    id = inserted(node, version=2, operation=operation, key="k", notify="outcomes", **parts)
    sent(node, STORE.increment, "n")
    execute(node)
    assert store_of(node.connection) == {"k": b"v", "n": 1}
    [(buried, reason)] = dead_of(node.connection)
    assert buried == id
    assert reason.startswith("version 2 of the format is not known")
    [(_, status, event, told)] = told_of(node.connection)
    assert (status, event, told["outcome"]) == (500, None, "refused")
    wire = executable.unwired(node.value("SELECT value FROM mailroom.dead_letter"))
    assert (wire["version"], wire["operation"], wire["value"]) == (2, operation, parts.get("value"))


@pytest.mark.parametrize("operation", ["put", "increment", "delete", "delete_range"])
def test_unknown_target_is_parked(node: Node, operation: str) -> None:
    parts: dict[str, dict[str, Any]] = {"put": {"value": b"v"}, "increment": {"amount": 1}}
    id = inserted(node, operation=operation, key="k", target="nowhere", **parts.get(operation, {}))
    sent(node, STORE.increment, "n")
    execute(node)
    assert dead_of(node.connection) == [(id, UNREGISTERED)]
    assert store_of(node.connection) == {"n": 1}


# -- What is told -----------------------------------------------------------------------------------------------------


def test_outcome_is_told_to_who_asked(node: Node) -> None:
    asked: dict[str, Any] = {"notify": "outcomes"}
    ids = [
        sent(node, STORE.increment, "n", 2, **asked),
        sent(node, STORE.increment, "n", 3, **asked),
        sent(node, STORE.increment, "n", LARGEST, **asked),
        sent(node, STORE.put, "v", b"v", **asked),
        sent(node, STORE.put, "v", b"w", expected=b"v", **asked),
        sent(node, STORE.put, "v", b"x", expected=b"v", **asked),
        sent(node, STORE.put, "n", b"x", expected=b"", **asked),
        sent(node, STORE.put, "none", b"x", expected=b"v", **asked),
        sent(node, STORE.delete, "v", **asked),
        sent(node, STORE.delete, "v", **asked),
        sent(node, STORE.delete_range, "n", "o", **asked),
        sent(node, STORE.delete_range, "n", "o", **asked),
        sent(node, STORE.account, "a", 1, 2, AT, **asked),
    ]
    told = sum(each.told for each in execute(node))
    assert told == len(ids)
    refusal = f"the number would leave its range, {SMALLEST} to {LARGEST}"
    applied, failed = {"outcome": "applied"}, {"outcome": "compare failed"}
    expected: list[tuple[int, str | None, str, str, str, dict[str, Any]]] = [
        (200, "C", "increment", "store", "n", {**applied, "number": 2}),
        (200, "U", "increment", "store", "n", {**applied, "number": 5}),
        (500, None, "increment", "store", "n", {"outcome": "refused", "reason": refusal}),
        (200, "C", "put", "store", "v", applied),
        (200, "U", "put", "store", "v", applied),
        (409, None, "put", "store", "v", {**failed, "found": b"w"}),
        (409, None, "put", "store", "n", {**failed, "found": 5}),
        (409, None, "put", "store", "none", {**failed, "found": None}),
        (200, "D", "delete", "store", "v", {**applied, "deleted": 1}),
        (200, None, "delete", "store", "v", {**applied, "deleted": 0}),
        (200, "D", "delete_range", "store", "n", {**applied, "deleted": 1}),
        (200, None, "delete_range", "store", "n", {**applied, "deleted": 0}),
        (200, "U", "account", "accounting", "a", applied),
    ]
    assert told_of(node.connection) == [
        (str(id), status, event, {"operation": operation, "target": target, "key": key, **details})
        for id, (status, event, operation, target, key, details) in zip(ids, expected, strict=True)
    ]
    # Compared and told: that is an outcome, and no failure.
    assert [id for id, _ in dead_of(node.connection)] == [ids[2]]


def test_outcome_is_a_reply_that_says_that_an_object_changed(node: Node) -> None:
    node.inbox("outcomes")
    headers = {"saga": "s", "user": "u", "tenant": "t", "other": "o", "status": "7", "correlation": "c"}
    id = sent(node, STORE.increment, "n", notify="outcomes", headers=headers, after_clock=50_000)
    execute(node)
    node.drain()
    with node.connection.transaction():
        [message] = Inbox("outcomes").reap_any(node.connection)
    assert (message.kind, message.message_type, message.event_type, message.key) == ("R", "O", "C", "n")
    assert dict(message.headers) == {
        "saga": "s", "user": "u", "tenant": "t", "status": "200", "correlation": str(id)
    }  # fmt: skip
    assert message.clock > 50_000
    assert message.value == {"operation": "increment", "target": "store", "key": "n", "outcome": "applied", "number": 1}


def test_outcome_is_stamped_later_than_what_was_sent_before_its_request(node: Node) -> None:
    node.inbox("outcomes")
    node.send("outcomes", key="before")
    with node.connection.transaction():
        Outbox().send(node.connection, "outcomes", 1, key="in it")
        STORE.increment(node.connection, "n", notify="outcomes")
    node.send("outcomes", key="between")
    execute(node)
    node.drain()
    assert [key for _, key, _ in node.delivered()] == ["before", "in it", "between", "n"]


def test_outcome_is_in_the_transaction_of_its_effect(node: Node, connect: Connect) -> None:
    sent(node, STORE.increment, "n", notify="outcomes")
    connection = connect(autocommit=True)

    class Stop(Exception):
        pass

    def stop_before_commit() -> None:
        if connection.execute("SELECT count(*) FROM mailroom.outbox").fetchone() == (1,):
            raise Stop

    with pytest.raises(Stop):
        execute_all(connection, before=stop_before_commit)
    connection.close()
    assert store_of(node.connection) == {}
    assert told_of(node.connection) == []
    execute(node)
    assert store_of(node.connection) == {"n": 1}
    assert len(told_of(node.connection)) == 1


def test_outcome_that_no_message_can_hold_is_told_without_it(node: Node) -> None:
    function(node, "deep", "BEGIN RETURN (repeat('[', 40) || repeat(']', 40))::jsonb; END")
    function(node, "huge", "BEGIN RETURN to_jsonb(trunc(10::numeric ^ 5000)); END")
    function(node, "large", "BEGIN RETURN to_jsonb(repeat('x', 17000000)); END")
    for name in ("deep", "huge", "large"):
        sent(node, STORE.call, name, notify="outcomes")
        sent(node, STORE.call, name)
    node.connection.execute("CREATE TABLE app.big (key text PRIMARY KEY, value bytea)")
    register(node.connection, "big", "app.big", "key", "value", None)
    node.connection.execute("INSERT INTO app.big VALUES ('k', convert_to(repeat('x', 17000000), 'UTF8'))")
    sent(node, Store(target="big").put, "k", b"v", expected=b"w", notify="outcomes")
    # Headers of their own that leave no room for the message's.
    sent(node, STORE.increment, "n", notify="outcomes", headers={"saga": "x" * 8_170})
    execute(node)
    assert dead_of(node.connection) == []
    assert [(status, told["outcome"], told["reason"]) for _, status, _, told in told_of(node.connection)] == [
        *[(200, "applied", UNTOLD)] * 3,
        (409, "compare failed", UNTOLD),
        (200, "applied", UNTOLD),
    ]
    assert store_of(node.connection) == {"n": 1}


# -- Calls ------------------------------------------------------------------------------------------------------------


def test_call_tells_what_the_function_returns(node: Node) -> None:
    function(node, "echo", "BEGIN RETURN given; END")
    function(node, "number", "BEGIN RETURN 7; END", "integer")
    function(node, "nothing", "BEGIN END", "void")
    function(node, "none", "BEGIN RETURN null; END", "text")
    for name, arguments in (
        ("echo", {"a": [1, "ü", None]}),
        ("echo", None),
        ("number", 1),
        ("nothing", 1),
        ("none", 1),
    ):
        sent(node, STORE.call, name, arguments, key="k", notify="outcomes")
    execute(node)
    assert [told["result"] for *_, told in told_of(node.connection)] == [{"a": [1, "ü", None]}, None, 7, None, None]
    assert {(status, event) for _, status, event, _ in told_of(node.connection)} == {(200, None)}


def test_function_that_is_not_registered_is_never_run(node: Node) -> None:
    function(node, "good", "BEGIN INSERT INTO mailroom.store VALUES ('good', 'ran'); END", "void")
    function(node, "bad", "BEGIN INSERT INTO mailroom.store VALUES ('bad', 'ran'); END", "void")
    node.connection.execute("DELETE FROM mailroom.executable_function WHERE name = 'bad'")
    ids = [sent(node, STORE.call, name) for name in ("bad", "set_config", "pg_sleep")]
    sent(node, STORE.call, "good")
    execute(node)
    assert store_of(node.connection) == {"good": b"ran"}
    assert [id for id, _ in dead_of(node.connection)] == ids
    assert {reason.partition(",")[0] for _, reason in dead_of(node.connection)} == {"its function is not registered"}


@pytest.mark.parametrize(
    "changed",
    [
        "DROP FUNCTION app.f",
        "ALTER FUNCTION app.f RENAME TO g",
        "DROP FUNCTION app.f; CREATE FUNCTION app.f(text) RETURNS void LANGUAGE sql AS ''",
        "DROP FUNCTION app.f; CREATE FUNCTION app.f(jsonb) RETURNS SETOF integer LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION app.f; CREATE PROCEDURE app.f(jsonb) LANGUAGE sql AS ''",
    ],
)
def test_function_that_is_another_thing_by_now_is_not_run(node: Node, changed: str) -> None:
    function(node, "f", "BEGIN END", "void")
    node.connection.execute(changed.encode())
    id = sent(node, STORE.call, "f")
    execute(node)
    [(buried, reason)] = dead_of(node.connection)
    assert (buried, reason.partition(",")[0]) == (id, "its function is not registered")


def test_error_of_a_function_undoes_what_it_did_and_only_raise_is_quoted(node: Node) -> None:
    function(
        node,
        "fails",
        "BEGIN INSERT INTO mailroom.store VALUES (given->>'how', 'half');"
        "CASE given->>'how' WHEN 'raise' THEN RAISE 'no such account'; WHEN 'divide' THEN PERFORM 1 / 0;"
        " WHEN 'cast' THEN PERFORM 'secret'::integer; WHEN 'state' THEN RAISE 'secret' USING ERRCODE = 'XX000';"
        " WHEN 'sequence' THEN CREATE TEMP SEQUENCE s; PERFORM currval('s'); WHEN 'end' THEN COMMIT; END CASE; END",
        "void",
    )
    for how in ("raise", "divide", "cast", "state", "sequence", "end"):
        sent(node, STORE.call, "fails", {"how": how}, notify="outcomes")
        sent(node, STORE.increment, "n")
    execute(node)
    assert store_of(node.connection) == {"n": 6}
    reasons = [reason for _, reason in dead_of(node.connection)]
    assert reasons == [
        "RaiseException (P0001) no such account",
        "DivisionByZero (22012)",
        "InvalidTextRepresentation (22P02)",
        "InternalError_ (XX000)",
        "ObjectNotInPrerequisiteState (55000)",
        "InvalidTransactionTermination (2D000)",
    ]
    assert [told["reason"] for *_, told in told_of(node.connection)] == reasons


def test_function_that_takes_too_long_is_stopped_and_the_timeout_ends_with_it(node: Node) -> None:
    function(node, "slow", "BEGIN PERFORM pg_sleep(60); END", "void", timeout_s=0.05)
    function(node, "quick", "BEGIN RETURN current_setting('statement_timeout'); END", "text", timeout_s=20)
    node.connection.execute("SET statement_timeout = '17s'")
    id = sent(node, STORE.call, "slow")
    sent(node, STORE.call, "quick", notify="outcomes")
    sent(node, STORE.increment, "n")
    execute(node)
    assert dead_of(node.connection) == [(id, "QueryCanceled (57014)")]
    assert [told["result"] for *_, told in told_of(node.connection)] == ["20s"]
    assert store_of(node.connection) == {"n": 1}
    assert node.value("SHOW statement_timeout") == "17s"


def test_function_may_send_messages_and_executables_which_are_executed_too(node: Node) -> None:
    function(
        node,
        "sends",
        "BEGIN INSERT INTO mailroom.outbox (topic, value_json) VALUES ('t', given);"
        "INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', 'n', 1);"
        "IF (given->>'left')::integer > 0 THEN INSERT INTO mailroom.outbox_executable (operation, target, arguments) "
        "VALUES ('call', 'sends', jsonb_build_object('left', (given->>'left')::integer - 1)); END IF; END",
        "void",
    )
    sent(node, STORE.call, "sends", {"left": 2})
    execute(node)
    assert store_of(node.connection) == {"n": 3}
    assert node.value("SELECT count(*) FROM mailroom.outbox") == 3
    assert list(waiting(node.connection)) == []


def test_calls_see_what_came_before_them_in_the_batch_and_not_what_comes_after(node: Node) -> None:
    function(node, "reads", "BEGIN RETURN (SELECT number FROM mailroom.store WHERE key = 'n'); END", "bigint")
    for _ in range(3):
        sent(node, STORE.increment, "n", 2)
        sent(node, STORE.call, "reads", notify="outcomes")
    execute(node)
    assert [told["result"] for *_, told in told_of(node.connection)] == [2, 4, 6]


# -- Ranges -----------------------------------------------------------------------------------------------------------


def _fill(node: Node, keys: str) -> None:
    for key in keys:
        sent(node, STORE.put, key, b"v")


@pytest.mark.parametrize(
    ("start", "end", "limit", "left"),
    [
        (None, None, None, ""),
        ("b", "d", None, "ade"),
        ("b", None, None, "a"),
        (None, "c", None, "cde"),
        ("bb", "cc", None, "abde"),
        ("d", "b", None, "abcde"),
        ("b", None, 2, "ade"),
        (None, None, 9, ""),
        ("b", "b", None, "abcde"),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 10_000])
def test_range_is_deleted_from_its_start_up_to_its_end_without_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, step: int, start: str, end: str, limit: int, left: str
) -> None:
    monkeypatch.setattr(ranges, "ROWS", step)
    _fill(node, "abcde")
    sent(node, STORE.delete_range, start, end, limit, notify="outcomes")
    execution = execute(node)
    assert "".join(sorted(store_of(node.connection))) == left
    assert sum(each.deleted for each in execution) == 5 - len(left)
    [(_, status, _, told)] = told_of(node.connection)
    assert (status, told["deleted"]) == (200, 5 - len(left))
    assert node.value("SELECT count(*) FROM mailroom.executable_cursor") == 0


def test_keys_of_the_store_are_compared_by_their_bytes(node: Node) -> None:
    for key in ("Z", "a", "é", "€", "\U0001f600"):
        sent(node, STORE.put, key, b"v")
    sent(node, STORE.delete_range, "a", "€")
    execute(node)
    assert set(store_of(node.connection)) == {"Z", "€", "\U0001f600"}


def test_nothing_is_folded_across_a_range(node: Node) -> None:
    sent(node, STORE.increment, "n", 5)
    sent(node, STORE.put, "v", b"old")
    sent(node, STORE.delete_range)
    sent(node, STORE.increment, "n", 2, notify="outcomes")
    sent(node, STORE.put, "v", b"new", expected=b"", notify="outcomes")
    executions = execute(node)
    assert [each.taken for each in executions if each.taken] == [2, 1, 2]
    assert store_of(node.connection) == {"n": 2, "v": b"new"}
    assert [(status, event) for _, status, event, _ in told_of(node.connection)] == [(200, "C"), (200, "C")]


def test_range_goes_on_where_it_was_interrupted(node: Node, monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    monkeypatch.setattr(ranges, "ROWS", 2)
    _fill(node, "abcdefg")
    sent(node, STORE.delete_range, "b", "g", 4, notify="outcomes")
    sent(node, STORE.put, "b", b"after")
    execute_one(node)
    first = connect(autocommit=True)
    execute_one(node, first)
    first.close()
    assert sorted(store_of(node.connection)) == ["a", "d", "e", "f", "g"]
    assert node.rows("SELECT reached, deleted FROM mailroom.executable_cursor") == [("c", 2)]
    # Inserted behind it by somebody else, it would be deleted by a range that begins anew.
    node.connection.execute("INSERT INTO mailroom.store VALUES ('bb', 'late')")
    execute(node)
    assert store_of(node.connection) == {"a": b"v", "b": b"after", "bb": b"late", "f": b"v", "g": b"v"}
    assert [told["deleted"] for *_, told in told_of(node.connection)] == [4]


def execute_one(node: Node, connection: psycopg.Connection[TupleRow] | None = None) -> None:
    """Execute one batch, or one step of a range."""

    class Enough(Exception):
        pass

    begun = 0

    def before() -> None:
        nonlocal begun
        status = (connection or node.connection).info.transaction_status
        begun += status is psycopg.pq.TransactionStatus.IDLE
        if begun == 2:
            raise Enough

    with pytest.raises(Enough):
        execute_all(connection or node.connection, before=before)


def test_range_under_way_is_ended_before_what_commits_late_with_a_lower_position(
    node: Node, monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    monkeypatch.setattr(ranges, "ROWS", 2)
    _fill(node, "abcdef")
    execute(node)
    late = connect()
    STORE.put(late, "aa", b"late")
    STORE.put(late, "ee", b"late")
    sent(node, STORE.delete_range)
    execute_one(node)
    late.commit()
    execute(node)
    assert store_of(node.connection) == {"aa": b"late", "ee": b"late"}


async def test_floor_does_not_pass_what_commits_late_before_a_range(
    node: Node, dsn: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "ROWS", 1)
    monkeypatch.setattr("dispatcher.floor.STEP", 1)
    _fill(node, "abc")
    late = connect()
    STORE.put(late, "late", b"v")
    sent(node, STORE.delete_range)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        applier = Applier(connection, SCHEMA)
        await applier.execute()  # what was put, and the goal is read
        await applier.execute()  # a step of the range
        late.commit()
        for _ in range(3):
            await applier.execute()
        await applier.drain()
    assert store_of(node.connection) == {"late": b"v"}
    assert list(waiting(node.connection)) == []


async def test_row_written_below_the_floor_is_found_by_the_scan_of_every_minute(
    node: Node, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.floor.STEP", 1)
    seconds = 0.0
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        applier = Applier(connection, SCHEMA, monotonic=lambda: seconds)
        for _ in range(3):
            sent(node, STORE.increment, "n")
            await applier.execute()
        node.connection.execute(
            "INSERT INTO mailroom.outbox_executable (position, operation, key, amount) OVERRIDING SYSTEM VALUE "
            "VALUES (1, 'increment', 'n', 1)"
        )
        assert await applier.drain() == 0
        seconds = FULL_SCAN_S + 1
        assert await applier.drain() == 1
    assert store_of(node.connection) == {"n": 4}


def test_range_that_fails_tells_how_far_it_came(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "ROWS", 2)
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing SELECT generate_series(1, 5)")
    node.connection.execute("CREATE TABLE app.part (thing integer REFERENCES app.thing)")
    node.connection.execute("INSERT INTO app.part VALUES (3)")
    id = sent(node, THINGS.delete_range)
    sent(node, STORE.increment, "n")
    execute(node)
    assert sorted(things_of(node.connection)) == [3, 4, 5]
    [(buried, reason)] = dead_of(node.connection)
    assert buried == id
    assert reason.startswith("ForeignKeyViolation (23503) part_thing_fkey part")
    assert reason.endswith("after 2 keys were deleted")
    assert store_of(node.connection) == {"n": 1}
    assert node.value("SELECT count(*) FROM mailroom.executable_cursor") == 0


def test_range_goes_on_behind_rows_that_a_trigger_keeps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "ROWS", 2)
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing SELECT generate_series(1, 6)")
    trigger(node, "BEFORE DELETE", "IF old.id <= 3 THEN RETURN null; END IF; RETURN old;")
    sent(node, THINGS.delete_range, notify="outcomes")
    execute(node)
    assert sorted(things_of(node.connection)) == [1, 2, 3]
    assert [told["deleted"] for *_, told in told_of(node.connection)] == [3]


@pytest.mark.parametrize(("start", "end"), [("x", None), (None, "3000000000")])
def test_range_whose_bounds_are_no_keys_is_refused(node: Node, start: str | None, end: str | None) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1)")
    id = sent(node, THINGS.delete_range, start, end)
    execute(node)
    assert dead_of(node.connection) == [(id, "the key is no integer")]
    assert sorted(things_of(node.connection)) == [1]


# -- Tables of users --------------------------------------------------------------------------------------------------


def trigger(node: Node, when: str, body: str, table: str = "app.thing") -> None:
    node.connection.execute(
        f"CREATE FUNCTION app.on_thing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$".encode()
    )
    node.connection.execute(
        f"CREATE TRIGGER on_thing {when} ON {table} FOR EACH ROW EXECUTE FUNCTION app.on_thing()".encode()
    )


@pytest.mark.parametrize(
    ("kind", "keys", "bad"),
    [
        ("smallint", ["-32768", "7", "32767"], ["32768", "x", "07", "+7", "-0", " 7"]),
        ("integer", ["-2147483648", "7", "2147483647"], ["2147483648", ""]),
        ("bigint", [str(SMALLEST), "7", str(LARGEST)], [str(LARGEST + 1), "1e3", "٣"]),
        ("uuid", [str(UUID(int=nth)) for nth in (1, 2, 3)], ["x", "1"]),
        ("text", ["a", "ü", "€ "], []),
        ("varchar", ["a", "ü", "€ "], []),
    ],
)
@pytest.mark.parametrize("value", ["bytea", "text"])
def test_table_of_a_user_may_have_keys_of_these_types(
    node: Node, kind: str, keys: list[str], bad: list[str], value: str
) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute(f"CREATE TABLE app.it (k {kind} PRIMARY KEY, v {value}, n bigint)".encode())
    register(node.connection, "it", "app.it", "k", "v", "n")
    it = Store(target="it")
    for key in keys:
        sent(node, it.put, key, b"v")
        sent(node, it.increment, key, 2)
    sent(node, it.put, keys[0], b"w", expected=b"v")
    sent(node, it.delete, keys[1])
    ids = [sent(node, it.increment, key) for key in bad if key]
    execute(node)
    texts = "convert_from(v, 'UTF8')" if value == "bytea" else "v"
    assert sorted(node.rows(f"SELECT k::text, {texts}, n FROM app.it")) == sorted(
        [(keys[0], "w", 2), (keys[2], "v", 2)]
    )
    assert [(id, reason.partition("no ")[0]) for id, reason in dead_of(node.connection)] == [
        (id, "the key is ") for id in ids
    ]
    sent(node, it.delete_range, keys[0], keys[2])
    execute(node)
    assert node.rows("SELECT k::text FROM app.it") == [(keys[2],)]


def test_key_that_is_none_of_its_table_is_refused_alone_in_its_batch_too(node: Node) -> None:
    make_things(node.connection)
    for rows in (1, 10):
        id = sent(node, THINGS.increment, "x", notify="outcomes")
        execute(node, rows=rows)
        assert dead_of(node.connection)[-1] == (id, "the key is no integer")
    assert [status for _, status, _, _ in told_of(node.connection)] == [500, 500]


def test_one_row_with_a_uuid_has_one_name_however_it_is_spelled(node: Node) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute("CREATE TABLE app.it (k uuid PRIMARY KEY, n integer NOT NULL)")
    register(node.connection, "it", "app.it", "k", None, "n")
    key = uuid4()
    for text in (str(key), str(key).upper(), key.hex, f"{{{key}}}"):
        sent(node, Store(target="it").increment, text)
    execute(node)
    assert node.rows("SELECT k, n FROM app.it") == [(key, 4)]


def test_bad_row_of_a_table_is_found_by_halving_and_the_others_are_written(node: Node) -> None:
    make_things(node.connection)
    trigger(node, "BEFORE INSERT", "IF new.id = 37 THEN RAISE 'not 37'; END IF; RETURN new;")
    with unguarded():
        ids = [sent(node, THINGS.increment, str(key)) for key in range(100)]
        sent(node, STORE.increment, "n")
        [execution] = execute(node)
    assert execution.taken == 101
    assert dead_of(node.connection) == [(ids[37], "RaiseException (P0001) not 37")]
    assert things_of(node.connection) == {key: [None, 1] for key in range(100) if key != 37}
    assert store_of(node.connection) == {"n": 1}


@contextmanager
def unguarded() -> Iterator[None]:
    """Have no table looked upon as guarded."""
    made = targets._target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_target", lambda *given, guarded: made(*given, guarded=False))
        yield


GUARDS = {
    "check": "ALTER TABLE app.thing ADD CHECK (total <> 3)",
    "exclusion": "ALTER TABLE app.thing ADD EXCLUDE (body WITH =)",
    "unique": "ALTER TABLE app.thing ADD UNIQUE (body)",
    "unique index": "CREATE UNIQUE INDEX ON app.thing ((total % 5))",
    "foreign key": "CREATE TABLE app.of (n smallint PRIMARY KEY); ALTER TABLE app.thing ADD FOREIGN KEY (total) "
    "REFERENCES app.of",
    "referenced": "CREATE TABLE app.part (thing integer REFERENCES app.thing)",
    "trigger": "CREATE TRIGGER t BEFORE UPDATE ON app.thing FOR EACH ROW "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "rule": "CREATE RULE r AS ON DELETE TO app.thing DO ALSO NOTHING",
    "row security": "ALTER TABLE app.thing ENABLE ROW LEVEL SECURITY",
    "must be given": "ALTER TABLE app.thing ADD other text NOT NULL",
    "value must be given": "ALTER TABLE app.thing ALTER body SET NOT NULL",
    "value must be given, by default": "ALTER TABLE app.thing ALTER body SET NOT NULL, ALTER body SET DEFAULT ''",
    "value of a length": "ALTER TABLE app.thing ALTER body TYPE varchar(3)",
    "key of a length": "ALTER TABLE app.thing ALTER id TYPE varchar(3)",
    "inherited": "CREATE TABLE app.child () INHERITS (app.thing)",
    "partition": "CREATE TABLE app.whole (LIKE app.thing) PARTITION BY RANGE (total); "
    "ALTER TABLE app.whole ATTACH PARTITION app.thing FOR VALUES FROM (0) TO (3)",
    "computed column": "ALTER TABLE app.thing ADD tenth integer GENERATED ALWAYS AS (10 / (total - 3)) STORED",
    "computed index": "CREATE INDEX ON app.thing ((10 / (total - 3)))",
    "index of some rows": "CREATE INDEX ON app.thing (total) WHERE 10 / (total - 3) > 1",
    "index of the value": "CREATE INDEX ON app.thing (body)",
    "domain": "CREATE DOMAIN app.given AS text NOT NULL; ALTER TABLE app.thing ADD other app.given",
}


@pytest.mark.parametrize("guard", GUARDS)
def test_table_whose_constraints_could_tell_is_written_one_operation_at_a_time(node: Node, guard: str) -> None:
    make_things(node.connection)
    node.connection.execute(GUARDS[guard].encode())
    for _ in range(3):
        sent(node, THINGS.delete, "1")
    assert groups_of(node) == [1, 1, 1]


def test_table_with_nothing_but_a_key_is_folded(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("ALTER TABLE app.thing ADD other text NOT NULL DEFAULT '', ALTER total SET NOT NULL")
    node.connection.execute("CREATE INDEX ON app.thing (total, other)")
    for _ in range(3):
        sent(node, THINGS.delete, "1")
    assert groups_of(node) == [3]


@pytest.mark.parametrize("rows", [1, 10])
def test_row_that_is_deleted_and_put_again_begins_anew_in_one_batch_too(node: Node, rows: int) -> None:
    make_things(node.connection)
    node.connection.execute("ALTER TABLE app.thing ADD other text DEFAULT 'begun'")
    node.connection.execute("INSERT INTO app.thing SELECT n, 'v', 7, 'old' FROM generate_series(1, 4) AS n")
    for key in ("1", "2", "3", "5"):
        sent(node, THINGS.delete, key)
        sent(node, THINGS.put, key, b"v")
    sent(node, THINGS.put, "4", b"w")
    sent(node, THINGS.increment, "2", 7)
    sent(node, THINGS.delete, "3")
    execute(node, rows=rows)
    assert node.rows("SELECT id, body, total, other FROM app.thing ORDER BY id") == [
        (1, "v", 0, "begun"),
        (2, "v", 7, "begun"),
        (4, "w", 7, "old"),
        (5, "v", 0, "begun"),
    ]


def groups_of(node: Node) -> list[int]:
    """Execute, and return the sizes of the groups that were applied as one."""
    sizes = []
    applying = executor._applying

    def noted(schema: str, group: Any, *rest: Any) -> Any:
        sizes.append(len(group))
        return applying(schema, group, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_applying", noted)
        execute(node)
    return sizes


def test_table_with_a_check_comes_to_what_one_after_another_comes_to(node: Node) -> None:
    make_things(node.connection, "total BETWEEN 0 AND 10")
    refusal = "CheckViolation (23514) thing_check thing"
    model = Model(Things(check=lambda entry: None if 0 <= entry[1] <= 10 else refusal))
    parts: list[dict[str, Any]] = [
        {"operation": "increment", "amount": amount} for amount in (4, 7, -5, 6, -4, 1, 11, -10, 3)
    ]
    parts[3:3] = [{"operation": "put", "value": b"v"}, {"operation": "delete"}, {"operation": "put", "value": b"w"}]
    executables = [
        Executable(**each, key="1", target="things", id=UUID(int=nth), notify="outcomes")
        for nth, each in enumerate(parts)
    ]
    with node.connection.transaction():
        STORE.send_many(node.connection, executables)
    model.apply(executables)
    execute(node)
    assert len(model.dead) > 2
    check_equal(node.connection, model)


def test_trigger_of_a_table_sees_every_write(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("CREATE TABLE app.seen (total smallint)")
    trigger(node, "AFTER INSERT OR UPDATE", "INSERT INTO app.seen VALUES (new.total); RETURN null;")
    for amount in (1, 2, 0):
        sent(node, THINGS.increment, "1", amount)
    execute(node)
    assert node.rows("SELECT total FROM app.seen") == [(1,), (3,), (3,)]


def test_trigger_may_send_executables_which_are_executed_too(node: Node) -> None:
    make_things(node.connection)
    trigger(
        node,
        "AFTER INSERT",
        "INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', 'n', 1); RETURN null;",
    )
    sent(node, THINGS.increment, "1")
    execute(node)
    assert store_of(node.connection) == {"n": 1}


def test_table_under_two_names_has_both_of_its_columns_counted(node: Node) -> None:
    node.connection.execute("CREATE SCHEMA app")
    node.connection.execute("CREATE TABLE app.it (k text PRIMARY KEY, m bigint, n bigint)")
    register(node.connection, "ms", "app.it", "k", None, "m")
    register(node.connection, "ns", "app.it", "k", None, "n")
    for name in ("ms", "ns", "ns", "ms"):
        sent(node, Store(target=name).increment, "a")
    sent(node, Store(target="ms").delete, "a")
    sent(node, Store(target="ns").increment, "a", 5)
    execute(node)
    assert node.rows("SELECT k, m, n FROM app.it") == [("a", None, 5)]
    assert dead_of(node.connection) == []


def test_names_with_anything_but_a_quote_in_them_are_taken(node: Node) -> None:
    node.connection.execute('CREATE SCHEMA "100% s"')
    node.connection.execute(b'CREATE TABLE "100% s"."%s T" ("%(k)s" text PRIMARY KEY, "N n" bigint)')
    node.connection.execute(b'CREATE FUNCTION "100% s"."%s f"(jsonb) RETURNS integer LANGUAGE sql AS \'SELECT 7\'')
    register(node.connection, "odd", "100% s.%s T", "%(k)s", None, "N n")
    node.connection.execute("INSERT INTO mailroom.executable_function VALUES ('odd', '100%% s', '%%s f')", [])
    sent(node, Store(target="odd").increment, "a", 5)
    sent(node, STORE.call, "odd", notify="outcomes")
    execute(node)
    assert node.connection.execute(b'SELECT "N n" FROM "100% s"."%s T"').fetchall() == [(5,)]
    assert [told["result"] for *_, told in told_of(node.connection)] == [7]


def test_counter_in_a_column_that_may_be_null_begins_at_0(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, 'v', null)")
    sent(node, THINGS.increment, "1", 3)
    sent(node, THINGS.put, "2", b"w")
    execute(node)
    assert things_of(node.connection) == {1: ["v", 3], 2: ["w", 0]}


OTHER_COLLATION = "ALTER TABLE app.thing ALTER id TYPE text COLLATE app.c"


@pytest.mark.parametrize(
    "changed",
    [
        "ALTER TABLE app.thing DROP body",
        "ALTER TABLE app.thing DROP total",
        "ALTER TABLE app.thing RENAME id TO di",
        "ALTER TABLE app.thing ALTER total TYPE numeric",
        "ALTER TABLE app.thing ALTER body TYPE char(3)",
        "ALTER TABLE app.thing ALTER id TYPE numeric",
        "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey",
        "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; ALTER TABLE app.thing ADD UNIQUE (id, total)",
        "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; ALTER TABLE app.thing ADD PRIMARY KEY (id) DEFERRABLE",
        "ALTER TABLE app.thing DROP CONSTRAINT thing_pkey; CREATE UNIQUE INDEX ON app.thing (id) WHERE total > 0",
        "CREATE COLLATION app.c (provider = icu, locale = 'und-u-ks-level2', deterministic = false);" + OTHER_COLLATION,
        "DROP TABLE app.thing",
        "ALTER SCHEMA app RENAME TO ppa",
    ],
)
def test_table_that_is_another_by_now_is_not_written(node: Node, changed: str) -> None:
    if "icu" in changed and not node.value("SELECT count(*) FROM pg_collation WHERE collname ~ '-x-icu'"):
        pytest.skip("this server was built without ICU")
    make_things(node.connection)
    node.connection.execute(changed.encode())
    ids = [sent(node, THINGS.increment, "1"), sent(node, THINGS.delete_range)]
    sent(node, STORE.increment, "n")
    execute(node)
    assert sorted(dead_of(node.connection)) == sorted((id, UNREGISTERED) for id in ids)
    assert store_of(node.connection) == {"n": 1}


def test_constraint_that_is_deferred_fails_the_executable_and_not_the_commit(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("CREATE TABLE app.of (total smallint PRIMARY KEY)")
    node.connection.execute("INSERT INTO app.of VALUES (1)")
    node.connection.execute(
        "ALTER TABLE app.thing ADD FOREIGN KEY (total) REFERENCES app.of DEFERRABLE INITIALLY DEFERRED"
    )
    body = "INSERT INTO app.thing VALUES (given::integer, null, 7);"
    function(node, "late", f"BEGIN SET CONSTRAINTS ALL DEFERRED; {body} END", "void")
    # It looks at the constraint as soon as it has written, whatever was done before it in its batch.
    function(
        node, "catches", f"BEGIN {body} RETURN 0; EXCEPTION WHEN foreign_key_violation THEN RETURN 1; END", "integer"
    )
    ids = [sent(node, THINGS.increment, "1", amount) for amount in (1, 1, -1)]
    asked: dict[str, Any] = {"notify": "outcomes"}
    sent(node, STORE.call, "catches", 3, **asked)
    late = sent(node, STORE.call, "late", 2)
    sent(node, STORE.call, "catches", 3, **asked)
    execute(node)
    reason = "ForeignKeyViolation (23503) thing_total_fkey thing"
    # 1 + 1 is refused, and so is 1 - 1.
    assert dead_of(node.connection) == [(ids[1], reason), (ids[2], reason), (late, reason)]
    assert things_of(node.connection) == {1: [None, 1]}
    assert [told["result"] for *_, told in told_of(node.connection)] == [1, 1]


def test_schema_that_the_executor_may_not_use_fails_its_executables_only(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    function(node, "f", "BEGIN END", "void")
    role = f"plain_{uuid4().hex}"
    node.connection.execute(f"CREATE ROLE {role}".encode())
    try:
        node.connection.execute(
            f"GRANT USAGE ON SCHEMA mailroom TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA mailroom TO {role};"
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA mailroom TO {role}".encode()
        )
        sent(node, THINGS.increment, "1")
        sent(node, STORE.call, "f")
        sent(node, STORE.increment, "n")
        sent(node, THINGS.delete_range)
        execute_all(connect(autocommit=True, options=f"-c role={role}"))
        assert {reason for _, reason in dead_of(node.connection)} == {"InsufficientPrivilege (42501)"}
        assert len(dead_of(node.connection)) == 3
        assert store_of(node.connection) == {"n": 1}
    finally:
        node.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


# -- Beside others ----------------------------------------------------------------------------------------------------


def test_row_that_somebody_inserts_between_the_look_and_the_write_is_not_overwritten(
    node: Node, connect: Connect
) -> None:
    make_things(node.connection)
    other = connect(autocommit=True)
    sent(node, THINGS.increment, "1", 5, notify="outcomes")
    sent(node, THINGS.put, "2", b"v", expected=b"", notify="outcomes")
    sent(node, STORE.increment, "n")

    def insert() -> None:
        other.execute("INSERT INTO app.thing VALUES (1, 'theirs', 100), (2, 'theirs', 100) ON CONFLICT DO NOTHING")

    executing_beside(node, insert)
    assert things_of(node.connection) == {1: ["theirs", 105], 2: ["theirs", 100]}
    assert [(status, event) for _, status, event, _ in told_of(node.connection)] == [(200, "U"), (409, None)]
    assert store_of(node.connection) == {"n": 1}


def executing_beside(node: Node, before_write: Callable[[], None]) -> None:
    """Execute, with a call each time after a look at the keys and before their write."""
    finding = executor.finding_contents

    def found(*given: Any) -> Any:
        contents = yield from finding(*given)
        before_write()
        return contents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "finding_contents", found)
        execute(node)


def test_row_that_can_neither_be_seen_nor_inserted_is_given_up(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    trigger(node, "BEFORE INSERT", "IF new.id < 3 THEN RETURN null; END IF; RETURN new;")
    ids = [sent(node, THINGS.increment, str(key)) for key in (1, 3, 2)]
    with unguarded():
        execute(node)
    assert dead_of(node.connection) == [(ids[0], HIDDEN), (ids[2], HIDDEN)]
    assert things_of(node.connection) == {3: [None, 1]}


def test_row_that_somebody_writes_is_waited_for_and_nothing_is_lost(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    sent(node, THINGS.increment, "1", 5)
    execute(node)
    other = connect()
    other.execute("UPDATE app.thing SET total = total * 10")
    sent(node, THINGS.increment, "1", 1)
    with ThreadPoolExecutor(1) as thread:
        pid = node.connection.info.backend_pid
        executed = thread.submit(execute, node)
        assert wait_until_blocked(other, pid) == [other.info.backend_pid]
        other.commit()
        executed.result()
    assert things_of(node.connection) == {1: [None, 51]}


def test_rows_that_stay_locked_hold_the_batch_up_and_nothing_is_lost(node: Node, connect: Connect) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1, 'theirs', 1), (2, 'theirs', 1)")
    other = connect()
    node.connection.execute("SET lock_timeout = '50ms'")
    sends: list[tuple[Callable[..., UUID], list[Any]]] = [(THINGS.increment, ["1", 5]), (THINGS.delete_range, ["2"])]
    for send, given in sends:
        other.execute("SELECT FROM app.thing FOR UPDATE")
        sent(node, send, *given, notify="outcomes")
        sent(node, STORE.increment, "n")
        before = list(waiting(node.connection)), store_of(node.connection)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            execute(node)
        assert (list(waiting(node.connection)), store_of(node.connection)) == before
        assert dead_of(node.connection) == []
        other.rollback()
        execute(node)
    assert store_of(node.connection) == {"n": 2}
    assert things_of(node.connection) == {1: ["theirs", 6]}
    assert [status for _, status, _, _ in told_of(node.connection)] == [200, 200]


def test_two_executors_at_once_execute_nothing_twice_and_in_order(dsn: str, node: Node, connect: Connect) -> None:
    with node.connection.transaction():
        STORE.send_many(
            node.connection,
            [Executable("put", "k", value=str(nth).encode(), notify="outcomes") for nth in range(300)],
        )
    first, second = connect(autocommit=True), connect(autocommit=True)
    with ThreadPoolExecutor(2) as threads:
        executions = threads.map(lambda connection: execute_all(connection, rows=5), (first, second))
        taken = sum(each.taken for of_one in executions for each in of_one)
    assert taken == 300
    assert store_of(node.connection) == {"k": b"299"}
    assert len(told_of(node.connection)) == 300


def test_encoded_dead_letter_is_a_map_without_what_is_null(node: Node) -> None:
    sent(node, Store(target="nowhere").delete, "k")
    execute(node)
    raw: Any = codec.decode(node.value("SELECT value FROM mailroom.dead_letter"))
    assert raw == {"version": 1, "operation": "delete", "target": "nowhere", "key": "k"}
