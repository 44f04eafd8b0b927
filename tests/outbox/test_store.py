"""The writer's side of executables: what is sent, what is refused, and that Python and the table agree on it."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName, NotInTransaction
from mailroom.message.executable import MAX_PART_BYTES
from outbox import AsyncStore, Executable, Store
from outbox.store import INSERT, Books
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.executing import LARGEST, SMALLEST, STORE, dead_of, execute_all, store_of
from tests.support.noted import END

AT = datetime(2026, 7, 1, 12, 0, 30, tzinfo=UTC)
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, 999999, UTC)
SECRET = "4711-secret"
NAMES = tuple(name for name in INSERT.values if name != "message_id")

# What each operation needs, and all that it may have.
NEEDED: dict[str, dict[str, Any]] = {
    "put": {"key": "k", "value": b"v"},
    "increment": {"key": "k", "amount": 1},
    "delete": {"key": "k"},
    "delete_range": {},
    "account": {"target": "accounting", "key": "a/b", "amount": 1, "bytes": 2},
    "call": {"target": "f"},
}
OPTIONAL: dict[str, dict[str, Any]] = {
    "put": {"expected": b"e", "target": "things"},
    "increment": {"target": "things"},
    "delete": {"target": "things"},
    "delete_range": {"key": "a", "end_key": "b", "row_limit": 5, "target": "things"},
    "account": {"at": AT},
    "call": {"key": "k", "arguments": {"a": [1, None, "€"]}},
}
PARTS = {name: of for have in (NEEDED, OPTIONAL) for parts in have.values() for name, of in parts.items()}
del PARTS["target"]
TOLD: dict[str, Any] = {"notify": "outcomes", "headers": {"saga": "ü€"}, "after_clock": 7}


def rows(connection: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """Return the columns that writers set, those that are set, in the order sent."""
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(f"SELECT {', '.join(NAMES)} FROM mailroom.outbox_executable ORDER BY position".encode())
        return [{name: value for name, value in row.items() if value is not None} for row in cursor]


def ids(connection: psycopg.Connection[Any]) -> list[UUID]:
    return [id for (id,) in connection.execute("SELECT message_id FROM mailroom.outbox_executable ORDER BY position")]


def row(operation: str, **parts: Any) -> dict[str, Any]:
    """Return what `rows` gives of these parts."""
    return {"version": 1, "operation": operation, "target": "store", "key": "", **parts}


def send(connection: Any, operation: str, *, target: str = "store", flavour: Any = Store, **parts: Any) -> Any:
    """Send by the operation's method what an `Executable` of these parts is."""
    names: dict[str, dict[str, str]] = {
        "increment": {"amount": "by"},
        "delete_range": {"key": "start", "end_key": "end", "row_limit": "limit"},
        "account": {"amount": "count"},
    }
    arguments = {names.get(operation, {}).get(name, name): value for name, value in parts.items()}
    if operation == "call":
        arguments["name"] = target
    store = flavour() if operation in ("account", "call") else flavour(target=target)
    return getattr(store, operation)(connection, **arguments)


def insert(connection: psycopg.Connection[Any], **columns: Any) -> None:
    """Send by plain SQL."""
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    values = [Jsonb(value) if name == "arguments" else value for name, value in columns.items()]
    connection.execute(f"INSERT INTO mailroom.outbox_executable ({names}) VALUES ({places})".encode(), values)


# -- What is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", NEEDED)
def test_operation_sends_a_row_with_what_was_given_and_nothing_else(connect: Connect, operation: Any) -> None:
    connection = connect(application_name="billing")
    nothing: dict[str, Any] = {}
    for told in (nothing, TOLD):
        for optional in (nothing, OPTIONAL[operation]):
            connection.execute("DELETE FROM mailroom.outbox_executable")
            parts = {**NEEDED[operation], **optional, **told}
            fresh, given_id = send(connection, operation, **parts), uuid4()
            assert send(connection, operation, **parts, id=given_id) == given_id
            assert STORE.send_many(connection, [Executable(operation, **parts, id=id) for id in (given_id, None)]) == 2
            assert rows(connection) == [row(operation, **parts)] * 4
            assert ids(connection)[:3] == [fresh, given_id, given_id]
            assert len(set(ids(connection))) == 3
    others = "SELECT DISTINCT source, xact = pg_current_xact_id(), sent_at >= now() FROM mailroom.outbox_executable"
    assert connection.execute(others.encode()).fetchall() == [("billing", True, True)]


class Named(str, Enum):  # noqa: UP042 - what users have from before StrEnum
    A = "the value"


class Numbered(IntEnum):
    ONE = 1


def test_default_is_one_and_what_is_empty_or_of_another_class_is_sent_as_what_it_is(connect: Connect) -> None:
    connection = connect()
    STORE.increment(connection, "k")
    STORE.account(connection, UUID(int=1))
    STORE.increment(connection, 0, 0, after_clock=0)
    STORE.put(connection, "k", b"", expected=b"", headers={})
    STORE.put(connection, Named.A, bytearray(b"v"), expected=memoryview(b"e"))  # type: ignore[arg-type]  # what is bytes-like is taken too
    STORE.delete_range(connection, "", Numbered.ONE, Numbered.ONE, after_clock=Numbered.ONE)
    STORE.call(connection, "f", 0, key="")
    assert rows(connection) == [
        row("increment", key="k", amount=1),
        row("account", target="accounting", key=str(UUID(int=1)), amount=1, bytes=0),
        row("increment", key="0", amount=0, after_clock=0),
        row("put", key="k", value=b"", expected=b""),
        row("put", key="the value", value=b"v", expected=b"e"),
        row("delete_range", end_key="1", row_limit=1, after_clock=1),
        row("call", target="f", arguments=0),
    ]


def test_store_of_another_node_writes_to_its_schema(connect: Connect) -> None:
    connection, store = connect(), Store(schema="elsewhere")
    connection.execute("CREATE SCHEMA elsewhere")
    connection.execute("CREATE TABLE elsewhere.outbox_executable (LIKE mailroom.outbox_executable INCLUDING ALL)")
    store.increment(connection, "k")
    assert store.send_many(connection, []) == 0
    assert store.send_many(connection, [Executable("delete", "k")] * 3) == 3
    assert len(connection.execute("SELECT FROM elsewhere.outbox_executable").fetchall()) == 4
    assert rows(connection) == []


# -- What Python refuses ----------------------------------------------------------------------------------------------

NUMBERS = {
    "is bytes": b"v", "is too large": LARGEST + 1, "is too small": SMALLEST - 1, "is a bool": True,
    "is a float": 1.0,
}  # fmt: skip
ZONED = timezone(timedelta(hours=5)), timezone(timedelta(hours=-5))
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{f"key that {fault}": ("delete", {"key": key}, told) for fault, key, told in [
        ("is None", None, "delete needs key"), ("is empty", "", "delete needs key"), ("is a bool", True, "not bool"),
        ("has 1,025 bytes", "k" * 1_025, "1025 bytes; 1 to 1024"), ("has 342 characters", "€" * 342, "1026 bytes"),
        ("holds NUL", "a\0b", "NUL"), ("holds a surrogate", "\ud800", "surrogate"), ("is bytes", b"k", "not bytes"),
        ("has 1,025 digits", 10**1_024, "digits")]},
    "end_key that is empty": ("delete_range", {"end_key": ""}, "0 bytes; 1 to 1024"),
    "end_key that is too long": ("delete_range", {"end_key": "k" * 1_025}, "1025 bytes"),
    "end_key that is bytes": ("delete_range", {"end_key": b"k"}, "not bytes"),
    "first key that is too long": ("delete_range", {"key": "k" * 1_025}, "1025 bytes"),
    "key of 33 levels": ("account", {"key": "/" * 32}, "has 33 levels; 32 can"),
    **{f"{part} that {fault}": ("put", {part: value}, part + told) for part in ("value", "expected")
       for fault, value, told in [
        ("is text", SECRET, " is bytes, not str"), ("is an int", 4711, " is bytes, not int"),
        ("is too large", bytes(MAX_PART_BYTES + 1), " has 4,194,305 bytes; 4,194,304")]},
    "value that is None": ("put", {"value": None}, "put needs value"),
    "amount that is None": ("increment", {"amount": None}, "increment needs amount"),
    "count and bytes that are None": ("account", {"amount": None, "bytes": None}, "account needs amount and bytes"),
    **{f"{part} of {operation} that {fault}": (operation, {part: number}, f"{part} must be an int from .*, not ")
       for operation, part in [("increment", "amount"), ("account", "amount"), ("account", "bytes"),
       ("delete_range", "row_limit")]
       for fault, number in NUMBERS.items()},
    "limit of 0": ("delete_range", {"row_limit": 0}, "row_limit must be an int from 1 to .*, not 0"),
    "negative limit": ("delete_range", {"row_limit": -1}, "row_limit must be .*, not -1"),
    **{f"arguments {fault}": ("call", {"arguments": {"a": SECRET, "b": value}}, told) for fault, value, told in [
        ("of NaN", float("nan"), "ValueError"), ("of a set", {1}, "TypeError"), ("with NUL", "\\\0", "NUL"),
        ("named by a tuple", {(1, 2): 3}, "TypeError"), ("named with NUL", {"\0": 1}, "NUL"),
        ("with a surrogate", "\ud800", "UnicodeEncodeError"),
        ("that are too large", "x" * (MAX_PART_BYTES - 28), "4,194,305 bytes as JSON; 4,194,304")]},
    "naive at": ("account", {"at": datetime(2026, 1, 1)}, "at needs a datetime with a time zone"),  # noqa: DTZ001 - the fault
    "at that is not a datetime": ("account", {"at": 0}, "at needs a datetime"),
    "at before the year 1 of UTC": ("account", {"at": datetime(1, 1, 1, tzinfo=ZONED[0])}, "1 to 9998"),
    "at in the year 9999 of UTC": ("account", {"at": datetime(9998, 12, 31, 23, tzinfo=ZONED[1])}, "1 to 9998"),
    **{f"notify {notify!a:.20}": ("delete", {"notify": notify}, "not valid")
       for notify in ("", "order paid", "t\n", "tä", "9t", "t" * 201, 5)},
    "headers over 8 KiB": ("delete", {"headers": {"a": SECRET + "x" * 8_173}}, "8193 bytes as JSON; 8192"),
    "a secret with NUL in a header": ("delete", {"headers": {"a": SECRET + "\0"}}, "header 'a' contains a NUL"),
    "arguments that jsonb writes out": ("call", {"arguments": [1e300] * 14_000}, "bytes as JSON; 4,194,304"),
    "headers of a number": ("delete", {"headers": {"a": 1, "b": SECRET}}, "not text to text"),
    "headers that are no mapping": ("delete", {"headers": [("a", SECRET)]}, "mapping"),
    "NUL in a header": ("delete", {"headers": {"a": "\0", "b": SECRET}}, "NUL"),
    **{f"after_clock {clock}": ("delete", {"after_clock": clock}, "after_clock") for clock in (-1, 2**62 + 1, True)},
    "id that is text": ("delete", {"id": str(UUID(int=1))}, "id is a UUID"),
}  # fmt: skip


@pytest.mark.slow
def test_refused_executable_sends_nothing_and_leaves_the_transaction_usable(connect: Connect) -> None:
    connection = connect()
    before = STORE.put(connection, "k", b"before")
    operation: Any
    for operation, changed, told in REFUSED.values():
        parts = {**NEEDED[operation], **changed}
        good, bad = Executable("increment", "n", amount=1), Executable(operation, **parts)
        with pytest.raises(InvalidMessage, match=told) as alone:
            send(connection, operation, **parts)
        with pytest.raises(
            InvalidMessage, match=rf"\AExecutable 2: .*{told}.* None of this call was sent\." + END
        ) as of_many:
            STORE.send_many(connection, [good, bad, good])
        assert ids(connection) == [before]
        assert SECRET not in f"{bad!r} {alone.value} {of_many.value}"
        for caught in (alone.value, of_many.value):  # the context's text may be the payload's
            assert caught.__suppress_context__ or caught.__context__ is None


def test_number_that_is_too_large_to_be_shown_is_refused_as_others_are(connect: Connect) -> None:
    connection, huge = connect(), 10**5_000
    calls: list[Callable[[], object]] = [
        lambda: STORE.increment(connection, "k", huge),
        lambda: STORE.delete_range(connection, limit=huge),
        lambda: STORE.delete(connection, "k", after_clock=huge),
    ]
    for call in calls:
        with pytest.raises(InvalidMessage, match="of type int, too large to show"):
            call()
    assert rows(connection) == []


def test_operation_that_is_unknown_or_has_a_part_of_another_is_refused(connect: Connect) -> None:
    connection = connect()
    unknown: list[Any] = ["", "PUT", "merge", None, 5, ["put"]]
    bad = [(Executable(name, "k"), "not an operation; there are put, .*, call") for name in unknown]
    operation: Any
    for operation, needed in NEEDED.items():
        for part in PARTS.keys() - needed.keys() - OPTIONAL[operation].keys():
            bad.append((Executable(operation, **{**needed, part: PARTS[part]}), f"{operation} takes no {part}"))
    for one, told in bad:
        with pytest.raises(InvalidMessage, match=rf"\AExecutable 1: .*{told}\."):
            STORE.send_many(connection, [one])
    assert rows(connection) == []


def test_target_that_is_no_name_is_refused(connect: Connect) -> None:
    connection = connect()
    names: list[Any] = ["", "Things", "1st", "a-b", "a.b", "t\n", "tä", "t" * 42, None, 5]
    many = r"\AExecutable 2: .* is not valid.* None of this call was sent\." + END
    for name in names:
        for of, part in ((Store, "target"), (AsyncStore, "target"), (Store, "schema")):
            with pytest.raises(InvalidName, match="is not valid"):
                of(**{part: name})
        if name is not None:
            with pytest.raises(InvalidName, match="is not valid"):
                STORE.call(connection, name)
            with pytest.raises(InvalidName, match=many):
                STORE.send_many(connection, [Executable("delete", "k"), Executable("delete", "k", name)])
    assert rows(connection) == []


def test_without_a_target_it_is_the_nodes_own(connect: Connect) -> None:
    connection = connect()
    STORE.send_many(connection, [Executable("delete", "k"), Executable("account", "k", amount=1, bytes=2)])
    assert [row["target"] for row in rows(connection)] == ["store", "accounting"]
    nothing: Any = None
    for bad, told in (
        (Executable("call"), "call needs a target"),
        (Executable("account", "k", "things", amount=1, bytes=2), "account writes the node's books"),
        (nothing, "NoneType: give an Executable"),
    ):
        with pytest.raises(InvalidMessage, match=rf"\AExecutable 1: .*{told}.* None of this call was sent\." + END):
            STORE.send_many(connection, [bad])


@pytest.mark.slow
def test_largest_of_everything_is_sent(connect: Connect) -> None:
    connection = connect(options="-c TimeZone=UTC")  # else psycopg cannot read the year 1
    largest: list[tuple[Any, dict[str, Any]]] = [
        ("put", {"key": "€" * 341, "value": bytes(MAX_PART_BYTES), "expected": bytes(MAX_PART_BYTES)}),
        ("delete_range", {"key": "k" * 1_024, "end_key": "k" * 1_024, "row_limit": LARGEST, "target": "t" * 41}),
        ("account", {**NEEDED["account"], "key": "/" * 31, "amount": LARGEST, "bytes": SMALLEST, "at": LAST}),
        ("account", {**NEEDED["account"], "amount": SMALLEST, "bytes": LARGEST, "at": FIRST}),
        ("delete", {"key": "/" * 1_024, "notify": "t" * 200, "headers": {"a": "x" * 8_183}, "after_clock": 2**32}),
        ("call", {"target": "f" * 41, "arguments": ['\x7f\x1f"\\/\u2028\U0001f600', "x" * (MAX_PART_BYTES - 27)]}),
    ]
    for operation, parts in largest:
        send(connection, operation, **parts)
    STORE.send_many(connection, [Executable(operation, **parts) for operation, parts in largest])
    assert rows(connection) == [row(operation, **parts) for operation, parts in largest] * 2


# -- What the table refuses -------------------------------------------------------------------------------------------

LARGE = "convert_to(repeat('x', 4194305), 'UTF8')"
BOOKED = "operation, target, key, amount, bytes"
BAD_ROWS = {
    "unknown operation": ("operation, key", "'merge', 'k'", "operation"),
    "put without a key": ("operation, value", "'put', 'secret'", "operation"),
    "put without a value": ("operation, key", "'put', 'secret'", "operation"),
    "increment without an amount": ("operation, key", "'increment', 'k'", "operation"),
    "delete of an empty key": ("operation, key", "'delete', ''", "operation"),
    "delete_range with a value": ("operation, value", "'delete_range', 'secret'", "operation"),
    "account of the store": ("operation, key, amount, bytes", "'account', 'k', 1, 1", "operation"),
    "account without bytes": ("operation, target, key, amount", "'account', 'accounting', 'k', 1", "operation"),
    "long operation of another version": ("version, operation", "2, repeat('x', 42)", "length"),
    "target": ("operation, target", "'call', 'no secret'", "target"),
    "target with a line break": ("operation, target", "'call', E'f\\n'", "target"),
    "key": ("operation, key", "'delete', repeat('k', 1025)", "key"),
    "key of 33 levels": (BOOKED, "'account', 'accounting', 'secret' || repeat('/', 32), 1, 1", "levels"),
    "empty end_key": ("operation, end_key", "'delete_range', ''", "end_key"),
    "long end_key": ("operation, end_key", "'delete_range', repeat('k', 1025)", "end_key"),
    "value": ("operation, key, value", f"'put', 'k', {LARGE}", "value"),
    "value of another version": ("version, operation, value", f"2, 'merge', {LARGE}", "value"),
    "expected": ("operation, key, value, expected", f"'put', 'k', 'v', {LARGE}", "expected"),
    "arguments": ("operation, arguments", "'call', to_jsonb(repeat('x', 4194303))", "arguments"),
    "at never": ("version, operation, at", "2, 'merge', 'infinity'", "at"),
    "at long ago": (f"{BOOKED}, at", "'account', 'accounting', 'k', 1, 1, '0044-03-15 BC'", "at"),
    "row_limit": ("operation, row_limit", "'delete_range', 0", "row_limit"),
    "notify": ("operation, notify", "'call', 'no secret'", "notify"),
    "notify with a line break": ("operation, notify", "'call', E't\\n'", "notify"),
    "large headers": ("operation, headers", "'call', jsonb_build_object('a', repeat('x', 8184))", "headers"),
    "headers of a number": ("operation, headers", """'call', '{"a": "secret", "c": 1}'""", "headers"),
    "nested headers": ("operation, headers", """'call', '{"a": {"b": "secret"}}'""", "headers"),
    "headers that are a list": ("operation, headers", """'call', '["secret"]'""", "headers"),
    "headers that are JSON null": ("operation, headers", "'call', 'null'", "headers"),
    "after_clock": ("operation, after_clock", "'call', 4611686018427387905", "after_clock"),
    "source": ("operation, source", "'call', repeat('x', 201)", "source"),
    "sent_at never": ("operation, sent_at", "'call', '-infinity'", "sent_at"),
}


def test_table_refuses_the_same_in_plain_sql_and_shows_nothing_of_it(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute("INSERT INTO mailroom.outbox_executable (operation) VALUES ('delete_range')")
    for columns, values, rule in BAD_ROWS.values():
        for statement in (
            f"INSERT INTO mailroom.outbox_executable ({columns}) VALUES ({values})",
            f"UPDATE mailroom.outbox_executable SET ({columns}) = ROW ({values})",
        ):
            with pytest.raises(errors.CheckViolation) as caught:
                connection.execute(statement.encode())
            diag = caught.value.diag
            name = f"outbox_executable_{rule}"
            assert (diag.constraint_name, diag.schema_name, diag.table_name) == (name, "mailroom", "outbox_executable")
            told = f'new row for relation "outbox_executable" violates check constraint "{name}"'
            assert diag.message_primary == told
            assert "secret" not in str(caught.value)
    assert [each["operation"] for each in rows(connection)] == ["delete_range"]


def test_every_rule_of_the_table_is_broken_by_a_row_above(connect: Connect) -> None:
    source = connect().execute("SELECT prosrc FROM pg_proc WHERE proname = 'check_executable'").fetchone()
    assert source is not None
    assert set(re.findall(r"THEN 'outbox_executable_(\w+)'", source[0])) == {rule for _, _, rule in BAD_ROWS.values()}


GOOD_ROWS = {
    "put that compares": ("operation, target, key, value, expected", "'put', 'things', 'k', 'v', ''"),
    "delete_range of all": ("operation", "'delete_range'"),
    "account": (f"{BOOKED}, at", "'account', 'accounting', repeat('/', 31), 1, -1, '0001-01-01 UTC'"),
    "told": ("operation, notify, after_clock, source", "'call', repeat('t', 200), 4294967296, null"),
    "other version": ("version, operation", "2, 'merge'"),
    "other version of anything": (
        "version, operation, target, key, end_key, value, amount, bytes, expected, arguments, at, row_limit",
        "-1, '', 'f', '', 'k', 'v', 1, 2, 'e', '[]', now(), 3",
    ),
    "other version of what is known": ("version, operation, key, amount", "2, 'put', '', 5"),
}


def test_table_takes_what_is_right_in_plain_sql(connect: Connect) -> None:
    connection = connect()
    for columns, values in GOOD_ROWS.values():
        connection.execute(f"INSERT INTO mailroom.outbox_executable ({columns}) VALUES ({values})".encode())
        connection.execute("UPDATE mailroom.outbox_executable SET source = 'other'")
    assert len(rows(connection)) == len(GOOD_ROWS)


def test_transaction_stands_before_the_position_which_is_not_for_writers_to_set(connect: Connect) -> None:
    connection = connect()
    columns = connection.execute("SELECT * FROM mailroom.outbox_executable").description
    assert [column.name for column in columns or []][:2] == ["xact", "position"]
    with pytest.raises(errors.GeneratedAlways):
        insert(connection, operation="delete", key="k", position=5)


# -- That both agree --------------------------------------------------------------------------------------------------

within = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
texts = st.text(st.characters(exclude_categories=[]), max_size=60)  # with NUL and lone surrogates
words = st.text("aZ09_.-/ \n\0ä", max_size=6) | st.sampled_from([38, 39, 40, 41, 42, 199, 200, 201]).map("t".__mul__)


def check_agreed(connection: psycopg.Connection[Any], operation: Any, **parts: Any) -> bool:
    """See that Python and the table both take this, and then send the same, or both refuse it; return which."""
    with connection.transaction(force_rollback=True):
        try:
            STORE.send_many(connection, [Executable(operation, **parts)])
            accepted = True
        except (InvalidMessage, InvalidName):
            accepted = False
        assert len(rows(connection)) == accepted
        try:
            with connection.transaction():
                insert(connection, operation=operation, **{name: of for name, of in parts.items() if of is not None})
        except (errors.CheckViolation, psycopg.DataError, UnicodeEncodeError):
            assert not accepted
        else:
            assert accepted
            [of_python, of_sql] = rows(connection)
            assert of_python == of_sql
    return accepted


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("operation", ["delete", "delete_range", "account", "call"])
def test_key_is_taken_by_both_or_by_neither(connect: Connect, operation: str) -> None:
    connection = connect()
    paths = st.lists(texts, max_size=6).map("/".join) | st.integers(29, 34).map("/".__mul__)

    @within
    @given(texts | paths | st.integers(1_020, 1_028).map("k".__mul__) | st.integers(339, 343).map("€".__mul__))
    @example("")
    @example("\ufeff")
    @example("\n/" * 31)
    @example("\n/" * 32)
    def check(key: str) -> None:
        check_agreed(connection, operation, **{**NEEDED[operation], "key": key})
        if operation == "delete_range":
            check_agreed(connection, operation, key=key, end_key=key)

    check()


@pytest.mark.slow
def test_name_and_number_are_taken_by_both_or_by_neither(connect: Connect) -> None:
    connection = connect()
    edges = st.sampled_from([SMALLEST, -(2**31), 0, 2**31, 2**62, LARGEST])

    @settings(within, max_examples=40)
    @given(words | texts, st.builds(int.__add__, edges, st.integers(-2, 2)) | st.integers())
    @example("t\n", 0)
    def check(name: str, number: int) -> None:
        check_agreed(connection, "delete", key="k", notify=name)
        check_agreed(connection, "increment", key="k", amount=1, target=name)
        is_int64 = SMALLEST <= number <= LARGEST
        assert check_agreed(connection, "increment", key="k", amount=number) == is_int64
        assert check_agreed(connection, "account", target="accounting", key="k", amount=0, bytes=number) == is_int64
        assert check_agreed(connection, "delete_range", row_limit=number) == (1 <= number <= LARGEST)
        if not 2**32 < number <= 2**62:  # between these it depends on the node's clock: see test_reach
            assert check_agreed(connection, "delete", key="k", after_clock=number) == (0 <= number <= 2**32)

    check()


@pytest.mark.slow
def test_operation_with_any_set_of_parts_is_taken_by_both_or_by_neither(connect: Connect) -> None:
    connection, taken = connect(), set()

    @settings(within, max_examples=300)
    @given(st.sampled_from([*NEEDED, "merge"]), st.sets(st.sampled_from([*PARTS]), max_size=3))
    def check(operation: str, other: set[str]) -> None:
        # Those it needs and may have, but for a few; or a few more.
        parts = {**NEEDED.get(operation, {}), **{name: PARTS[name] for name in other}}
        if check_agreed(connection, operation, **parts):
            taken.add(operation)
        parts = {**NEEDED.get(operation, {}), **OPTIONAL.get(operation, {}), **dict.fromkeys(other)}
        check_agreed(connection, operation, **parts)

    check()
    assert taken == set(NEEDED)


# -- On every connection ----------------------------------------------------------------------------------------------

SENT: list[dict[str, Any]] = [
    {"operation": "put", "key": "a", "value": b"v", "notify": "outcomes", "headers": {"h": 'ü€"b\\c{},NULL'}},
    {"operation": "put", "key": "a", "value": b"\x00\\'\xff", "expected": b"v"},
    {"operation": "increment", "key": "%s %% :name", "amount": SMALLEST, "after_clock": 2**32},
    {"operation": "put", "key": "NULL", "value": b"", "expected": b""},
    {"operation": "delete", "key": "NULL"},
    {"operation": "delete_range", "key": "ü€", "end_key": "\U0001f600", "row_limit": LARGEST},
    {"operation": "account", "target": "accounting", "key": "{x,y}/\n", "amount": 3, "bytes": -4, "at": AT},
    {"operation": "call", "target": "f", "key": "k", "arguments": {'a"\\,{}': ["€\U0001f600", None, 1.5, "\\u0000"]}},
]
AUTOCOMMIT: dict[bool, dict[str, Any]] = {True: {"autocommit": True}, False: {"isolation_level": "AUTOCOMMIT"}}
EARLIER = AT.replace(second=0)


def check_sent(connection: psycopg.Connection[Any], sent: list[UUID]) -> None:
    """See that `SENT` has been sent by methods and as many, and execute what was sent by methods."""
    assert rows(connection) == [row(**parts) for parts in SENT] * 2
    assert ids(connection)[: len(SENT)] == sent
    connection.execute("DELETE FROM mailroom.outbox_executable WHERE message_id <> ALL (%s)", [sent])
    connection.execute("INSERT INTO mailroom.executable_function VALUES ('f', 'pg_catalog', 'jsonb_typeof')")
    execute_all(connection)
    assert store_of(connection) == {"a": b"\x00\\'\xff", "%s %% :name": SMALLEST}
    assert dead_of(connection) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_every_operation_is_sent_on_every_connection(dsn: str, connect: Connect, kind: str) -> None:
    observer, many = connect(autocommit=True), [Executable(**parts) for parts in SENT]
    with opened(dsn, kind) as connection:
        STORE.increment(connection, "not sent")
        STORE.send_many(connection, many)
        connection.rollback()
        sent = [send(connection, **parts) for parts in SENT]
        assert STORE.send_many(connection, iter(many)) == len(many)
        assert rows(observer) == []  # until the commit, which is the caller's
        connection.commit()
        check_sent(observer, sent)
        assert [STORE.get(connection, key) for key in ("a", "%s %% :name", "?")] == [b"\x00\\'\xff", SMALLEST, None]
        assert STORE.books(connection, "{x,y}") == STORE.books(connection, "{x,y}/\n", EARLIER) == Books(3, -4)
        assert STORE.books(connection, "{x,y}", AT) == STORE.books(connection, "{x,y}", None, EARLIER) == Books(0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_every_operation_is_sent_on_every_async_connection(dsn: str, connect: Connect, kind: str) -> None:
    observer, store, many = connect(autocommit=True), AsyncStore(), [Executable(**parts) for parts in SENT]
    async with opened_async(dsn, kind) as connection:
        await store.increment(connection, "not sent")
        await store.send_many(connection, many)
        await connection.rollback()
        sent = [await send(connection, flavour=AsyncStore, **parts) for parts in SENT]
        assert await store.send_many(connection, iter(many)) == len(many)
        assert rows(observer) == []
        await connection.commit()
        check_sent(observer, sent)
        assert [await store.get(connection, key) for key in ("a", "%s %% :name")] == [b"\x00\\'\xff", SMALLEST]
        assert await store.books(connection, "{x,y}", EARLIER) == Books(3, -4)
        assert await store.books(connection, "{x,y}", None, EARLIER) == Books(0, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_autocommit_connection_outside_a_transaction_is_refused(dsn: str, connect: Connect, kind: str) -> None:
    with opened(dsn, kind, **AUTOCOMMIT[kind == "psycopg"]) as connection:
        for parts in SENT:
            with pytest.raises(NotInTransaction, match="autocommit"):
                send(connection, **parts)
            with pytest.raises(NotInTransaction, match="autocommit"):
                STORE.send_many(connection, [Executable(**parts)])
        assert STORE.get(connection, "a") is None
    assert rows(connect()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_async_autocommit_is_refused(dsn: str, connect: Connect, kind: str) -> None:
    async with opened_async(dsn, kind, **AUTOCOMMIT[kind == "psycopg"]) as connection:
        for parts in SENT:
            with pytest.raises(NotInTransaction, match="autocommit"):
                await send(connection, flavour=AsyncStore, **parts)
            with pytest.raises(NotInTransaction, match="autocommit"):
                await AsyncStore().send_many(connection, [Executable(**parts)])
    assert rows(connect()) == []


def test_books_of_all_minutes_may_come_to_more_than_64_bits(connect: Connect) -> None:
    connection = connect(autocommit=True)
    with connection.transaction():
        for minute in (1, 2):
            at = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
            STORE.account(connection, "k", count=LARGEST, bytes=SMALLEST, at=at)
    execute_all(connection)
    assert STORE.books(connection, "k") == Books(2 * LARGEST, 2 * SMALLEST)


def test_reading_is_refused_where_there_is_nothing_to_read(connect: Connect) -> None:
    with pytest.raises(ConfigurationError, match="things is a table of your own"):
        Store(target="things").get(connect(), "k")
    with pytest.raises(InvalidMessage, match="since needs a datetime with a time zone"):
        STORE.books(connect(), "k", datetime(2026, 1, 1))  # noqa: DTZ001 - the fault
