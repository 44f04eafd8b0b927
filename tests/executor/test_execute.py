"""Execute: the outcome and reply of each executable; one that fails stops no other."""

import json
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import TupleRow

from dispatcher.delivery.floor import FULL_SCAN_S
from dispatcher.executor.applying import delete_range as ranges
from dispatcher.executor.batch.reply import TOO_LARGE
from dispatcher.executor.batch_executor import BatchExecutor
from inbox import Inbox
from mailroom.message import executable
from outbox import Executable, Outbox, Store
from tests.support.databases import Connect
from tests.support.executing import (
    LARGEST,
    SCHEMA,
    SMALLEST,
    STORE,
    THINGS,
    UNREGISTERED,
    dead_of,
    execute,
    execute_all,
    function,
    make_things,
    register,
    sent,
    store_of,
    things_of,
    told_of,
    trigger,
    waiting,
)
from tests.support.node import Node
from tests.support.waiting import end

pytestmark = pytest.mark.both_versions

executor = import_module("dispatcher.executor.execute")  # the package has a function of that name

AT = datetime(2026, 7, 1, 12, 0, 30, tzinfo=UTC)
MINUTE = AT.replace(second=0)


def inserted(node: Node, **columns: Any) -> UUID:
    """Send one executable by plain SQL."""
    id = uuid4()
    columns = {"message_id": id, **columns}
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    statement = f"INSERT INTO mailroom.outbox_executable ({names}) VALUES ({places})"
    node.connection.execute(statement.encode(), list(columns.values()))
    return id


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
    assert (execution.taken, execution.dead, execution.replied) == (10, 5, 0)
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


def test_unknown_version_is_parked_and_never_guessed_at(node: Node) -> None:
    sent(node, STORE.put, "k", b"v")
    for nth, operation in enumerate(["put", "delete_range", "merge"]):
        parts = {"value": b"new", "amount": 3} if operation != "delete_range" else {}
        id = inserted(node, version=2, operation=operation, key="k", notify="outcomes", **parts)
        sent(node, STORE.increment, "n")
        execute(node)
        assert store_of(node.connection) == {"k": b"v", "n": nth + 1}
        buried, reason = dead_of(node.connection)[-1]
        assert buried == id
        assert reason.startswith("this release does not know version 2 of the format")
        _, status, event, told = told_of(node.connection)[-1]
        assert (status, event, told["outcome"]) == (500, None, "refused")
        raw = node.value("SELECT value FROM mailroom.dead_letter ORDER BY id DESC LIMIT 1")
        wire = executable.unwired(raw)
        assert (wire["version"], wire["operation"], wire["value"]) == (2, operation, parts.get("value"))


def test_unknown_target_is_parked(node: Node) -> None:
    parts: dict[str, dict[str, Any]] = {"put": {"value": b"v"}, "increment": {"amount": 1}}
    ids = [
        inserted(node, operation=operation, key="k", target="nowhere", **parts.get(operation, {}))
        for operation in ("put", "increment", "delete", "delete_range")
    ]
    sent(node, STORE.increment, "n")
    execute(node)
    assert dead_of(node.connection) == [(id, UNREGISTERED) for id in ids]
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
    told = sum(each.replied for each in execute(node))
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
    node.deliver_all()
    with node.connection.transaction():
        [message] = Inbox("outcomes").reap_any(node.connection)
    assert (message.kind, message.message_type, message.event_type, message.key) == ("R", "O", "C", "n")
    assert dict(message.headers) == {
        "saga": "s", "user": "u", "tenant": "t", "status": "200", "correlation": str(id), "causation": str(id)
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
    node.deliver_all()
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
    end(connection, node.connection)
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
    execute(node)
    assert dead_of(node.connection) == []
    assert [(status, told["outcome"], told["reason"]) for _, status, _, told in told_of(node.connection)] == [
        *[(200, "applied", TOO_LARGE)] * 3,
        (409, "compare failed", TOO_LARGE),
    ]


def test_outcome_is_told_without_headers_of_its_request_that_are_too_large(node: Node) -> None:
    node.inbox("outcomes")
    id = sent(node, STORE.increment, "n", notify="outcomes", headers={"saga": "x" * 8_150, "user": "u"})
    execute(node)
    node.deliver_all()
    [message] = Inbox("outcomes").peek(node.connection)
    assert dict(message.headers) == {
        "user": "u", "status": "200", "correlation": str(id), "causation": str(id)
    }  # fmt: skip
    assert message.value["number"] == 1


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


def test_function_that_is_another_thing_by_now_is_not_run(node: Node) -> None:
    for changed in (
        "DROP FUNCTION app.f",
        "ALTER FUNCTION app.f RENAME TO g",
        "DROP FUNCTION app.f; CREATE FUNCTION app.f(text) RETURNS void LANGUAGE sql AS ''",
        "DROP FUNCTION app.f; CREATE FUNCTION app.f(jsonb) RETURNS SETOF integer LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION app.f; CREATE PROCEDURE app.f(jsonb) LANGUAGE sql AS ''",
    ):
        function(node, "f", "BEGIN END", "void")
        node.connection.execute(changed.encode())
        id = sent(node, STORE.call, "f")
        execute(node)
        buried, reason = dead_of(node.connection)[-1]
        assert (buried, reason.partition(",")[0]) == (id, "its function is not registered"), changed
        node.connection.execute("DROP SCHEMA app CASCADE; DELETE FROM mailroom.executable_function")


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


# Start, end and limit of a range, and what is left of five keys.
RANGES = [
    (None, None, None, ""),
    ("b", "d", None, "ade"),
    ("b", None, None, "a"),
    (None, "c", None, "cde"),
    ("bb", "cc", None, "abde"),
    ("d", "b", None, "abcde"),
    ("b", None, 2, "ade"),
    (None, None, 9, ""),
    ("b", "b", None, "abcde"),
]


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.nightly), 10_000])
def test_range_is_deleted_from_its_start_up_to_its_end_without_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(ranges, "RANGE_ROWS", step)
    for start, stop, limit, left in RANGES:
        node.connection.execute("DELETE FROM mailroom.store; DELETE FROM mailroom.outbox")
        _fill(node, "abcde")
        sent(node, STORE.delete_range, start, stop, limit, notify="outcomes")
        execution = execute(node)
        assert "".join(sorted(store_of(node.connection))) == left, (start, stop, limit)
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
    monkeypatch.setattr(ranges, "RANGE_ROWS", 2)
    _fill(node, "abcdefg")
    sent(node, STORE.delete_range, "b", "g", 4, notify="outcomes")
    sent(node, STORE.put, "b", b"after")
    execute_one(node)
    first = connect(autocommit=True)
    execute_one(node, first)
    end(first, node.connection)
    assert sorted(store_of(node.connection)) == ["a", "d", "e", "f", "g"]
    assert node.rows("SELECT reached, deleted FROM mailroom.executable_cursor") == [("c", 2)]
    # Inserted after it by somebody else, it would be deleted by a range that begins anew.
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
    monkeypatch.setattr(ranges, "RANGE_ROWS", 2)
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
    monkeypatch.setattr(ranges, "RANGE_ROWS", 1)
    monkeypatch.setattr("dispatcher.delivery.floor.STEP", 1)
    _fill(node, "abc")
    late = connect()
    STORE.put(late, "late", b"v")
    sent(node, STORE.delete_range)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        executor = BatchExecutor(connection, SCHEMA)
        await executor.execute()  # what was put, and the goal is read
        await executor.execute()  # a step of the range
        late.commit()
        for _ in range(3):
            await executor.execute()
        await executor.drain()
    assert store_of(node.connection) == {"late": b"v"}
    assert list(waiting(node.connection)) == []


async def test_row_written_below_the_floor_is_found_by_the_scan_of_every_minute(
    node: Node, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatcher.delivery.floor.STEP", 1)
    seconds = 0.0
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        executor = BatchExecutor(connection, SCHEMA, monotonic=lambda: seconds)
        for _ in range(3):
            sent(node, STORE.increment, "n")
            await executor.execute()
        node.connection.execute(
            "INSERT INTO mailroom.outbox_executable (position, operation, key, amount) OVERRIDING SYSTEM VALUE "
            "VALUES (1, 'increment', 'n', 1)"
        )
        assert await executor.drain() == 0
        seconds = FULL_SCAN_S + 1
        assert await executor.drain() == 1
    assert store_of(node.connection) == {"n": 4}


def test_range_that_fails_tells_how_far_it_came(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_ROWS", 2)
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
    monkeypatch.setattr(ranges, "RANGE_ROWS", 2)
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing SELECT generate_series(1, 6)")
    trigger(node, "BEFORE DELETE", "IF old.id <= 3 THEN RETURN null; END IF; RETURN old;")
    sent(node, THINGS.delete_range, notify="outcomes")
    execute(node)
    assert sorted(things_of(node.connection)) == [1, 2, 3]
    assert [told["deleted"] for *_, told in told_of(node.connection)] == [3]


def test_range_whose_bounds_are_no_keys_is_refused(node: Node) -> None:
    make_things(node.connection)
    node.connection.execute("INSERT INTO app.thing VALUES (1)")
    ids = [sent(node, THINGS.delete_range, start, end) for start, end in (("x", None), (None, "3000000000"))]
    execute(node)
    assert dead_of(node.connection) == [(id, "the key is not a valid integer") for id in ids]
    assert sorted(things_of(node.connection)) == [1]
