"""Calls in the caller's transaction, whatever users have set, and operations in transactions of our own.

What holds on every kind of connection is in `tests/session/test_conformance.py`.
"""

import asyncio
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.adapt import Loader
from psycopg.pq import Format, TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.string import StrDumper
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from inbox import AsyncInbox, Inbox
from mailroom import create_inbox
from mailroom.errors import InvalidMessage, NotInTransaction, UnknownInbox, UnsupportedConnection
from mailroom.session import settings
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, Together
from mailroom.sql.runner import run, run_async, run_in_transaction
from mailroom.testing import deliver, deliver_async, execute, sent, sent_async
from outbox import AsyncOutbox, Executable, Outbox, Outgoing, Store
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async, url
from tests.support.proxy import proxied
from tests.support.waiting import eventually_async

pytestmark = pytest.mark.both_versions

OUTBOX, ASYNC_OUTBOX = Outbox(), AsyncOutbox()
LATER = datetime(2026, 7, 1, 12, 30, 15, 123456, UTC)
# What a driver that writes arrays as text gets wrong if it can.
VALUES: list[Any] = [None, "", 'a"b\\c{},NULL', "€\U0001f600", b"\x00\\'\xff", [1, {"a": None}], Decimal("1.50"), LATER]
KEYS = ["NULL", 'a"b\\c', "{x,y}", " ", "ü€\U0001f600", "%s %% :name", "'", "\n"]
MANY = [
    Outgoing("shipping", value, key=key, headers={"h": key, key: "v"} if nth % 2 else None,
             event_type="C" if nth % 3 else None, expires_at=LATER if nth == 4 else None,
             after_clock=nth if nth == 5 else None)
    for nth, (key, value) in enumerate(zip(KEYS, VALUES, strict=True))
]  # fmt: skip


def rows(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT topic, key, kind, message_type, event_type, value, headers, deliver_at, expires_at, after_clock "
        "FROM mailroom.outbox ORDER BY position"
    ).fetchall()


@pytest.fixture
def expected(connect: Connect) -> list[tuple[Any, ...]]:
    """What `MANY`, sent one by one on a plain connection and rolled back, looks like in the table."""
    connection = connect()
    for message in MANY:
        fields = {
            name: getattr(message, name) for name in ("key", "headers", "event_type", "expires_at", "after_clock")
        }
        OUTBOX.send(connection, message.topic, message.value, **fields)
    found = rows(connection)
    connection.close()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_message_goes_all_the_way_on_every_connection(dsn: str, connect: Connect, kind: str) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
        create_inbox(setup, "answers")
    with opened(dsn, kind) as connection:
        request = OUTBOX.command(connection, "shipping", "ship", key="k", reply_to="answers", headers={"user": "ü€"})
        OUTBOX.publish(connection, "heard.by.none", 1)
        OUTBOX.send_many(connection, MANY)
        assert [message.value for message in sent(connection, "shipping")] == ["ship", *VALUES]
        assert deliver(connection) == len(MANY) + 2
        inbox = Inbox("shipping")
        assert inbox.backlog(connection) == len(MANY)  # one had expired, as of 2026-07-01
        [peeked] = inbox.peek(connection, key="k")
        [command] = inbox.reap(connection, "k")
        assert peeked.id == command.id == request
        assert (command.value, command.headers["user"], command.clock) == ("ship", "ü€", peeked.clock)
        others = inbox.reap_any(connection)
        kept = [message for message in MANY if message.expires_at is None]
        assert [(message.key, message.value) for message in others] == [(m.key, m.value) for m in kept]
        assert [dict(message.headers) for message in others] == [dict(m.headers or {}) for m in kept]
        assert all(message.delivered_at.tzinfo is not None for message in others)
        OUTBOX.reply(connection, command, "done")
        deliver(connection)
        assert [message.value for message in Inbox("answers").reap_any(connection)] == ["done"]
        connection.rollback()
    assert rows(connect()) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_message_goes_all_the_way_on_every_async_connection(
    dsn: str, connect: Connect, kind: str, expected: list[tuple[Any, ...]]
) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
        create_inbox(setup, "answers")
    async with opened_async(dsn, kind) as connection:
        assert await ASYNC_OUTBOX.send_many(connection, MANY) == len(MANY)
        await connection.commit()
        assert rows(connect()) == expected
        request = await ASYNC_OUTBOX.command(connection, "shipping", "ship", key="k", reply_to="answers")
        await ASYNC_OUTBOX.publish(connection, "heard.by.none", 1)
        await ASYNC_OUTBOX.send(connection, "shipping", "plain", key="k")
        assert len(await sent_async(connection, "shipping")) == len(MANY) + 2
        await deliver_async(connection)
        inbox = AsyncInbox("shipping")
        assert await inbox.backlog(connection, key="k") == 2
        assert [message.value for message in await inbox.peek(connection, key="k")] == ["ship", "plain"]
        command, plain = await inbox.reap(connection, "k")
        assert (command.id, plain.value) == (request, "plain")
        kept = [message for message in MANY if message.expires_at is None]
        assert [message.value for message in await inbox.reap_any(connection)] == [m.value for m in kept]
        await ASYNC_OUTBOX.reply(connection, command, "done")
        await connection.rollback()
    assert rows(connect()) == expected


def test_rolled_back_savepoint_takes_its_messages_along(connect: Connect) -> None:
    with connect() as connection:
        OUTBOX.send(connection, "t", 1)
        with connection.transaction(force_rollback=True):
            OUTBOX.send_many(connection, [Outgoing("t", 2)])
        OUTBOX.send_many(connection, [Outgoing("t", 3)])
        connection.commit()
    assert [message.value for message in sent(connect(), "t")] == [1, 3]


def test_autocommit_connection_outside_a_transaction_is_refused(connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    with connect(autocommit=True) as connection:
        calls: list[Callable[[], object]] = [
            lambda: OUTBOX.send(connection, "t", 1),
            lambda: OUTBOX.send_many(connection, [Outgoing("t", 1)]),
            lambda: OUTBOX.send_many(connection, []),
            lambda: Inbox("shipping").reap(connection, "k"),
            lambda: Inbox("shipping").reap_any(connection),
            lambda: create_inbox(connection, "other"),
        ]
        for call in calls:
            with pytest.raises(NotInTransaction, match="autocommit"):
                call()
        assert Inbox("shipping").backlog(connection) == 0
    assert rows(connect()) == []


def test_autocommit_connection_inside_a_transaction_is_taken(connect: Connect) -> None:
    connection = connect(autocommit=True)
    with connection.transaction():
        OUTBOX.send(connection, "t", 1)
        OUTBOX.send_many(connection, [Outgoing("t", 2)])
    assert len(rows(connection)) == 2


class Nonsense(Loader):
    def load(self, data: Any) -> str:
        return "nonsense"


class NonsenseBinary(Nonsense):
    format = Format.BINARY


class Shout(StrDumper):
    def dump(self, obj: str) -> bytes:
        return obj.upper().encode()


def spoiled(connection: psycopg.Connection[Any]) -> None:
    for name in ("text", "int8", "uuid", "bytea", "timestamptz", "jsonb", "bool"):
        connection.adapters.register_loader(name, Nonsense)
        connection.adapters.register_loader(name, NonsenseBinary)
    connection.adapters.register_dumper(str, Shout)


OWN: dict[str, dict[str, Any]] = {
    "dict_row": {"row_factory": dict_row},
    "ClientCursor": {"cursor_factory": psycopg.ClientCursor},
    "RawCursor": {"cursor_factory": psycopg.RawCursor},
    "adapters": {},
    "no prepared statements": {"prepare_threshold": None},
    "LATIN1": {"client_encoding": "LATIN1"},
}


def test_what_the_user_has_set_does_not_leak_in(connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    for own, options in OWN.items():
        with connect(**options) as connection:
            if own == "adapters":
                spoiled(connection)
            for _ in range(2):
                OUTBOX.send(connection, "shipping", {"ü": b"\xff"}, key="schlüssel", headers={"größe": "ü"})
                OUTBOX.send_many(connection, [Outgoing("shipping", "€", key="schlüssel", headers={"größe": "ü"})])
                assert deliver(connection) == 2
                messages = Inbox("shipping").reap(connection, "schlüssel")
                assert [message.value for message in messages] == [{"ü": b"\xff"}, "€"], own
                assert {message.headers["größe"] for message in messages} == {"ü"}, own
                assert {message.key for message in messages} == {"schlüssel"}, own
                assert all(isinstance(message.clock, int) for message in messages), own


def test_global_adapters_of_the_user_do_not_leak_in(dsn: str, connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    connection = connect()
    before = psycopg.adapters.get_loader(psycopg.adapters.types["text"].oid, Format.BINARY)
    assert before is not None
    psycopg.adapters.register_loader("text", NonsenseBinary)
    try:
        OUTBOX.send(connection, "shipping", 1, key="k")
        deliver(connection)
        assert [message.key for message in Inbox("shipping").reap_any(connection)] == ["k"]
    finally:
        psycopg.adapters.register_loader("text", before)


def test_calls_inside_a_pipeline_of_the_user_work(connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    connection = connect()
    with connection.pipeline():
        OUTBOX.send(connection, "shipping", 1, key="k")
        deliver(connection)
        inbox = Inbox("shipping")
        assert inbox.backlog(connection) == 1
        assert [message.value for message in inbox.reap(connection, "k")] == [1]
        assert inbox.reap_any(connection) == []
        assert OUTBOX.send_many(connection, [Outgoing("shipping", nth, key="k") for nth in range(3)]) == 3
        assert Store().send_many(connection, [Executable("increment", "b", amount=2)] * 2) == 2
        assert len({OUTBOX.send(connection, "shipping", 3, key="k", once="a request") for _ in range(2)}) == 1
        deliver(connection)
        execute(connection)
        assert [message.value for message in inbox.reap(connection, "k")] == [0, 1, 2, 3]
        assert Store().get(connection, "b") == 4


async def test_async_calls_inside_a_pipeline_of_the_user_work(dsn: str, connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    async with await psycopg.AsyncConnection.connect(dsn) as connection, connection.pipeline():
        sent = [Outgoing("shipping", nth, key="k", headers={"n": str(nth)} if nth else None) for nth in range(3)]
        assert await AsyncOutbox().send_many(connection, sent) == 3
        await deliver_async(connection)
        reaped = await AsyncInbox("shipping").reap(connection, "k")
        assert [(message.value, message.headers) for message in reaped] == [(0, {}), (1, {"n": "1"}), (2, {"n": "2"})]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_unknown_inbox_leaves_the_transaction_usable(dsn: str, connect: Connect, kind: str) -> None:
    with opened(dsn, kind) as connection:
        OUTBOX.send(connection, "t", 1)
        for schema in ("mailroom", "nowhere"):
            calls: list[Callable[[Inbox], object]] = [
                lambda inbox: inbox.reap(connection, "k"),
                lambda inbox: inbox.reap_any(connection),
                lambda inbox: inbox.peek(connection),
                lambda inbox: inbox.backlog(connection),
            ]
            for call in calls:
                with pytest.raises(UnknownInbox, match="mailroom inbox create shipping"):
                    call(Inbox("shipping", schema=schema))
        connection.commit()
    assert len(rows(connect())) == 1


def test_refused_message_leaves_a_session_usable(dsn: str, connect: Connect) -> None:
    with opened(dsn, "Session psycopg") as session:
        with pytest.raises(InvalidMessage):
            OUTBOX.send_many(session, [Outgoing("t", 1), Outgoing("bad topic", 1)])
        OUTBOX.send(session, "t", 1)
        session.commit()
    assert len(rows(connect())) == 1


def test_scoped_session_and_a_begin_block_are_taken(dsn: str, connect: Connect) -> None:
    engine = sa.create_engine(url(dsn, "psycopg"), poolclass=sa.NullPool)
    scoped = scoped_session(sessionmaker(engine))
    OUTBOX.send_many(scoped, [Outgoing("t", 1)])
    scoped.commit()
    scoped.remove()
    with engine.begin() as connection:
        OUTBOX.send_many(connection, [Outgoing("t", 2)])
    assert len(rows(connect())) == 2


async def test_async_scoped_session_is_taken(dsn: str, connect: Connect) -> None:
    engine = create_async_engine(url(dsn, "psycopg"), poolclass=sa.NullPool)
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await AsyncOutbox().send(scoped, "t", 1)
    await scoped.commit()
    await scoped.remove()
    assert len(rows(connect())) == 1


def test_copy_outside_a_closed_begin_block_is_refused_as_any_statement_is(dsn: str, connect: Connect) -> None:
    engine = sa.create_engine(url(dsn, "psycopg"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.rollback()
        with pytest.raises(sa.exc.InvalidRequestError):
            OUTBOX.send_many(connection, [Outgoing("t", 1)])
    assert rows(connect()) == []


def test_errors_of_the_driver_pass_through(dsn: str, connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    connection.execute("DROP TABLE mailroom.outbox CASCADE")
    with pytest.raises(psycopg.errors.UndefinedTable):
        OUTBOX.send(connection, "t", 1)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        OUTBOX.send_many(connection, [Outgoing("t", 1)])


def test_session_ended_right_behind_a_copy_is_a_lost_connection(dsn: str) -> None:
    """psycopg by itself says "too many values to unpack", for which nobody tries again."""
    with proxied(dsn) as (network, through), closing(psycopg.connect(through)) as connection:
        network.end_behind(b"COPY")
        with pytest.raises(psycopg.OperationalError, match="end of a COPY"):
            OUTBOX.send_many(connection, MANY)


async def test_async_session_ended_right_behind_a_copy_is_a_lost_connection(dsn: str) -> None:
    with proxied(dsn) as (network, through):
        network.end_behind(b"COPY")
        connection = await psycopg.AsyncConnection.connect(through)
        with pytest.raises(psycopg.OperationalError, match="end of a COPY"):
            await ASYNC_OUTBOX.send_many(connection, MANY)
        await connection.close()


def test_what_is_no_connection_to_postgresql_is_refused() -> None:
    things: list[Any] = [None, "postgresql://", object(), sa.create_engine("sqlite://").connect()]
    for thing in things:
        with pytest.raises(UnsupportedConnection, match=r"give a psycopg\.Connection"):
            OUTBOX.send(thing, "t", 1)
        with pytest.raises(UnsupportedConnection, match="AsyncConnection"):
            asyncio.run(ASYNC_OUTBOX.send(thing, "t", 1))


def test_async_connection_is_refused_by_the_sync_outbox(dsn: str) -> None:
    async def check() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            with pytest.raises(UnsupportedConnection, match=r"is for the Async form of this, such as AsyncOutbox\."):
                OUTBOX.send(cast(Any, connection), "t", 1)
        with (
            psycopg.connect(dsn) as plain,
            pytest.raises(UnsupportedConnection, match=r"is for the plain form of this, such as Outbox\."),
        ):
            await ASYNC_OUTBOX.send(cast(Any, plain), "t", 1)

    asyncio.run(check())


# -- Transactions of our own ------------------------------------------------------------------------------------------

XACT = Sql("SELECT pg_current_xact_id()::text", columns=("text",))
DIVIDE = Sql("SELECT (1 / %(by)s::bigint)::text, pg_current_xact_id()::text", columns=("text", "text"))


def dividing(*by: int) -> Operation[set[str]]:
    """Return the transactions in which these statements ran."""
    found = set()
    for each in by:
        [(_, xact)] = yield DIVIDE.at()(by=each)
        found.add(xact)
    return found


def beginning(*by: int) -> Operation[set[str]]:
    [(xact,)] = yield XACT.at()()
    return {xact} | (yield from dividing(*by))


@pytest.mark.parametrize("operation", [dividing, beginning])
async def test_operation_runs_in_a_transaction_of_its_own(
    dsn: str, operation: Callable[..., Operation[set[str]]]
) -> None:
    async with await settings.connect_async(dsn, "test") as connection:
        xacts = [await run_in_transaction(connection, operation(1, 1)) for _ in range(2)]
        assert [len(each) for each in xacts] == [1, 1]
        assert xacts[0] != xacts[1]
        with pytest.raises(psycopg.errors.DivisionByZero):
            await run_in_transaction(connection, operation(1, 0))
        assert connection.info.transaction_status == TransactionStatus.IDLE
        committed = "SELECT pg_xact_status(%s::xid8)"
        [xact] = xacts[0]
        assert await (await connection.execute(committed, [xact])).fetchone() == ("committed",)


async def test_operation_that_is_cancelled_is_rolled_back(dsn: str, connect: Connect) -> None:
    observer = connect(autocommit=True)
    # The server passes over a cancel request that comes before the statement has begun there.
    sleeps = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"

    def waiting() -> Operation[None]:
        yield XACT.at()()
        yield Sql("SELECT pg_sleep(60)").at()()

    async with await settings.connect_async(dsn, "test") as connection:
        task = asyncio.create_task(run_in_transaction(connection, waiting()))
        await eventually_async(lambda: observer.execute(sleeps, [connection.info.backend_pid]).fetchone() is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert connection.info.transaction_status == TransactionStatus.IDLE


def counted_trips(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Have each round trip of an async connection add to the list that is returned."""
    trips: list[None] = []
    wait = psycopg.AsyncConnection.wait

    async def counting(connection: psycopg.AsyncConnection, *arguments: Any, **options: Any) -> Any:
        trips.append(None)
        return await wait(connection, *arguments, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "wait", counting)
    return trips


async def test_begin_goes_with_the_first_statement(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = counted_trips(monkeypatch)
    async with await settings.connect_async(dsn, "test") as connection:
        await run_in_transaction(connection, beginning(1))
        trips.clear()
        await run_in_transaction(connection, beginning(1))
        assert len(trips) == 3  # with COMMIT


# Statements of one simple query have one time, which is that of the transaction if BEGIN is among them.
NOTING = Sql("SELECT set_config('mailroom.tests', (statement_timestamp() = transaction_timestamp())::text, true)")
NOTED = Sql("SELECT current_setting('mailroom.tests'), current_setting('transaction_isolation')", ("text", "text"))
FAILING = Sql("SELECT 1 / 0")


def noting() -> Operation[list[Any]]:
    yield IN_TRANSACTION
    yield NOTING.at()()
    rows: list[Any] = yield NOTED.at()()
    return rows


def failing() -> Operation[None]:
    yield FAILING.at()()


MODES = [(None, "true", "read committed"), (psycopg.IsolationLevel.SERIALIZABLE, "false", "serializable")]


@pytest.mark.parametrize(("given", "together", "level"), MODES)
def test_begin_of_a_users_transaction_goes_with_a_first_statement_without_values_or_rows(
    dsn: str, given: psycopg.IsolationLevel | None, together: str, level: str
) -> None:
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = given
        assert run(connection, noting()) == [(together, level)]
        assert connection.info.transaction_status == TransactionStatus.INTRANS


@pytest.mark.parametrize(("given", "together", "level"), MODES)
async def test_begin_of_a_users_async_transaction_goes_with_it_too(
    dsn: str, given: psycopg.IsolationLevel | None, together: str, level: str
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.set_isolation_level(given)
        assert await run_async(connection, noting()) == [(together, level)]
        assert connection.info.transaction_status == TransactionStatus.INTRANS


def test_begin_goes_with_it_in_another_encoding_of_the_client_too(dsn: str) -> None:
    said: list[str | None] = []
    with psycopg.connect(dsn, client_encoding="latin1") as connection:
        connection.add_notice_handler(lambda notice: said.append(notice.message_primary))
        assert run(connection, noting()) == [("true", "read committed")]
    assert said == []


def test_users_transaction_whose_first_statement_fails_is_theirs_to_roll_back(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            run(connection, failing())
        assert connection.info.transaction_status == TransactionStatus.INERROR
        connection.rollback()
        assert run(connection, noting()) == [("true", "read committed")]


DIVIDING = Sql(
    "SELECT pg_current_xact_id()::text, 12 / %(by)s::bigint, %(words)s::text[]", ("text", "bigint", "text[]")
)


def together(*by: int, words: tuple[str, ...] = ()) -> Together:
    """Return transactions' numbers, each divided by one of these numbers."""
    return Together(tuple(DIVIDING.at()(by=each, words=list(words)) for each in by))


def whole(*by: int, words: tuple[str, ...] = ()) -> Operation[list[Any]]:
    rows: list[Any] = yield together(*by, words=words)
    return rows


async def test_statements_together_are_a_transaction_of_their_own_in_one_round_trip(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = counted_trips(monkeypatch)
    words = ("it's", """a \\ "word\"""", "", "{NULL}")
    async with await settings.connect_async(dsn, "test") as connection:
        await run_in_transaction(connection, whole(1, 2))  # which prepares it
        trips.clear()
        [(xact, quotient, read)] = await run_in_transaction(connection, whole(1, 3, words=words))
        assert len(trips) == 1
        assert (quotient, read) == (4, list(words))
        status = "SELECT pg_xact_status(%s::xid8)"
        assert await (await connection.execute(status, [xact])).fetchone() == ("committed",)


async def test_statements_together_that_fail_are_rolled_back_and_run_again_afterwards(dsn: str) -> None:
    async with await settings.connect_async(dsn, "test") as connection:
        for _ in range(3):
            # Prepared by psycopg: so it deallocates all statements after a rollback, ours too.
            await run_in_transaction(connection, dividing(1))
            with pytest.raises(psycopg.errors.DivisionByZero):
                await run_in_transaction(connection, whole(1, 0))
            assert connection.info.transaction_status == TransactionStatus.IDLE
            assert [quotient for _, quotient, _ in await run_in_transaction(connection, whole(6))] == [2]


async def test_statements_together_are_prepared_anew_if_other_code_has_deallocated_them(dsn: str) -> None:
    async with await settings.connect_async(dsn, "test") as connection:
        for _ in range(2):
            assert [quotient for _, quotient, _ in await run_in_transaction(connection, whole(6))] == [2]
            await connection.execute("DEALLOCATE ALL")


async def test_statements_together_join_a_transaction_that_has_begun(dsn: str) -> None:
    def joining() -> Operation[set[str]]:
        [(xact,)] = yield XACT.at()()
        rows = yield together(1, 2)
        return {xact} | {each for each, *_ in rows}

    def begun_anew() -> Operation[set[str]]:
        [(whole, *_)] = yield together(1)
        [(xact,)] = yield XACT.at()()
        return {whole, xact}

    async with await settings.connect_async(dsn, "test") as connection:
        assert len(await run_in_transaction(connection, joining())) == 1
        assert len(await run_in_transaction(connection, begun_anew())) == 2
