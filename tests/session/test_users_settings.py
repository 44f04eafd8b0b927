"""Settings of users' own sessions and databases, under which everything works all the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from sqlalchemy.ext.asyncio import create_async_engine

from dispatcher import Registrations, execute_all
from inbox import AsyncInbox, AsyncWorker, Inbox, Message, Retry, Worker
from mailroom import schema
from mailroom.errors import ConfigurationError, SchemaError
from mailroom.session import settings
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from outbox import Outbox, Outgoing, Store
from tests.support.command import mailroom
from tests.support.databases import Connect, Databases
from tests.support.drivers import ASYNC, SYNC, opened, opened_async, url
from tests.support.node import Node
from tests.support.waiting import eventually, eventually_async
from tests.support.working import NEVER_S, deliver, working, working_async, write_ledger

pytestmark = pytest.mark.inbox("shipping", "shipping")

KEY = "鍵 é"
YEAR_1 = datetime(1, 1, 1, tzinfo=UTC)


def of_all_sessions(node: Node, setting: str, value: str) -> None:
    """Have every session that begins from now on begin with the setting."""
    node.connection.execute(f"ALTER DATABASE \"{node.connection.info.dbname}\" SET {setting} = '{value}'")


def encoding(connection: psycopg.Connection[Any]) -> str | None:
    return connection.info.parameter_status("client_encoding")


# -- Encodings --------------------------------------------------------------------------------------------------------


def test_message_is_sent_and_reaped_in_any_client_encoding(node: Node) -> None:
    for foreign in ("LATIN1", "EUC_JP", "SQL_ASCII"):
        of_all_sessions(node, "client_encoding", foreign)
        with psycopg.connect(node.dsn) as connection:
            Outbox().send(connection, "shipping", {"at": KEY}, key=KEY, headers={"at": KEY})
            assert encoding(connection) == foreign
            connection.commit()
            node.deliver_all()
            [message] = Inbox("shipping").reap(connection, KEY)
            assert (message.key, message.value, message.headers) == (KEY, {"at": KEY}, {"at": KEY})
            assert encoding(connection) == foreign
            connection.commit()
            assert encoding(connection) == foreign


def test_many_messages_are_sent_in_any_client_encoding(node: Node) -> None:
    of_all_sessions(node, "client_encoding", "LATIN1")
    with psycopg.connect(node.dsn) as connection:
        Outbox().send_many(connection, [Outgoing("shipping", KEY, key=KEY)] * 3)
        assert encoding(connection) == "LATIN1"
    assert node.waiting() == [KEY] * 3


def dividing_by_zero() -> Operation[None]:
    yield Sql("SELECT 1 / 0", columns=("integer",)).at()()


def test_encoding_comes_back_after_a_statement_that_failed(node: Node, connect: Connect) -> None:
    for autocommit in (False, True):
        connection = connect(autocommit=autocommit, client_encoding="LATIN1")
        with pytest.raises(psycopg.errors.DivisionByZero):
            run(connection, dividing_by_zero())
        connection.rollback()
        assert encoding(connection) == "LATIN1"
        assert Inbox("shipping").peek(connection) == []
        assert encoding(connection) == "LATIN1"


@pytest.mark.parametrize("kind", ["dsn", "pool", "engine"])
def test_worker_handles_keys_outside_of_its_client_s_encoding(node: Node, kind: str) -> None:
    """One after another too: those of a batch that failed."""
    deliver(node, "a", KEY, "b")
    of_all_sessions(node, "client_encoding", "LATIN1" if kind == "engine" else "SQL_ASCII")
    handled: list[str] = []

    def handle(message: Message, connection: Any) -> None:
        handled.append(message.key)
        if handled == ["a", KEY]:
            raise Retry(0)

    with source(node.dsn, kind) as given, working(Worker(given, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: len(handled) == 5)
    assert sorted(handled) == sorted(["a", KEY, "a", KEY, "b"])
    assert node.delivered() == []


@contextmanager
def source(dsn: str, kind: str) -> Iterator[Any]:
    if kind == "pool":
        with ConnectionPool(dsn, min_size=1, open=True) as pool:
            yield pool
    elif kind == "engine":
        engine = sa.create_engine(url(dsn, "psycopg"))
        yield engine
        engine.dispose()
    else:
        yield dsn


async def test_async_worker_handles_keys_outside_of_its_client_s_encoding(node: Node) -> None:
    deliver(node, KEY)
    of_all_sessions(node, "client_encoding", "LATIN1")
    engine = create_async_engine(url(node.dsn, "psycopg"))
    handled: list[str] = []

    async def handle(message: Message, connection: Any) -> None:
        handled.append(message.key)

    async with working_async(AsyncWorker(engine, "shipping", handle, poll_interval_s=NEVER_S)):
        await eventually_async(lambda: handled == [KEY])
    await engine.dispose()


@pytest.mark.sample(1)
@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
def test_worker_on_a_driver_that_keeps_its_encoding_says_what_to_do(node: Node, driver: str) -> None:
    deliver(node, KEY)
    engine = sa.create_engine(url(node.dsn, driver), client_encoding="latin1")
    with pytest.raises(ConfigurationError, match="client_encoding='utf8'"):
        Worker(engine, "shipping", write_ledger).run()
    engine.dispose()
    assert len(node.delivered()) == 1


def test_database_that_does_not_know_its_encoding_is_refused(databases: Databases, dsn: str) -> None:
    with psycopg.connect(databases.dsn, autocommit=True) as server:
        server.execute("CREATE DATABASE of_no_encoding TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'")
        connection = psycopg.connect(psycopg.conninfo.make_conninfo(dsn, dbname="of_no_encoding"))
        try:
            with pytest.raises(SchemaError, match="ENCODING 'UTF8'"):
                schema.migrate(connection)
        finally:
            connection.close()
            server.execute("DROP DATABASE of_no_encoding WITH (FORCE)")


# -- Times ------------------------------------------------------------------------------------------------------------


def sent_in_year_1(node: Node) -> None:
    message_id = node.send("shipping", key="a")
    node.connection.execute("UPDATE mailroom.outbox SET sent_at = '0001-01-01 UTC' WHERE message_id = %s", [message_id])
    node.deliver_all()
    of_all_sessions(node, "TimeZone", "America/New_York")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_message_of_the_year_1_is_reaped_west_of_utc(node: Node, kind: str) -> None:
    sent_in_year_1(node)
    with opened(node.dsn, kind) as connection:
        [message] = Inbox("shipping").reap_any(connection)
        assert message.sent_at == YEAR_1
        assert message.delivered_at.utcoffset() == message.sent_at.utcoffset() == YEAR_1.utcoffset()
        assert abs(message.delivered_at - datetime.now(UTC)).total_seconds() < 3_600
        connection.commit()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_message_of_the_year_1_is_reaped_west_of_utc_async(node: Node, kind: str) -> None:
    sent_in_year_1(node)
    async with opened_async(node.dsn, kind) as connection:
        [message] = await AsyncInbox("shipping").reap_any(connection)
        assert message.sent_at == YEAR_1
        await connection.commit()


def test_commands_show_a_message_of_the_year_1_west_of_utc(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_in_year_1(node)
    monkeypatch.setenv("TZ", "America/New_York")
    assert "0001-01-01" in mailroom("inbox", "peek", "shipping", dsn=node.dsn).stdout


# -- Everything -------------------------------------------------------------------------------------------------------

ODD_TEXT = "it's \\ a 'NULL' \\\\x"
ODD = {
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "quote_all_identifiers": "on",
    "client_encoding": "LATIN1",
    "TimeZone": "America/New_York",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "default_transaction_isolation": "serializable",
    "search_path": "pg_temp",
    "transform_null_equals": "on",
    "row_security": "off",
    "escape_string_warning": "off",
    "check_function_bodies": "off",
    "xmloption": "document",
    "lc_messages": "C",
    "lc_numeric": "C",
    "max_parallel_workers_per_gather": "8",
    "cursor_tuple_fraction": "0",
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", ODD)
def test_everything_works_under_an_odd_setting(empty_dsn: str, setting: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        of_all_sessions(Node(empty_dsn, connection), setting, ODD[setting])
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        before = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
        with connection.transaction():
            schema.migrate(connection)
            assert connection.execute("SELECT current_setting(%s)", [setting]).fetchone() == before
        node = Node(empty_dsn, connection)
        node.inbox("shipping", "shipping")
        connection.execute("CREATE TABLE public.things (name text PRIMARY KEY, value text, hits bigint)")
        with connection.transaction():
            Registrations().register_target(
                connection, "things", "public.things", key="name", value="value", number="hits", actor="ada"
            )
            things = Store(target="things")
            things.put(connection, "put", ODD_TEXT.encode())
            things.increment(connection, ODD_TEXT, 2)
            Store().put(connection, ODD_TEXT, ODD_TEXT.encode(), notify="shipping")
            Outbox().send(connection, "shipping", {"at": YEAR_1, "is": ODD_TEXT}, key=ODD_TEXT, deliver_at=YEAR_1)
        execute_all(empty_dsn)
        node.deliver_all()
        rows = connection.execute("SELECT name, value, hits::text FROM public.things ORDER BY hits").fetchall()
        assert rows == [("put", ODD_TEXT, "0"), (ODD_TEXT, None, "2")]
        assert Store().get(connection, ODD_TEXT) == ODD_TEXT.encode()
        handled: list[Message] = []

        def handle(message: Message, _: Any) -> None:
            handled.append(message)
            if len(handled) == 1:
                raise Retry(0)

        with working(Worker(empty_dsn, "shipping", handle, poll_interval_s=NEVER_S)):
            eventually(lambda: len(handled) >= 3)
        assert {message.key for message in handled} == {ODD_TEXT}
        assert {"at": YEAR_1, "is": ODD_TEXT} in [message.value for message in handled]
        assert node.dead() == []


async def test_sessions_of_ours_are_read_committed_whatever_the_default_is(node: Node) -> None:
    of_all_sessions(node, "default_transaction_isolation", "serializable")
    show = "SHOW transaction_isolation"
    with settings.connect(node.dsn, "test") as connection:
        assert connection.execute(show).fetchone() == ("read committed",)
    async with await settings.connect_async(node.dsn, "test") as asynchronous:
        assert await (await asynchronous.execute(show)).fetchone() == ("read committed",)
