"""Mailroom from SQL: docs/reference/sql.md block by block, its reap, roles, and cbor_to_jsonb."""

import json
import math
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import cbor2
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from inbox import Inbox
from inbox.by_key.failure import failed, recording
from inbox.by_key.peek import finding
from mailroom import create_inbox, schema
from mailroom.errors import DecodeError
from mailroom.sql.runner import run
from mailroom.testing import deliver, execute
from mailroom.values.codec import decode, encode
from outbox import Executable, Outbox, Outgoing, Store
from tests.message.test_codec import supported
from tests.support.databases import Connect
from tests.support.pages import page_named
from tests.support.roles import named, rights
from tests.support.waiting import wait_until_blocked

pytestmark = pytest.mark.both_versions

PAGE = page_named("sql.md")
ROLES = {"shop_writer": rights("writer"), "shop_shipping": rights("reaper", "shipping")}


# --- the page -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block of the page; `output` is the text block that stands right after it."""

    language: str
    text: str
    output: str | None


def blocks() -> list[Block]:
    found = re.findall(r"^```(sql|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE.read_text(), re.M | re.S)
    return [Block(language, text, output or None) for language, text, output in found]


def statements(start: str) -> str:
    """Return the one SQL block of the page that begins with `start`."""
    [text] = [block.text for block in blocks() if block.language == "sql" and block.text.startswith(start)]
    return text


def reap_statement() -> str:
    """Return the page's reap by itself, without the transaction around it."""
    [text] = re.findall(r"^WITH wanted.*?;", statements("BEGIN;\n\nWITH wanted"), re.M | re.S)
    return str(text)


def do_as_command(connection: psycopg.Connection[Any], line: str) -> None:
    match line.split():
        case ["$", "mailroom", "migrate"]:
            schema.check(connection)
        case ["$", "mailroom", "inbox", "create", name, "--subscribe", topic]:
            create_inbox(connection, name, [topic])
        case ["$", "mailroom", "dispatcher", "deliver-all"]:
            deliver(connection)
        case ["$", "mailroom", "executor", "execute-all"]:
            execute(connection)
        case ["$", "mailroom", "grant", _, _, *_]:
            pass  # tests/roles
        case _:
            raise AssertionError(f"the page shows a command that its test does not know: {line}")
    connection.commit()


@pytest.fixture
def in_own_roles(dsn: str) -> Iterator[Callable[[str], str]]:
    """Return what gives the page's roles names of this test's own: a server has one set of roles for all databases."""
    mine = {role: f"{conninfo_to_dict(dsn)['dbname']}_{role}"[-63:] for role in ROLES}

    def rename(text: str) -> str:
        for role, own in mine.items():
            text = re.sub(rf"\b{role}\b", own, text)
        return text

    yield rename
    with psycopg.connect(dsn, autocommit=True) as connection:
        for own in mine.values():
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [own]).fetchone() is not None:
                connection.execute(f"DROP OWNED BY {own}")
                connection.execute(f"DROP ROLE {own}")


def run_page(connect: Connect, execute: Callable[[Block], None]) -> None:
    connection = connect()
    for block in blocks():
        if block.language == "sql":
            execute(block)
        else:
            for line in block.text.splitlines():
                do_as_command(connection, line)


def test_every_sql_block_of_the_page_runs_in_order(connect: Connect, in_own_roles: Callable[[str], str]) -> None:
    session = connect(autocommit=True)

    def execute(block: Block) -> None:
        session.execute(in_own_roles(block.text).encode())
        assert session.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

    run_page(connect, execute)

    assert session.execute("SELECT number, state FROM orders").fetchall() == [("order-42", "shipped")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not on this machine")
def test_psql_prints_what_the_page_says(dsn: str, connect: Connect, in_own_roles: Callable[[str], str]) -> None:
    def execute(block: Block) -> None:
        command = ["psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--pset=pager=off", dsn]
        done = subprocess.run(command, input=in_own_roles(block.text), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), block.text
        if block.output is not None:
            assert without_trailing_blanks(done.stdout) == without_trailing_blanks(block.output), block.text

    run_page(connect, execute)


def without_trailing_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


# --- its reap -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipping(connect: Connect) -> psycopg.Connection[Any]:
    """A connection to a node whose inbox `shipping` holds the messages 1, 2 and 3 of order-42."""
    connection = connect()
    create_inbox(connection, "shipping")
    Outbox().send_many(connection, [Outgoing("shipping", number, "order-42") for number in (1, 2, 3)])
    deliver(connection)
    connection.commit()
    return connection


def reap(connection: psycopg.Connection[Any], limit: int = 100) -> list[object]:
    statement = reap_statement().replace("'order-42', 100", f"'order-42', {limit}")
    assert limit == 100 or statement != reap_statement()
    return [row[-1] for row in connection.execute(statement.encode()).fetchall()]


def reap_beside(pool: ThreadPoolExecutor, connection: psycopg.Connection[Any]) -> Future[list[object]]:
    return pool.submit(reap, connection)


def test_pages_reap_takes_the_oldest_in_order_up_to_its_limit(shipping: psycopg.Connection[Any]) -> None:
    assert [reap(shipping, limit=2), reap(shipping), reap(shipping)] == [[1, 2], [3], []]


def test_pages_reap_is_in_order_however_the_rows_lie_and_are_joined(shipping: psycopg.Connection[Any]) -> None:
    shipping.execute("CREATE TEMPORARY TABLE taken AS SELECT * FROM mailroom.inbox_shipping")
    shipping.execute("TRUNCATE mailroom.inbox_shipping")
    shipping.execute("INSERT INTO mailroom.inbox_shipping SELECT * FROM taken ORDER BY clock DESC")
    shipping.execute(
        "SET LOCAL enable_nestloop = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_indexscan = off"
    )
    assert reap(shipping) == [1, 2, 3]


def test_pages_reap_waits_for_the_head_and_then_sees_nothing(
    shipping: psycopg.Connection[Any], connect: Connect
) -> None:
    second, observer = connect(), connect(autocommit=True)
    assert reap(shipping, limit=1) == [1]
    with ThreadPoolExecutor(1) as pool:
        waiting = reap_beside(pool, second)
        assert wait_until_blocked(observer, second.info.backend_pid) == [shipping.info.backend_pid]
        shipping.commit()
        assert waiting.result() == []
    look_again = statements("SELECT EXISTS")
    assert second.execute(look_again.encode()).fetchone() == (True,)
    assert reap(second) == [2, 3]
    assert second.execute(look_again.encode()).fetchone() == (False,)


def test_pages_reap_gets_everything_when_the_one_before_it_rolls_back(
    shipping: psycopg.Connection[Any], connect: Connect
) -> None:
    second, observer = connect(), connect(autocommit=True)
    assert reap(shipping, limit=1) == [1]
    with ThreadPoolExecutor(1) as pool:
        waiting = reap_beside(pool, second)
        wait_until_blocked(observer, second.info.backend_pid)
        shipping.rollback()
        assert waiting.result() == [1, 2, 3]


def test_pages_reap_leaves_a_key_that_waits_and_heals_one_that_waited(shipping: psycopg.Connection[Any]) -> None:
    [head] = Inbox("shipping").peek(shipping, key="order-42", limit=1)
    run(shipping, recording("mailroom", "shipping", failed(head, ValueError("no stock"))))
    assert reap(shipping) == []
    shipping.execute("UPDATE mailroom.key_state SET retry_at = now()")
    assert reap(shipping) == [1, 2, 3]
    assert shipping.execute("SELECT * FROM mailroom.key_state").fetchall() == []


# --- its roles ------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_role(
    shipping: psycopg.Connection[Any], connect: Connect, in_own_roles: Callable[[str], str]
) -> Callable[[str], psycopg.Connection[Any]]:
    """Return what opens a session of a writer or a reaper, with what `mailroom grant` gives and nothing else."""
    for role, granted in ROLES.items():
        shipping.execute(in_own_roles(f"CREATE ROLE {role}; {named(granted, role)}").encode())
    shipping.commit()

    def open_session(role: str) -> psycopg.Connection[Any]:
        session = connect()
        session.execute(in_own_roles(f"SET SESSION AUTHORIZATION {role}").encode())
        session.commit()
        return session

    return open_session


def test_writer_role_sends_by_sql_and_by_python(as_role: Callable[[str], psycopg.Connection[Any]]) -> None:
    writer = as_role("shop_writer")
    writer.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', '1') RETURNING message_id")
    Outbox().send(writer, "shipping", 2)
    assert Outbox().send_many(writer, [Outgoing("shipping", 3)]) == 1


def test_writer_role_writes_executables_by_sql_and_by_python(
    as_role: Callable[[str], psycopg.Connection[Any]], shipping: psycopg.Connection[Any]
) -> None:
    writer, store = as_role("shop_writer"), Store()
    writer.execute("INSERT INTO mailroom.outbox_executable (operation, key, amount) VALUES ('increment', 'k', 1)")
    store.increment(writer, "k", 2)
    assert store.send_many(writer, [Executable("account", "a/b", target="accounting", amount=1, bytes=5)]) == 1
    writer.commit()
    assert execute(shipping) == 3
    shipping.commit()
    assert store.get(writer, "k") == 3
    assert store.books(writer, "a").bytes == 5


NOT_OF_A_WRITER = [
    "INSERT INTO mailroom.outbox (topic, value_json, xact) VALUES ('shipping', '1', '5')",
    "INSERT INTO mailroom.outbox (topic, value_json, position) OVERRIDING SYSTEM VALUE VALUES ('shipping', '1', 5)",
    "SELECT value FROM mailroom.outbox",
    "UPDATE mailroom.outbox SET topic = 'billing'",
    "DELETE FROM mailroom.outbox",
    "SELECT FROM mailroom.inbox_shipping",
    "SELECT setval('mailroom.outbox_position_seq', 1)",
    "SELECT setval('mailroom.clock', 1)",
    "INSERT INTO mailroom.outbox_executable (operation, key, xact) VALUES ('delete', 'k', '5')",
    "DELETE FROM mailroom.outbox_executable",
    "INSERT INTO mailroom.store (key, number) VALUES ('k', 1)",
    "INSERT INTO mailroom.executable_function VALUES ('f', 'pg_catalog', 'jsonb_strip_nulls')",
]


def test_writer_role_can_do_nothing_else(as_role: Callable[[str], psycopg.Connection[Any]]) -> None:
    writer, done = as_role("shop_writer"), []
    for statement in NOT_OF_A_WRITER:
        with suppress(errors.InsufficientPrivilege), writer.transaction(force_rollback=True):
            writer.execute(statement.encode())
            done.append(statement)
    assert done == []


def test_consumer_role_reaps_by_the_page(as_role: Callable[[str], psycopg.Connection[Any]]) -> None:
    assert reap(as_role("shop_shipping")) == [1, 2, 3]


def test_consumer_role_reaps_and_records_failures_by_python(as_role: Callable[[str], psycopg.Connection[Any]]) -> None:
    consumer, inbox = as_role("shop_shipping"), Inbox("shipping")
    schema.check(consumer)
    run(consumer, finding("mailroom", "shipping"))
    [first] = inbox.reap(consumer, "order-42", limit=1)
    [second] = inbox.reap_any(consumer, per_key=1)
    [third] = inbox.peek(consumer)
    assert [first.value, second.value, third.value] == [1, 2, 3]
    assert run(consumer, recording("mailroom", "shipping", failed(third, ValueError("no stock")))).attempt == 1
    assert run(consumer, recording("mailroom", "shipping", failed(third, ValueError("no stock")))).attempt == 2


NOT_OF_A_CONSUMER: list[tuple[str, type[Exception]]] = [
    ("UPDATE mailroom.inbox_shipping SET clock = 0", errors.InsufficientPrivilege),
    ("UPDATE mailroom.inbox_shipping SET inbox = 'billing'", errors.CheckViolation),
    ("INSERT INTO mailroom.inbox_shipping SELECT * FROM mailroom.inbox_shipping", errors.InsufficientPrivilege),
    ("SELECT FROM mailroom.inbox", errors.InsufficientPrivilege),
    ("SELECT FROM mailroom.outbox", errors.InsufficientPrivilege),
    ("UPDATE mailroom.inbox_registry SET floor = 1000", errors.InsufficientPrivilege),
]


def test_consumer_role_can_do_nothing_else(as_role: Callable[[str], psycopg.Connection[Any]]) -> None:
    consumer = as_role("shop_shipping")
    for statement, error in NOT_OF_A_CONSUMER:
        with pytest.raises(error), consumer.transaction():
            consumer.execute(statement.encode())


# --- its two-phase commit -------------------------------------------------------------------------------------------


def test_two_phase_commit_sends_with_the_bell_off(connect: Connect) -> None:
    session = connect(autocommit=True)
    session.execute(statements("BEGIN;\nSET LOCAL").encode())
    session.execute(statements("COMMIT PREPARED").encode())
    assert session.execute("SELECT topic FROM mailroom.outbox").fetchall() == [("order.paid",)]


def test_two_phase_commit_is_refused_with_the_bell_on(connect: Connect) -> None:
    session = connect(autocommit=True)
    block = statements("BEGIN;\nSET LOCAL").replace("notify = off", "notify = on")
    with pytest.raises(errors.FeatureNotSupported, match="NOTIFY"):
        session.execute(block.encode())


# --- cbor_to_jsonb --------------------------------------------------------------------------------------------------


def shown(connection: psycopg.Connection[Any], raw: bytes) -> Any:
    row = connection.execute("SELECT mailroom.cbor_to_jsonb(%s)::text", [raw]).fetchone()
    assert row is not None
    return json.loads(row[0], parse_float=Decimal)


def is_shown_as(value: object, json_value: Any) -> bool:
    match value:
        case None | bool():
            return json_value is value
        case float():
            return (
                json_value == str(value).replace("inf", "Infinity") if math.isinf(value) else float(json_value) == value
            )
        case int() | Decimal():
            return not isinstance(json_value, str) and Decimal(json_value) == value
        case datetime():
            return datetime.fromisoformat(json_value) == value
        case str() | bytes() | date() | UUID():
            return bool(json_value == as_text(value))
        case list():
            return len(json_value) == len(value) and all(map(is_shown_as, value, json_value))
        case dict():
            # Two keys that look the same become one, and the last of them counts.
            items = {as_text(key): item for key, item in value.items()}
            return json_value.keys() == items.keys() and all(is_shown_as(items[key], json_value[key]) for key in items)
    raise AssertionError(type(value))


def as_text(value: object) -> str:
    match value:
        case str():
            return str.__str__(value).replace("\0", "␀")
        case bytes():
            return b64encode(value).decode()
        case date():
            return value.isoformat()
    return str(value)


@pytest.mark.slow
@given(value=supported)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_codec_sends_is_shown_as_json(reader: psycopg.Connection[Any], value: object) -> None:
    assert is_shown_as(value, shown(reader, encode(value)))


# The statement changes nothing, so the examples may share the test's one connection.
@pytest.fixture
def reader(connect: Connect) -> psycopg.Connection[Any]:
    return connect(autocommit=True)


def test_value_nested_to_the_codecs_limit_is_shown_and_no_deeper(reader: psycopg.Connection[Any]) -> None:
    for core in (b"\x00", b"\x80", b"\xa0"):
        assert "not shown" not in str(shown(reader, b"\x81" * 32 + core))
    assert shown(reader, b"\x81" * 33 + b"\x00") == "(not shown: it is nested more than 32 deep; byte 33 of 34)"


SHOWN: list[tuple[str, object]] = [
    ("f93c01", Decimal("1.0009765625")),  # half
    ("f90001", Decimal("0.00000005960464477539063")),  # half, subnormal
    ("f9fc00", "-Infinity"),
    ("f97e00", "NaN"),
    ("fa40490fdb", Decimal("3.1415927410125732")),  # single
    ("fa00000001", Decimal("1.401298464324817e-45")),
    ("fb0000000000000001", Decimal("5e-324")),
    ("fb7fefffffffffffff", int(Decimal("1.7976931348623157e308"))),
    ("1b0000000000000007", 7),  # wider than needed
    ("c11a6a6f0168", "2026-08-02T08:35:52Z"),
    ("c1fb41da9bc05a07e6b4", "2026-08-02T08:35:52.123456Z"),
    ("a3016161f56162f6fb3ff8000000000000", {"1": "a", "true": "b", "null": Decimal("1.5")}),
]


def test_what_other_encoders_send_is_shown_too(reader: psycopg.Connection[Any]) -> None:
    found = [(raw, shown(reader, bytes.fromhex(raw))) for raw, _ in SHOWN]
    assert found == SHOWN


NOT_SHOWN = [
    ("", "it ends too early; byte 0 of 0"),
    ("9bffffffffffffffff", "it ends too early; byte 9 of 9"),
    ("5f4161ff", "a length is indefinite or reserved; byte 1 of 4"),
    ("1c", "a length is indefinite or reserved; byte 1 of 1"),
    ("f7", "it holds undefined or a simple value other than true, false and null; byte 1 of 1"),
    ("f820", "it holds undefined or a simple value other than true, false and null; byte 2 of 2"),
    ("c2410a", "tag 2 does not belong here; byte 1 of 3"),
    ("c0c06161", "tag 0 does not belong here; byte 2 of 4"),
    ("c001", "tag 0 holds what it cannot; byte 2 of 2"),
    ("c16161", "tag 1 holds what it cannot; byte 2 of 3"),
    ("c1f4", "tag 1 holds what it cannot; byte 2 of 2"),
    ("c11b0000010000000000", "a time lies outside the years 1 to 9999; byte 10 of 10"),
    ("c1f97e00", "a time lies outside the years 1 to 9999; byte 4 of 4"),
    ("c48100", "tag 4 holds what it cannot; byte 2 of 3"),
    ("c4821903e901", "tag 4 holds what it cannot; byte 5 of 6"),
    ("c482393fff01", "tag 4 holds what it cannot; byte 5 of 6"),
    ("c48200c201", "tag 2 holds what it cannot; byte 5 of 5"),
    ("c482c2410101", "tag 2 does not belong here; byte 3 of 6"),
    ("c48200c4820001", "tag 4 does not belong here; byte 4 of 7"),
    ("c48200c25901a1" + "00" * 417, "a decimal has more than 1000 digits; byte 424 of 424"),
    ("c48200c35901a0" + "ff" * 416, "a decimal has more than 1000 digits; byte 423 of 423"),
    ("c4820061", "tag 4 holds what it cannot; byte 4 of 4"),
    ("d82541ff", "tag 37 holds what it cannot; byte 3 of 4"),
    ("d903ec41ff", "tag 1004 holds what it cannot; byte 4 of 5"),
    ("a18000", "a key of a map is a list or a map; byte 2 of 3"),
]


def test_what_cannot_be_shown_says_why_and_where(reader: psycopg.Connection[Any]) -> None:
    found = [(raw, shown(reader, bytes.fromhex(raw))) for raw, _ in NOT_SHOWN]
    assert found == [(raw, f"(not shown: {fault})") for raw, fault in NOT_SHOWN]


def test_shown_value_does_not_depend_on_the_session(reader: psycopg.Connection[Any]) -> None:
    moment = cbor2.CBORTag(1, 1785659752)
    raw = cbor2.dumps([0.1 + 0.2, moment, "ü"])
    before = shown(reader, raw)
    reader.execute("SET extra_float_digits = 0; SET timezone = 'Asia/Tokyo'; SET datestyle = 'German'")
    reader.execute("SET bytea_output = 'escape'; SET search_path = mailroom")
    assert shown(reader, raw) == before


@given(raw=st.binary(max_size=40))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_fail_the_query_that_shows_them(reader: psycopg.Connection[Any], raw: bytes) -> None:
    result = shown(reader, raw)
    with suppress(DecodeError):
        decode(raw)
        assert not str(result).startswith("(not shown")


@given(value=supported, data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_end_is_not_shown(reader: psycopg.Connection[Any], value: object, data: st.DataObject) -> None:
    raw = encode(value)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    size = len(cut)
    assert re.fullmatch(rf"\(not shown: it ends too early; byte \d+ of {size}\)", shown(reader, cut))
    assert (
        shown(reader, raw + b"\0") == f"(not shown: more bytes follow after its end; byte {len(raw)} of {len(raw) + 1})"
    )


LEADS = [*range(0x7E, 0x82), *range(0xBE, 0xC4), *range(0xDE, 0xE3), *range(0xEB, 0x100), 0x00, 0x5C]
NEXTS = [0x00, 0x5C, 0x7F, 0x80, 0x87, 0x88, 0x8F, 0x90, 0x97, 0x98, 0x9F, 0xA0, 0xA7, 0xBF, 0xC0, 0xFF]


def test_text_is_shown_if_and_only_if_it_is_utf_8(reader: psycopg.Connection[Any]) -> None:
    texts = [bytes([lead, second, *rest]) for lead in LEADS for second in NEXTS for rest in ((), (0x80,), (0xBF, 0x80))]
    query = """
        SELECT text, mailroom.cbor_to_jsonb(set_byte('\\x60', 0, 96 + length(text)) || text) #>> '{}'
        FROM unnest(%s::bytea[]) AS text
    """
    for raw, result in reader.execute(query, [texts]).fetchall():
        try:
            expected = bytes(raw).decode().replace("\0", "␀")
        except UnicodeDecodeError:
            assert result.startswith("(not shown: a text is not UTF-8"), raw
        else:
            assert result == expected, raw


def test_stored_values_are_shown_in_a_parallel_query_good_and_bad(connect: Connect) -> None:
    session = connect()
    session.execute("CREATE TABLE kept AS SELECT n, '\\x6161'::bytea AS value FROM generate_series(1, 2000) AS n")
    session.execute("UPDATE kept SET value = '\\x61ff' WHERE n % 2 = 0")
    session.execute("ALTER TABLE kept SET (parallel_workers = 2)")
    session.execute("SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0")
    session.execute("ANALYZE kept")
    query = "SELECT count(*) FROM kept WHERE mailroom.cbor_to_jsonb(value) = '\"a\"'"
    plan = str(session.execute(f"EXPLAIN {query}").fetchall())
    assert "Parallel Seq Scan" in plan
    assert session.execute(query).fetchone() == (1000,)


def test_large_values_are_shown_in_time_that_grows_with_their_size(reader: psycopg.Connection[Any]) -> None:
    # Stored beside the row: read in place, each byte would cost a look at all of it.
    reader.execute("CREATE TABLE kept (value bytea)")
    reader.execute("INSERT INTO kept VALUES (%s)", [encode(list(range(200_000)))])
    reader.execute("SET statement_timeout = '60s'")
    query = "SELECT jsonb_array_length(mailroom.cbor_to_jsonb(value)) FROM kept"
    assert reader.execute(query).fetchone() == (200_000,)
