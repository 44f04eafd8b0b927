"""Hardening: hostile keys, values and names, bounds in bytes, and a schema that obeys no search_path."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.rows import TupleRow

import dispatcher
import inbox
import mailroom as library
import outbox
from dispatcher import AsyncRegistrations, Dispatcher, Registrations, deliver_all
from inbox import (
    AsyncInbox,
    AsyncParked,
    AsyncRequests,
    AsyncWorker,
    Inbox,
    Message,
    Park,
    Parked,
    Requests,
    Worker,
)
from inbox.by_key import claim as claims
from inbox.by_key import due
from inbox.by_key.entries import BY_ROW
from inbox.by_key.failure import failed, recording
from inbox.keeping import keeping
from inbox.total_order import total_claim
from mailroom import create_inbox, create_log, schema, subscribe, testing, unsubscribe
from mailroom.errors import InvalidMessage, InvalidName
from mailroom.logs.readers import beginning
from mailroom.message.insert import Insert
from mailroom.node import identity as identity
from mailroom.node import status
from mailroom.node import trace as tracing
from mailroom.sql.operation import Sql, filled
from mailroom.sql.runner import run
from mailroom.testing import deliver, deliver_async
from mailroom.values.names import MAX_HEADERS_BYTES, MAX_KEY_BYTES, inbox_name, schema_name
from outbox import AsyncOutbox, Outbox, Outgoing
from outbox.bulk import EXPRESSIONS as BULK
from outbox.bulk import NTH
from tests.message.test_codec import supported
from tests.outbox.test_outbox import BAD_ROWS
from tests.support.command import error_of, mailroom
from tests.support.databases import Connect
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.explain import nodes
from tests.support.node import Node
from tests.support.noted import END
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import LEDGER, NEVER_S, ledger_keys, working, write_ledger

pytestmark = pytest.mark.inbox("shipping", backoff_s=0)

OUTBOX, ASYNC_OUTBOX = Outbox(), AsyncOutbox()
SHIPPING, ASYNC_SHIPPING = Inbox("shipping"), AsyncInbox("shipping")

# -- Keys, headers and values: whatever is sent comes back equal ------------------------------------------------------

# All of Unicode that PostgreSQL's text holds: quotes, backslashes, control characters, what arrays and COPY escape.
legible = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
awkward = st.text(st.sampled_from("\"'\\{},;%:$\t\n\r\x01\x1f\x7f\ufeff\u2028\u202e é€\U0001f600NULL"), max_size=20)
texts = legible | awkward
keys = st.one_of(
    texts.filter(bool),
    awkward.map(lambda text: text + "k" * (MAX_KEY_BYTES - len(text.encode()))),  # 1,024 bytes exactly
    st.integers(),
    st.integers(0, 9).map(lambda digit: 10 ** (MAX_KEY_BYTES - 1) + digit),
    st.uuids(),
    st.none(),
)
headers = st.none() | st.dictionaries(texts, texts, max_size=4)
parcels = st.builds(Outgoing, st.just("shipping"), supported, key=keys, headers=headers)
within = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def expected(message: Outgoing, key: str) -> tuple[object, ...]:
    """Return what a consumer has of a message; one that was sent without a key has one of its own."""
    return key if message.key is None else str(message.key), message.value, dict(message.headers or {})


def seen(message: Message) -> tuple[object, ...]:
    return message.key, message.value, dict(message.headers)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["psycopg", "Connection psycopg2", "Session pg8000"])
def test_hostile_keys_headers_and_values_come_back_equal(dsn: str, connect: Connect, kind: str) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    with opened(dsn, kind) as connection:

        @within
        @given(st.lists(parcels, min_size=1, max_size=6))
        @example([Outgoing("shipping", None, key="\r\n\t\x1f\x7f\\N\\."), Outgoing("shipping", b"\\.\n", key="\\.")])
        @example([Outgoing("shipping", 2, key="null"), Outgoing("shipping", 2, key="Null")])
        @example([Outgoing("shipping", 1, key="k" * MAX_KEY_BYTES, headers={"h": "x" * (MAX_HEADERS_BYTES - 9)})])
        def check(messages: list[Outgoing]) -> None:
            OUTBOX.send_many(connection, messages)
            for each in messages:
                OUTBOX.send(connection, each.topic, each.value, key=each.key, headers=each.headers)
            deliver(connection)
            reaped = SHIPPING.reap_any(connection, per_key=100)
            assert [seen(message) for message in reaped] == [
                expected(message, one.key) for message, one in zip([*messages, *messages], reaped, strict=True)
            ]
            connection.rollback()

        check()


# pg8000 by itself leaves some of them unquoted in an array, and PostgreSQL takes them for no key at all.
NULLS = ["null", "Null", "NULL", "nULL", '"null"', "\\null", "{null}", "null,null"]


def parking(message: Message, connection: object) -> None:
    raise Park("bad")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", sorted(SYNC, key=lambda kind: kind != "Connection pg8000"))
def test_key_that_reads_null_is_sent_and_found_like_any_other(dsn: str, kind: str) -> None:
    with opened(dsn, kind) as connection:
        create_inbox(connection, "shipping", backoff_s=0)
        OUTBOX.send_many(connection, [Outgoing("shipping", 1, key=key, headers={key: key}) for key in NULLS])
        found = testing.sent(connection, "shipping")
        assert [(message.key, dict(message.headers)) for message in found] == [(key, {key: key}) for key in NULLS]
        assert len(testing.work(connection, "shipping", parking).failures) == len(NULLS)
        parked = Parked("shipping")
        assert parked.replay(connection, NULLS[:2], actor="me").keys == 2
        assert {each.key for each in parked.keys(connection)} == set(NULLS[2:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_key_that_reads_null_is_sent_like_any_other_on_async_connections(dsn: str, kind: str) -> None:
    async with opened_async(dsn, kind) as connection:
        await ASYNC_OUTBOX.send_many(connection, [Outgoing("t", 1, key=key) for key in NULLS])
        assert [message.key for message in await testing.sent_async(connection, "t")] == NULLS


@pytest.mark.slow
def test_hostile_keys_are_reaped_by_the_key_they_were_sent_with(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    connection.commit()

    @within
    @given(st.lists(keys.filter(lambda key: key is not None), min_size=1, max_size=5, unique_by=str))
    def check(chosen: list[str | int | UUID]) -> None:
        for key in chosen:
            OUTBOX.send(connection, "shipping", str(key), key=key)
        deliver(connection)
        for key in chosen:
            assert [message.value for message in SHIPPING.reap(connection, key)] == [str(key)]
        connection.rollback()

    check()


@pytest.mark.slow
async def test_hostile_keys_headers_and_values_come_back_equal_by_asyncpg(dsn: str, connect: Connect) -> None:
    with connect() as setup:
        create_inbox(setup, "shipping")
    cases = Cases(st.lists(parcels, min_size=1, max_size=6))
    async with opened_async(dsn, "AsyncConnection asyncpg") as connection:
        for messages in cases.drawn(25):
            await ASYNC_OUTBOX.send_many(connection, messages)
            await deliver_async(connection)
            reaped = await ASYNC_SHIPPING.reap_any(connection, per_key=100)
            assert [seen(message) for message in reaped] == [
                expected(message, one.key) for message, one in zip(messages, reaped, strict=True)
            ]
            await connection.rollback()


class Cases:
    """Examples of a strategy for a test that hypothesis cannot call, since it is async."""

    def __init__(self, strategy: st.SearchStrategy[list[Outgoing]]) -> None:
        self._strategy = strategy

    def drawn(self, number: int) -> list[list[Outgoing]]:
        found: list[list[Outgoing]] = []

        @settings(max_examples=number, deadline=None, database=None)
        @given(self._strategy)
        def draw(messages: list[Outgoing]) -> None:
            found.append(messages)

        draw()
        return found


# -- Names: refused before anything reaches the database --------------------------------------------------------------

HOSTILE_NAMES: dict[str, Any] = {
    "quote": 'a"b',
    "end of the identifier": 'mailroom"; DROP TABLE mailroom.outbox; --',
    "apostrophe": "a'b",
    "semicolon": "a;b",
    "NUL": "a\0b",
    "line break at the end": "mailroom\n",
    "blank": "a b",
    "dot": "mailroom.outbox",
    "percent": "a%sb",
    "brace": "{schema}",
    "letter that looks like a Latin one": "m\u0430ilroom",
    "wide letter": "\uff4dailroom",
    "capital": "Mailroom",
    "digit that is not ASCII": "a\u0661",
    "lone surrogate": "a\ud800",
    "terminal": "a\x1b[31m",
    "42 letters": "a" * 42,
    "64 bytes": "a" * 64,
    "empty": "",
}
NOT_TEXT: dict[str, Any] = {"None": None, "bytes": b"mailroom", "number": 7, "list": ["mailroom"]}
HOSTILE_TOPICS = HOSTILE_NAMES | {"capital": "-a", "dot": ".a", "42 letters": "a" * 201, "64 bytes": "€" * 64}


class NoDatabase:
    """What stands in for a connection where nothing may be asked of one."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the database was asked: {name}")


NOWHERE: Any = NoDatabase()
DSN = "postgresql://nobody@127.0.0.1:1/nowhere"

TAKE_A_SCHEMA: dict[str, Callable[[Any], object]] = {
    "Outbox": lambda name: Outbox(schema=name),
    "AsyncOutbox": lambda name: AsyncOutbox(schema=name),
    "Inbox": lambda name: Inbox("shipping", schema=name),
    "AsyncInbox": lambda name: AsyncInbox("shipping", schema=name),
    "Worker": lambda name: Worker(DSN, "shipping", print, schema=name),
    "AsyncWorker": lambda name: AsyncWorker(DSN, "shipping", lambda *_: NOWHERE, schema=name),
    "Dispatcher": lambda name: Dispatcher(DSN, schema=name),
    "deliver_all": lambda name: deliver_all(DSN, schema=name),
    "migrate": lambda name: schema.migrate(NOWHERE, schema=name),
    "current_revision": lambda name: schema.current_revision(NOWHERE, schema=name),
    "check": lambda name: schema.check(NOWHERE, schema=name),
    "rename_node": lambda name: identity.rename_node(NOWHERE, "paris", actor="a", schema=name),
    "new_node_id": lambda name: identity.new_node_id(NOWHERE, actor="a", schema=name),
    "node_moved": lambda name: identity.node_moved(NOWHERE, actor="a", schema=name),
    "node_restored": lambda name: identity.node_restored(NOWHERE, actor="a", schema=name),
    "advance_clock": lambda name: identity.advance_clock(NOWHERE, 1, actor="a", schema=name),
    "Requests": lambda name: Requests(DSN, "shipping", schema=name),
    "create_inbox": lambda name: create_inbox(NOWHERE, "shipping", schema=name),
    "subscribe": lambda name: subscribe(NOWHERE, "shipping", "t", schema=name),
    "unsubscribe": lambda name: unsubscribe(NOWHERE, "shipping", "t", schema=name),
    "status": lambda name: status.status(NOWHERE, schema=name),
    "dispatcher_status": lambda name: status.dispatcher_status(NOWHERE, schema=name),
    "executor_status": lambda name: status.executor_status(NOWHERE, schema=name),
    "links_status": lambda name: status.links_status(NOWHERE, schema=name),
    "executable_backlog": lambda name: status.executable_backlog(NOWHERE, schema=name),
    "Registrations": lambda name: Registrations(schema=name),
    "AsyncRegistrations": lambda name: AsyncRegistrations(schema=name),
    "Parked": lambda name: Parked("shipping", schema=name),
    "AsyncParked": lambda name: AsyncParked("shipping", schema=name),
    "outbox_backlog": lambda name: status.outbox_backlog(NOWHERE, schema=name),
    "trace": lambda name: tracing.trace(NOWHERE, UUID(int=1), schema=name),
    "causes": lambda name: tracing.causes(NOWHERE, UUID(int=1), schema=name),
    "effects": lambda name: tracing.effects(NOWHERE, UUID(int=1), schema=name),
    "testing.sent": lambda name: testing.sent(NOWHERE, "t", schema=name),
    "testing.deliver": lambda name: testing.deliver(NOWHERE, schema=name),
    "testing.execute": lambda name: testing.execute(NOWHERE, schema=name),
    "testing.handle_all": lambda name: testing.handle_all(NOWHERE, "shipping", print, schema=name),
}
TAKE_AN_INBOX: dict[str, Callable[[Any], object]] = {
    "Requests": lambda name: Requests(DSN, name),
    "AsyncRequests": lambda name: AsyncRequests(DSN, name),
    "Inbox": lambda name: Inbox(name),
    "AsyncInbox": lambda name: AsyncInbox(name),
    "Parked": lambda name: Parked(name),
    "AsyncParked": lambda name: AsyncParked(name),
    "Worker": lambda name: Worker(DSN, name, print),
    "AsyncWorker": lambda name: AsyncWorker(DSN, name, lambda *_: NOWHERE),
    "create_inbox": lambda name: create_inbox(NOWHERE, name),
    "subscribe": lambda name: subscribe(NOWHERE, name, "t"),
    "unsubscribe": lambda name: unsubscribe(NOWHERE, name, "t"),
    "testing.handle_all": lambda name: testing.handle_all(NOWHERE, name, print),
}
TAKE_A_TOPIC: dict[str, Callable[[Any], object]] = {
    "send": lambda topic: OUTBOX.send(NOWHERE, topic, 1),
    "send_many": lambda topic: OUTBOX.send_many(NOWHERE, [Outgoing("t", 1), Outgoing(topic, 1)]),
    "publish": lambda topic: OUTBOX.publish(NOWHERE, topic, 1),
    "command": lambda topic: OUTBOX.command(NOWHERE, topic, 1),
    "create_inbox": lambda topic: create_inbox(NOWHERE, "shipping", ["t", topic]),
    "subscribe": lambda topic: subscribe(NOWHERE, "shipping", ["t", topic]),
    "unsubscribe": lambda topic: unsubscribe(NOWHERE, "shipping", ["t", topic]),
}


def test_hostile_schema_name_is_refused_wherever_it_enters() -> None:
    for call, name in product(TAKE_A_SCHEMA.values(), (HOSTILE_NAMES | NOT_TEXT).values()):
        with pytest.raises(InvalidName, match=r"\ASchema name .* is not valid: [ -~]*" + END):
            call(name)


def test_hostile_inbox_name_is_refused_wherever_it_enters() -> None:
    for (where, call), (name, hostile) in product(TAKE_AN_INBOX.items(), (HOSTILE_NAMES | NOT_TEXT).items()):
        # `deliver_all` delivers first, and `create_inbox` takes a list of names.
        if where != "testing.handle_all" and (where, name) != ("create_inbox", "list"):
            with pytest.raises(InvalidName, match=r"\AInbox name .* is not valid: [ -~]*" + END):
                call(hostile)


def test_hostile_topic_is_refused_wherever_it_enters() -> None:
    for call, name in product(TAKE_A_TOPIC.values(), (HOSTILE_TOPICS | NOT_TEXT).values()):
        with pytest.raises(InvalidMessage, match=r"Topic [ -~]* is not valid: [ -~]*" + END):
            call(name)


@pytest.mark.slow
@given(st.text(max_size=70), st.sampled_from([schema_name, inbox_name]))
@settings(max_examples=500, deadline=None)
def test_name_that_is_taken_is_a_plain_identifier_of_at_most_41_letters(name: str, taken: Callable[[str], str]) -> None:
    try:
        assert taken(name) == name
    except InvalidName:
        return
    assert name.isascii()
    assert name.replace("_", "a").isalnum()
    assert name == name.lower()
    assert 1 <= len(name) <= 41


class Disguised(str):
    """Text that shows another text than the one it holds, as enums of text do."""

    __slots__ = ()

    def __str__(self) -> str:
        return 'evil".outbox; --'

    __format__ = object.__format__  # which goes by str()


def test_name_in_disguise_stands_for_the_text_it_holds(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, Disguised("shipping"), [Disguised("order.paid")], schema=Disguised("mailroom"))
    outbox = Outbox(schema=Disguised("mailroom"))
    outbox.send(connection, Disguised("order.paid"), 1, key=Disguised("k"))
    outbox.send_many(connection, [Outgoing(Disguised("order.paid"), 2, key=Disguised("k"))])
    deliver(connection, schema=Disguised("mailroom"))
    reaped = Inbox(Disguised("shipping"), schema=Disguised("mailroom")).reap(connection, Disguised("k"))
    assert [(message.topic, message.value) for message in reaped] == [("order.paid", 1), ("order.paid", 2)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(HOSTILE_NAMES.keys() - {"NUL", "lone surrogate", "empty"}))
def test_hostile_name_at_the_command_is_one_line_of_plain_text(name: str, dsn: str, connect: Connect) -> None:
    hostile = HOSTILE_NAMES[name]
    for arguments in (
        ("status", "--schema", hostile),
        ("migrate", "--schema", hostile),
        ("outbox", "send", "t", "--json", "1", "--schema", hostile),
        ("dispatcher", "deliver-all", "--schema", hostile),
        ("inbox", "list", "--schema", hostile),
        ("inbox", "create", "--", hostile),
        ("inbox", "peek", "--", hostile),
        ("inbox", "reap", "--any", "--", hostile),
    ):
        result = mailroom(*arguments, dsn=dsn)
        line = error_of(result)
        assert result.exit_code == 2
        assert "name" in line
        assert line.isascii()
        assert line.isprintable()
    made = connect().execute(
        "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> ALL ('{public,information_schema}')"
    )
    assert made.fetchall() == [("mailroom",)]


# -- Bounds: a claim is bounded by bytes as well as by rows -----------------------------------------------------------


@pytest.fixture
def small_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound claims to 10,000 bytes for the test."""
    for name in ("REAP_KEY", "REAP_ONE", "REAP_PLAIN", "REAP_ANY"):
        claim: Sql = getattr(claims, name)
        bounded = claim.template.replace(str(claims.MAX_BYTES), "10000")
        assert bounded != claim.template
        monkeypatch.setattr(claims, name, Sql(bounded, claim.columns))


def fill(node: Node, *sizes_of_keys: tuple[str, int]) -> None:
    """Deliver a value of about this many bytes under each key, numbered in the order sent."""
    with node.connection.transaction():
        for nth, (key, size) in enumerate(sizes_of_keys):
            OUTBOX.send(node.connection, "shipping", [nth, bytes(size)], key=key)
    node.deliver_all()


def numbers(messages: list[Message]) -> list[int]:
    return [message.value[0] for message in messages]


@pytest.mark.usefixtures("small_claims")
def test_claim_of_a_key_takes_only_what_fits_and_the_rest_comes_next(node: Node, connect: Connect) -> None:
    fill(node, *[("a", 3_000)] * 7)
    connection = connect()
    claims = [numbers(SHIPPING.reap(connection, "a")) for _ in range(4)]
    assert claims == [[0, 1, 2], [3, 4, 5], [6], []]


@pytest.mark.usefixtures("small_claims")
def test_claim_takes_at_least_one_message_however_large(node: Node, connect: Connect) -> None:
    fill(node, ("a", 30_000), ("a", 30_000), ("b", 30_000), ("a", 10))
    connection = connect()
    assert [numbers(SHIPPING.reap_any(connection)) for _ in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.usefixtures("small_claims")
def test_large_message_ends_a_claim_before_it_and_small_ones_behind_it_do_not_pass(
    node: Node, connect: Connect
) -> None:
    fill(node, ("a", 10), ("b", 30_000), ("a", 10), ("b", 10), ("c", 10))
    connection = connect()
    assert [numbers(SHIPPING.reap_any(connection)) for _ in range(4)] == [[0], [1], [2, 3, 4], []]


# Of about 4,300 bytes as they are sent. Stored, some are compressed, and a number may have more digits than bytes.
JSONS = {
    "incompressible": "to_jsonb((SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, 120)))",
    "compressible": "to_jsonb(repeat('x', 4300))",
    "compressible to nothing": "jsonb_build_array(repeat('x', 2150), repeat('y', 2150))",
    "a number": "'1e4300'::jsonb",
    "numbers": "'[1e2150, [1e-2150]]'::jsonb",
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_claims")
def test_values_written_as_json_count_as_they_are_sent(node: Node, connect: Connect) -> None:
    connection = connect()
    for kind, json in JSONS.items():
        written = f"INSERT INTO mailroom.outbox (topic, key, value_json) SELECT 'shipping', 'a', {json}"
        for _ in range(4):
            node.connection.execute(written.encode())
        node.deliver_all()
        assert [len(SHIPPING.reap(connection, "a")) for _ in range(3)] == [2, 2, 0], kind
        connection.rollback()
        assert [len(SHIPPING.reap_any(connection)) for _ in range(3)] == [2, 2, 0], kind
        connection.commit()


@pytest.mark.slow
def test_claim_measures_no_more_than_the_first_message_that_does_not_fit(node: Node, connect: Connect) -> None:
    with node.connection.transaction():
        node.connection.execute(
            "INSERT INTO mailroom.outbox (topic, key, value_json) "
            "SELECT 'shipping', 'k' || n % 5, to_jsonb(repeat('x', 15000000)) FROM generate_series(1, 20) n"
        )
    node.deliver_all()
    connection = connect()
    connection.execute(claims.PIN.at().sql)
    claim = claims.REAP_ANY.at(schema="mailroom", inbox="shipping", **claims.Share(100, 10, 100).names()).sql
    [(plan,)] = connection.execute(
        f"EXPLAIN (ANALYZE, FORMAT json) {claim}".encode(), {"cursor": "", "depth": 1.0, "mine": [], "but": []}
    ).fetchall()
    # The first one numbers the messages of each key in the window, without their values.
    [_, measured] = [step for step in nodes(plan[0]["Plan"]) if step["Node Type"] == "WindowAgg"]
    assert measured["Actual Rows"] == 3
    connection.rollback()
    assert [len(SHIPPING.reap_any(connection)) for _ in range(3)] == [2, 2, 2]


@pytest.mark.usefixtures("small_claims")
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_did_not_fit_is_not_overtaken_by_another_reaper(node: Node, connect: Connect, end: str) -> None:
    fill(node, *[("a", 4_000)] * 5, *[("b", 4_000)] * 2)
    first, second = connect(), connect()
    assert numbers(SHIPPING.reap_any(first)) == [0, 1]
    # The rest of `a` belongs to the session that holds its head; so does that of `b`, which the same claim looked at.
    assert numbers(SHIPPING.reap_any(second)) == []
    second.rollback()
    getattr(first, end)()
    rest = [numbers(SHIPPING.reap_any(second)) for _ in range(4 if end == "rollback" else 3)]
    assert rest == ([[0, 1]] if end == "rollback" else []) + [[2, 3], [4, 5], [6]]


@pytest.mark.slow
@pytest.mark.usefixtures("small_claims")
def test_claims_together_take_every_message_once_in_the_order_of_its_key(node: Node, connect: Connect) -> None:
    connection = connect()

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 14_000)), max_size=25))
    def check(sizes_of_keys: list[tuple[str, int]]) -> None:
        fill(node, *sizes_of_keys)
        taken: list[int] = []
        while reaped := SHIPPING.reap_any(connection, max_keys=2, per_key=5):
            assert len(reaped) == 1 or sum(len(message.raw) for message in reaped) <= 10_000
            taken += numbers(reaped)
        connection.commit()
        assert sorted(taken) == list(range(len(sizes_of_keys)))
        for key in "abc":
            own = [nth for nth, (of, _) in enumerate(sizes_of_keys) if of == key]
            assert [nth for nth in taken if nth in own] == own

    check()


@pytest.mark.usefixtures("small_claims")
def test_worker_takes_large_messages_in_batches_that_fit_and_all_of_them(node: Node) -> None:
    node.connection.execute(LEDGER)
    fill(node, *[("a", 4_000), ("b", 4_000), ("a", 10), ("c", 30_000)] * 5)
    with working(Worker(node.dsn, "shipping", write_ledger, parallel=2, poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == 20)
    assert node.delivered() == []
    assert node.value("SELECT max(count) FROM (SELECT count(*) FROM ledger GROUP BY xact) AS batch") <= 4
    for key in "abc":
        assert node.rows("SELECT clock FROM ledger WHERE key = %s ORDER BY nth", key) == node.rows(
            "SELECT clock FROM ledger WHERE key = %s ORDER BY clock", key
        )


@pytest.mark.slow
def test_claim_is_bounded_to_32_mib(node: Node, connect: Connect) -> None:
    fill(node, *[("a", 11 * 1024 * 1024)] * 3)
    connection = connect()
    assert [numbers(SHIPPING.reap_any(connection)) for _ in range(2)] == [[0, 1], [2]]


# -- The schema: it does the same with any search_path, and belongs to nobody else ------------------------------------


@pytest.fixture
def catalog(connect: Connect) -> psycopg.Connection[TupleRow]:
    """A connection to a node with an inbox, for looking at the catalog; it has tables of one that reads a log, too."""
    connection = connect()
    create_inbox(connection, "shipping")
    create_log(connection, "orders")
    run(connection, beginning("mailroom", ["shipping"], "orders", "now"))
    return connection


# Called for each INSERT or batch, where pinning it takes as long as all of the rest. They name the schema of all that
# they call.
QUALIFIED = {
    "doorbell", "check_message", "check_executable_clock", "take_dispatch_turn", "take_execute_turn",
    "is_mine", "refuse_others",
}  # fmt: skip


# What a watch sends, its caller has no right to; a consumer may delete what it shares with others, and not lock it; a
# reader asks for what policies may hide of it, and acts on its link within bounds; a writer's send is held against the
# clock, and refused where there is no node; and what other readers are allowed is not a reader's to read.
DEFINERS = {"watch", "link_next", "link_topic_asked", "link_want", "link_claim", "link_match", "clock_reach"}
DEFINERS |= {"link_hold", "link_hello", "link_ask", "link_acknowledge", "delete_marked"}
DEFINERS |= {"make_log_segment", "lock_log_segment", "empty_log_segment", "drop_log_segment"}
DEFINERS |= {"make_reaped_days", "empty_reaped_day", "drop_reaped_day", "refuse_without_node", "watch_audit"}


def test_every_function_has_its_search_path_pinned_and_runs_as_its_caller(
    catalog: psycopg.Connection[TupleRow],
) -> None:
    functions = catalog.execute(
        "SELECT proname, proconfig, prosecdef, prosqlbody IS NOT NULL FROM pg_proc "
        "WHERE pronamespace = 'mailroom'::regnamespace"
    ).fetchall()
    assert {name for name, *_ in functions} >= {"doorbell", "cbor_to_jsonb"}
    for name, configuration, is_definer, is_bound in functions:  # bound: what it calls was looked up by the migration
        assert "search_path=pg_catalog, pg_temp" in (configuration or []) or is_bound or name in QUALIFIED, name
        assert is_definer == (name in DEFINERS), name


def test_functions_that_run_as_the_owner_are_nobodys_but_the_owners(catalog: psycopg.Connection[TupleRow]) -> None:
    granted = catalog.execute(
        "SELECT DISTINCT proname, a.grantee = proowner FROM pg_proc, aclexplode(proacl) a "
        "WHERE pronamespace = 'mailroom'::regnamespace AND (prosecdef OR proname ^@ 'watch') ORDER BY 1"
    )
    names = (
        "delete_marked", "drop_log_segment", "drop_reaped_day", "empty_log_segment", "empty_reaped_day",
        "link_acknowledge", "link_ask", "link_claim",
        "link_hello", "link_hold", "link_match", "link_next", "link_topic_asked", "link_want",
        "lock_log_segment", "make_log_segment", "make_reaped_days",
        "watch", "watch_audit", "watch_json", "watch_query", "watch_rest", "watch_told",
    )  # fmt: skip
    assert granted.fetchall() == [(name, True) for name in names]


def test_other_roles_have_no_right_in_the_schema(catalog: psycopg.Connection[TupleRow]) -> None:
    owner = catalog.info.user
    granted = catalog.execute(
        """
        SELECT c.relname, a.privilege_type FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.relnamespace = 'mailroom'::regnamespace AND a.grantee <> %(owner)s::regrole
        UNION ALL SELECT 'the schema', a.privilege_type FROM pg_namespace n, aclexplode(n.nspacl) a
        WHERE n.oid = 'mailroom'::regnamespace AND a.grantee <> %(owner)s::regrole
        UNION ALL SELECT a.attname, 'column' FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = 'mailroom'::regnamespace AND a.attacl IS NOT NULL
        """,
        {"owner": owner},
    )
    # A view that shows each role what is its own.
    assert granted.fetchall() == [("my_due", "SELECT")]


def test_no_index_rests_on_the_collation_of_a_library(catalog: psycopg.Connection[TupleRow]) -> None:
    others = catalog.execute(
        """
        SELECT i.indexrelid::regclass::text, l.collname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid,
            unnest(i.indcollation) AS used (id) JOIN pg_collation l ON l.oid = used.id
        WHERE c.relnamespace = 'mailroom'::regnamespace AND l.collname <> 'C'
        """
    )
    # alembic's own table of one row: a version is looked up in it by nothing but a scan.
    assert [index for index, _ in others.fetchall()] in ([], ["mailroom.alembic_version_pkc"])


def test_everything_is_logged(catalog: psycopg.Connection[TupleRow]) -> None:
    kinds = catalog.execute(
        "SELECT DISTINCT relpersistence FROM pg_class WHERE relnamespace = 'mailroom'::regnamespace"
    )
    assert kinds.fetchall() == [("p",)]


TYPES = (
    *("smallint", "integer", "bigint", "numeric", "double precision", "text", "name", '"char"', "boolean", "uuid"),
    *("timestamptz", "interval", "oid", "regclass", "xid8", "bytea", "json", "jsonb", "text[]", "bigint[]"),
)
OPERATORS = ("=", "<>", "<", ">", "<=", ">=", "+", "-", "*", "/", "^", "||")
# Functions and operators of the same names as PostgreSQL's, for all types that fit none of those exactly.
SHADOWS = """
DO $do$
DECLARE
    types CONSTANT text[] := {types};
    names CONSTANT text[] := {names};
    operators CONSTANT text[] := {operators};
    each record;
    failing CONSTANT text := 'LANGUAGE plpgsql AS $f$ BEGIN RAISE EXCEPTION ''shadowed''; END $f$';
BEGIN
    FOR each IN
        WITH named AS (
            SELECT proname AS name, CASE WHEN prorettype::regtype::text ^@ 'any' THEN 'text'
                                         ELSE prorettype::regtype::text END AS result, pronargs, provariadic > 0 AS many
            FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (names) AND prokind <> 'w')
        SELECT name, max(result) AS result, arguments FROM (
            SELECT name, result, a AS arguments FROM named, unnest(types) a WHERE pronargs = 1 OR many
            UNION ALL
            SELECT name, result, concat_ws(',', a, b) FROM named, unnest(types) a, unnest(types) b
            WHERE pronargs = 2 OR many
            UNION ALL
            SELECT name, result, 'text' || repeat(',text', n - 1) FROM named, generate_series(3, 9) n
            WHERE pronargs = n OR many) AS f
        WHERE to_regprocedure(format('%I(%s)', name, arguments)) IS NULL GROUP BY name, arguments
    LOOP
        EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s %s', each.name, each.arguments, each.result, failing);
    END LOOP;
    FOR each IN
        SELECT name, a, b FROM unnest(operators) AS name, unnest(types) a, unnest(types) b
        WHERE to_regoperator(format('%s(%s,%s)', name, a, b)) IS NULL
    LOOP
        EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s %s', 'operator ' || each.name, each.a, each.b,
                       CASE WHEN each.name ~ '[=<>]' THEN 'boolean' ELSE 'text' END, failing);
        EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%I)', each.name,
                       each.a, each.b, 'operator ' || each.name);
    END LOOP;
END $do$
"""


def statements() -> Iterator[tuple[str, Sql]]:
    """Give every statement that the library holds, by its name."""
    for package in (library, outbox, inbox, dispatcher):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.startswith("mailroom.django."):  # they need the settings of a project, and have none
                continue
            for name, found in vars(importlib.import_module(module.name)).items():
                for statement in found if isinstance(found, tuple) else (found,):
                    if isinstance(statement, Sql):
                        yield f"{module.name}.{name}", statement
                    if isinstance(statement, Insert):
                        yield f"{module.name}.{name}.unnest", statement.unnest


def shadow(connection: psycopg.Connection[TupleRow], used: Iterable[Sql]) -> None:
    """Put into `public`, which is on everybody's search_path, what could be called in the place of PostgreSQL's own."""
    names = sorted({name for statement in used for name in re.findall(r"\b([a-z_]+)\(", statement.template)})
    connection.execute("SET search_path = pg_catalog")  # else the shadows fall on this very statement
    connection.execute(sql.SQL(SHADOWS).format(types=list(TYPES), names=names, operators=list(OPERATORS)))
    connection.execute("RESET search_path")


OF_ROWS = {name: filled(text, schema="mailroom", inbox="shipping") for name, text in BY_ROW.items()}
# Names of identifiers that stand for numbers, conditions or tables of a statement.
FILLED = {"schema": "mailroom", "inbox": "shipping", "table": "attempt", "left_out": "s.retry_at > now()"}
FILLED |= {"held": "EXISTS (SELECT FROM gone)"}
FILLED |= {"channel": "'x'", "node": "mailroom", "before": "(SELECT clock_timestamp())", "outbox": "outbox"}
FILLED |= {"target": "mailroom.store", "key": "key", "key_type": "text", "locked": "FOR UPDATE", "bounds": ""}
FILLED |= {"found_value": "t.value", "found_number": "t.number", "sets": "value = g.value", "columns": "value"}
FILLED |= {"function": "pg_catalog.jsonb_strip_nulls", "skipping": "SKIP LOCKED", "tried": "xmax <> '0'"}
FILLED |= {"failing": "i.key", "upto": "i.clock", "breaker": "breaker", "key_state": "key_state"}
FILLED |= {"log": "orders", "lanes": "4", "lowest": "NULL::bigint", "there": "mailroom.inbox_shipping"}
FILLED |= {
    name: filled(text, schema="mailroom", inbox="shipping") if "{" in text else text
    for name, text in keeping(True).items()
}

OF_WORKER = {
    module: {"but_orphaned": module.BUT_ORPHANED.format(schema="mailroom", inbox="shipping")}
    for module in (due, total_claim)
}
STAGED = f"(SELECT 1::bigint AS {NTH}, * FROM mailroom.dead_letter) AS staged"
OF_STATEMENT = {
    "dispatcher.housekeeping.janitor.IDLE_KEYS": {"is_read": ""},
    "mailroom.registry.logs.FORGET": {"table": "log_tick", "column": "log"},
    "mailroom.doctor.workers.FULLEST": {"is_read": "true", "kind": "r.log IS NULL"},
    "inbox.by_log.log_claim.READ_PLAIN": {"held": "rows > 0"},
    "inbox.by_log.log_claim.READ": {"held": "EXISTS (SELECT FROM given)"},
    "inbox.by_log.log_claim.READ_OPEN": {"held": "EXISTS (SELECT FROM given)"},
    "inbox.by_log.log_claim.READ_TOPICS_OPEN": {"held": "EXISTS (SELECT FROM given)"},
    "inbox.by_log.log_claim.READ_PLAIN_TOPICS": {"held": "wanted > 0"},
    "inbox.by_log.log_claim.READ_TOPICS": {"held": "EXISTS (SELECT FROM given)"},
    "inbox.worker.in_flight.ADD": OF_ROWS,
    "inbox.worker.in_flight.TAKE_OVER": OF_ROWS,
    "mailroom.figures.waiting.OLDEST": {"each": "SELECT 'a'::text, clock_timestamp()"},
    "inbox.by_key.due.LOCK_HEAD": OF_WORKER[due],
    "inbox.by_key.due.TAKE_HEAD": OF_WORKER[due],
    "inbox.total_order.total_claim.REAP": OF_WORKER[total_claim],
    "inbox.total_order.total_claim.TAKE": OF_WORKER[total_claim],
    "dispatcher.executor.targets.target.INSERT": {"given": "g.value"},
    "mailroom.node.trace.TRACE": {"but": "''"},
    "mailroom.node.trace.CAUSED": {"but": "''"},
    "dispatcher.dashboard.reading.OF_PLACE": {"table": "dead_letter"},
    "dispatcher.dashboard.reading.OF_INBOX": {"table": "inbox"},
    "outbox.bulk.MOVE": {
        "table": STAGED,
        "names": ", ".join(BULK),
        "expressions": ", ".join(BULK.values()),
    },
    "outbox.bulk.MEASURE": {"table": STAGED},
    "outbox.bulk.CHUNK": {"table": STAGED},
    "outbox.bulk.COUNT": {"table": "mailroom.dead_letter"},
}


def test_no_statement_calls_what_another_role_has_put_into_the_search_path(
    catalog: psycopg.Connection[TupleRow],
) -> None:
    found = dict(statements())
    shadow(catalog, found.values())
    called = {}
    checked = 0
    for name, statement in found.items():
        names = dict.fromkeys(re.findall(r"{(\w+)}", statement.template), "1") | FILLED | OF_STATEMENT.get(name, {})
        if isinstance(statement, Insert):
            names |= {"given": ", ".join(statement.values), "values": ", ".join(statement.values.values())}
        rendered = statement.at(**names).sql
        if re.match("WITH|SELECT|INSERT|UPDATE|DELETE", rendered):
            checked += 1
            with catalog.transaction(force_rollback=True):
                called[name] = shadows_of(catalog, rendered)
    assert {name: shadows for name, shadows in called.items() if shadows} == {}
    assert checked > 50


def shadows_of(connection: psycopg.Connection[TupleRow], statement: str) -> list[str]:
    """Return what a statement calls outside pg_catalog, as PostgreSQL itself has resolved it."""
    types: list[str] = []

    def numbered(parameter: re.Match[str]) -> str:
        types.append(parameter[2])
        return f"${len(types)}::{parameter[2]}"

    body = re.sub(r"%\((\w+)\)s::(\w+(?:\[\])?)", numbered, statement).replace("%%", "%")
    # A body that is parsed now leaves what it calls in pg_depend.
    function = f"CREATE FUNCTION pg_temp.probe({', '.join(types)}) RETURNS void LANGUAGE sql BEGIN ATOMIC {body}; END"
    try:
        connection.execute(function.encode())
    except psycopg.errors.RaiseException:  # a constant was computed with one
        return ["shadowed"]
    connection.execute("SET LOCAL search_path = pg_catalog")
    found = connection.execute(
        "SELECT pg_describe_object(refclassid, refobjid, refobjsubid) FROM pg_depend "
        "WHERE objid = (SELECT oid FROM pg_proc WHERE proname = 'probe') "
        "AND refclassid = ANY ('{pg_proc,pg_operator}'::regclass[])"
    )
    # Named with the node's schema, in which other roles make nothing.
    return [what for (what,) in found.fetchall() if not what.startswith("function mailroom.")]


@pytest.mark.slow
def test_message_goes_its_way_with_hostile_objects_in_the_search_path(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping", ["order.*"], backoff_s=0)
    shadow(connection, [statement for _, statement in statements()])
    for table in ("outbox", "inbox", "inbox_shipping", "inbox_registry", "subscription", "key_state", "node", "clock"):
        connection.execute(f"CREATE TEMP TABLE {table} (hostile int)")
    OUTBOX.send(connection, "order.paid", 1, key="a", headers={"h": "v"})
    OUTBOX.send_many(connection, [Outgoing("shipping", 2, key="a"), Outgoing("shipping", 3, key="b")])
    assert deliver(connection) == 3
    [head, _] = SHIPPING.peek(connection, "a")
    assert run(connection, recording("mailroom", "shipping", failed(head, ValueError("no")))).outcome == "retry"
    connection.commit()
    assert [message.value for message in SHIPPING.reap(connection, "a")] == [1, 2]
    assert [message.value for message in SHIPPING.reap_any(connection)] == [3]
    assert SHIPPING.backlog(connection) == 0


def test_trigger_rings_whatever_stands_first_in_the_writers_search_path(connect: Connect) -> None:
    listener, writer = connect(autocommit=True), connect()
    [(oid,)] = listener.execute("SELECT 'mailroom.outbox'::regclass::oid").fetchall()
    listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"mailroom:{oid}")))
    for function in ("pg_notify(text, text)", "concat(text, oid)", "pg_try_advisory_lock_shared(integer, integer)"):
        writer.execute(
            f"CREATE FUNCTION public.{function} RETURNS boolean LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'shadowed'; END $$"
        )
    writer.execute("CREATE TEMP TABLE outbox (hostile int)")
    writer.execute("SET search_path = public, pg_temp, pg_catalog")
    writer.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('t', '1')")
    writer.commit()
    assert [notification.payload for notification in listener.notifies(timeout=WITHIN_S, stop_after=1)] == [""]


TRAPS = """
DO $do$
DECLARE each record;
BEGIN
    FOR each IN
        SELECT oprname, oprleft::regtype AS a, oprright::regtype AS b, oprresult::regtype AS result
        FROM pg_operator WHERE oprname IN ('~', '=', '<>', '<', '<=', '>', '>=', '-') AND oprleft <> 0
    LOOP
        EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s LANGUAGE plpgsql AS '
                       '$$ BEGIN RAISE EXCEPTION ''trapped''; END $$',
                       'of ' || each.oprname, each.a, each.b, each.result);
        EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%I)',
                       each.oprname, each.a, each.b, 'of ' || each.oprname);
    END LOOP;
    FOR each IN
        SELECT DISTINCT proname, pg_get_function_identity_arguments(oid) AS arguments, prorettype::regtype AS result
        FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND provariadic = 0
        AND proname IN ('octet_length', 'jsonb_typeof', 'jsonb_path_exists', 'current_setting', 'pg_notify', 'replace')
    LOOP
        EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS '
                       '$$ BEGIN RAISE EXCEPTION ''trapped''; END $$', each.proname, each.arguments, each.result);
    END LOOP;
    CREATE FUNCTION public.num_nonnulls(bytea, jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 1';
    CREATE FUNCTION public.concat(text, text) RETURNS text LANGUAGE sql AS $$ SELECT 'trapped' $$;
    CREATE DOMAIN public.text AS pg_catalog.text CHECK (value = 'trapped');
END $do$
"""


def test_rules_hold_whatever_stands_first_in_the_writers_search_path(connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute(TRAPS)
    connection.execute("SET search_path = public, pg_temp, pg_catalog")
    headers = """'{"a": "b"}'::jsonb"""
    moments = ", ".join(["'2030-01-01'::timestamptz"] * 2)
    connection.execute(
        "INSERT INTO mailroom.outbox (topic, event_type, value_json, headers, deliver_at, expires_at, after_clock) "
        f"VALUES ('t', 'C', '1', {headers}, {moments}, 0)".encode()
    )
    for clock in (2**40, int(connection.execute("SELECT mailroom.clock_reach()").fetchall()[0][0])):
        connection.execute(
            "INSERT INTO mailroom.outbox (topic, value_json, after_clock) VALUES ('t', '1', %s)", [clock]
        )
        connection.execute(
            "INSERT INTO mailroom.outbox_executable (operation, key, after_clock) VALUES ('delete', 'k', %s)", [clock]
        )
    for columns, values, constraint in BAD_ROWS.values():
        values = re.sub(r"\b(repeat|convert_to|to_jsonb|jsonb_build_object)\(", r"pg_catalog.\1(", values)
        with pytest.raises(psycopg.errors.CheckViolation) as caught:
            connection.execute(f"INSERT INTO mailroom.outbox ({columns}) VALUES ({values})".encode())
        assert caught.value.diag.constraint_name == constraint
