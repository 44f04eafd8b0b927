"""The writer's side: what is sent, what is refused, and that Python and the table's rules agree on it."""

import json
import uuid
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from functools import reduce
from inspect import signature
from operator import and_, or_
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import errors
from psycopg.types.json import Jsonb

from inbox import Inbox
from mailroom import create_inbox
from mailroom.errors import EncodeError, InvalidMessage
from mailroom.message.outgoing import row_of, sending
from mailroom.sql.runner import PlainCursor, run
from mailroom.testing import deliver, sent
from mailroom.values import codec
from mailroom.values.names import MAX_HEADERS_BYTES, MAX_KEY_BYTES, MAX_VALUE_BYTES
from outbox import Outbox, Outgoing
from tests.support.databases import Connect
from tests.support.drivers import opened
from tests.support.noted import END

pytestmark = pytest.mark.both_versions

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
OUTBOX = Outbox()


def count(connection: psycopg.Connection[Any]) -> int:
    [(number,)] = connection.execute("SELECT count(*) FROM mailroom.outbox").fetchall()
    return int(number)


def test_sent_message_has_every_field_that_was_given(connect: Connect) -> None:
    connection = connect()
    given_id = uuid.uuid4()
    returned = OUTBOX.send(
        connection, "order.paid", {"n": 1}, key="order-42", headers={"user": "ann", "saga": "ü€"}, message_type="O",
        event_type="U", deliver_at=NOON, expires_at=NOON + timedelta(days=1), after_clock=7, id=given_id,
    )  # fmt: skip
    assert returned == given_id
    [message] = sent(connection, "order.paid")
    assert (message.id, message.key, message.value) == (given_id, "order-42", {"n": 1})
    assert (message.kind, message.message_type, message.event_type) == ("M", "O", "U")
    assert message.headers == {"user": "ann", "saga": "ü€"}
    assert (message.deliver_at, message.expires_at) == (NOON, NOON + timedelta(days=1))
    row = connection.execute("SELECT after_clock, source, sent_at FROM mailroom.outbox").fetchone()
    assert row is not None
    assert row[:2] == (7, "")


def test_message_without_a_key_gets_one_that_no_other_has(connect: Connect) -> None:
    connection = connect()
    ids = {OUTBOX.send(connection, "t", 1) for _ in range(3)}
    assert {message.key for message in sent(connection, "t")} == {str(one) for one in ids}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["psycopg", "Connection psycopg", "Connection pg8000"])
def test_ids_of_many_are_random_ones_that_no_other_has(dsn: str, kind: str) -> None:
    given_id = uuid.uuid4()
    many = [Outgoing("t", nth) for nth in range(200)] + [Outgoing("t", 200, id=given_id)]
    with opened(dsn, kind) as connection:
        for _ in range(2):
            OUTBOX.send_many(connection, many)
        messages = sent(connection, "t")
    ids = [message.id for message in messages]
    assert [ids[200], ids[401]] == [given_id] * 2
    assert len({*ids}) == 401
    assert {(each.version, each.variant) for each in ids} == {(4, uuid.RFC_4122)}
    # Each of the other bits is drawn: it is set in some and not in all, but for one chance in 2 ** 400.
    numbers = [each.int for each in ids]
    assert reduce(or_, numbers) ^ reduce(and_, numbers) == ~(0xF << 76 | 0b11 << 62) & (1 << 128) - 1
    assert [message.key for message in messages] == [str(each) for each in ids]


class Statements(PlainCursor):
    """Keeps what is sent to the server."""

    seen: ClassVar[list[bytes]] = []

    def execute(self, query: Any, *arguments: Any, **named: Any) -> Any:
        self.seen.append(query)
        return super().execute(query, *arguments, **named)


def test_insert_has_the_columns_that_are_set_and_is_the_same_object_each_time(connect: Connect) -> None:
    """psycopg looks a prepared statement up by its text, whose hash Python keeps with the object."""
    Statements.seen.clear()
    rows = [
        row_of(Outgoing("t", 1, key="k")),
        row_of(Outgoing("t", 2, key="k")),
        row_of(Outgoing("t", 3, expires_at=NOON)),
    ]
    for row in rows:
        run(connect(), sending("mailroom", row), Statements)
    first, second, third = Statements.seen
    assert first is second
    columns = "message_id, topic, key, kind, message_type, value"
    places = '$1::uuid, $2::text, $3::text, $4::text::"char", $5::text::"char", $6::bytea'
    assert first.decode() == f'INSERT INTO "mailroom".outbox ({columns}) VALUES ({places})'
    assert f"({columns}, expires_at) VALUES" in third.decode()


class Named(str, Enum):  # noqa: UP042
    A = "the value"


class Numbered(int, Enum):
    ONE = 1


class Posing:
    """It equals a topic, and is not text."""

    def __eq__(self, other: object) -> bool:
        return other == "t"

    def __hash__(self) -> int:
        return hash("t")


KEYS: list[tuple[str | int | uuid.UUID, str]] = [
    ("order-42", "order-42"),
    (-7, "-7"),
    (uuid.UUID(int=1), str(uuid.UUID(int=1))),
    (Named.A, "the value"),
    (Numbered.ONE, "1"),
    ("k" * 1_024, "k" * 1_024),
    ("€" * 341, "€" * 341),
    (" ", " "),
    ("NULL", "NULL"),
    ('{"a\\,}', '{"a\\,}'),
]


def test_key_is_stored_as_its_text(connect: Connect) -> None:
    connection = connect()
    for key, _ in KEYS:
        OUTBOX.send(connection, "t", 1, key=key)
        OUTBOX.send_many(connection, [Outgoing("t", 1, key=key)])
    assert [message.key for message in sent(connection, "t")] == [stored for _, stored in KEYS for _ in range(2)]


class Letter(str, Enum):  # noqa: UP042
    DELETED = "D"


@pytest.mark.parametrize(("topic", "first"), [("enum.first", Letter.DELETED), ("text.first", "D")])
def test_letter_of_an_enum_is_sent_as_its_text_whichever_comes_first(connect: Connect, topic: str, first: Any) -> None:
    connection = connect()
    letters: list[Any] = [first, Letter.DELETED, "D"]
    for letter in letters:
        OUTBOX.send(connection, topic, 1, message_type=letter, event_type=letter)
        OUTBOX.send_many(connection, [Outgoing(topic, 1, message_type=letter, event_type=letter)])
        row = row_of(Outgoing(topic, 1, message_type=letter, event_type=letter))
        assert {type(row[4]), type(row[5])} == {str}
    assert {(message.message_type, message.event_type) for message in sent(connection, topic)} == {("D", "D")}
    assert count(connection) == 6


def test_outgoing_takes_its_fields_in_their_order_and_with_their_defaults() -> None:
    defaults = {field.name: field.default for field in fields(Outgoing) if field.default is not MISSING}
    given = {name: f"value of {name}" for name in signature(Outgoing).parameters}
    made: Any = Outgoing
    assert list(given) == [field.name for field in fields(Outgoing)]
    assert asdict(made(*given.values())) == asdict(made(**given)) == given
    assert asdict(Outgoing("t", 1)) == {"topic": "t", "value": 1, **defaults}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "key of 1,025 bytes": ({"key": "k" * 1_025}, "1025 bytes; 1 to 1024"),
    "key of 1,026 bytes in 342 characters": ({"key": "€" * 342}, "1026 bytes"),
    "empty key": ({"key": ""}, "0 bytes"),
    "NUL in the key": ({"key": "a\0b"}, "NUL"),
    "lone surrogate in the key": ({"key": "\ud800"}, "surrogate"),
    "key that is a bool": ({"key": True}, "not bool"),
    "key that is a float": ({"key": 1.5}, "not float"),
    "key that is bytes": ({"key": b"k"}, "not bytes"),
    "int key of 1,025 digits": ({"key": 10**1_024}, "digits"),
    "int key of 9,000 digits": ({"key": 10**9_000}, "digits"),
    "headers over 8 KiB": ({"headers": {"a": "x" * 8_184}}, "8193 bytes as JSON; 8192"),
    "header that is a number": ({"headers": {"a": 1}}, "not text to text"),
    "header named by a number": ({"headers": {1: "a"}}, "not text to text"),
    "header of None": ({"headers": {"a": None}}, "not text to text"),
    "headers that are no mapping": ({"headers": [("a", "b")]}, "mapping"),
    "headers that are empty and no mapping": ({"headers": ""}, "mapping"),
    "NUL in a header": ({"headers": {"a": "\0"}}, "NUL"),
    "NUL in a header's name": ({"headers": {"\0": "a"}}, "NUL"),
    "lone surrogate in a header": ({"headers": {"a": "\udfff"}}, "surrogate"),
    "topic with a space": ({"topic": "order paid"}, "not valid"),
    "empty topic": ({"topic": ""}, "not valid"),
    "topic of 201 letters": ({"topic": "t" * 201}, "not valid"),
    "topic with a line break": ({"topic": "t\n"}, "not valid"),
    "topic with a letter that is not ASCII": ({"topic": "tä"}, "not valid"),
    "topic that is None": ({"topic": None}, "not valid"),
    "topic that has no hash": ({"topic": ["t"]}, r"Topic \['t'\] is not valid"),
    "topic that is not text and equals one that was sent to": ({"topic": Posing()}, "not valid"),
    "kind that has no hash": ({"kind": ["M"]}, r"kind \['M'\] is none of"),
    "naive deliver_at": ({"deliver_at": datetime(2026, 1, 1)}, "deliver_at needs a datetime with a time zone"),  # noqa: DTZ001
    "naive expires_at": ({"expires_at": datetime(2026, 1, 1)}, "expires_at needs a datetime with a time zone"),  # noqa: DTZ001
    "deliver_at that is falsy and no datetime": ({"deliver_at": 0}, "deliver_at needs"),
    "two times": ({"deliver_at": NOON, "deliver_after": 1}, "give one of the two"),
    "deliver_after below 0": (
        {"deliver_after": -1},
        "deliver_after must be a number of seconds, 0 or more, at most 315,360,000, not -1",
    ),
    "deliver_after as text": ({"deliver_after": "1"}, "deliver_after must be .*, not str"),
    "deliver_after of no number": ({"deliver_after": float("nan")}, "deliver_after must be .*, not nan"),
    "deliver_after of 11 years": ({"deliver_after": timedelta(days=4_000)}, "deliver_after must be .*, not 345600000"),
    "deliver_at in the year 9999 of UTC": (
        {"deliver_at": datetime(9998, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))},
        "1 to 9998",
    ),
    "expires_at before the year 1 of UTC": (
        {"expires_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))},
        "1 to 9998",
    ),
    "negative after_clock": ({"after_clock": -1}, "after_clock"),
    "after_clock above 2**62": ({"after_clock": 2**62 + 1}, "after_clock"),
    "after_clock that is a bool": ({"after_clock": True}, "after_clock"),
    "unknown kind": ({"kind": "X"}, "kind 'X' is none of M, E, C, R"),
    "kind of two letters": ({"kind": "ME"}, "none of"),
    "unknown message type": ({"message_type": "Z"}, "message_type"),
    "unknown event type": ({"event_type": "Z"}, "event_type"),
    "empty event type": ({"event_type": ""}, "event_type"),
    "id that is text": ({"id": "e3b0c442-98fc-4c14-9afb-f4c8996fb924"}, "id is a UUID"),
    "value over 16 MiB": ({"value": bytes(MAX_VALUE_BYTES)}, "16,777,216"),
    "value that CBOR cannot give back": ({"value": {1, 2}}, "set"),
}


def test_refused_message_sends_nothing_and_leaves_the_transaction_usable(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, "t", "before")
    for faulty, told in REFUSED.values():
        arguments: dict[str, Any] = {"topic": "t", "value": 1} | faulty
        bad = Outgoing(**arguments)
        with pytest.raises(InvalidMessage, match=told):
            OUTBOX.send_many(connection, [Outgoing("t", "good"), bad, Outgoing("t", "good")])
        with pytest.raises(InvalidMessage, match=rf"\AMessage 2: .*{told}.* None of this call was sent\." + END):
            OUTBOX.send_many(connection, [Outgoing("t", "good"), bad])
        if "kind" not in faulty:
            with pytest.raises(InvalidMessage, match=told):
                OUTBOX.send(connection, arguments.pop("topic"), arguments.pop("value"), **arguments)
    OUTBOX.send(connection, "t", "after")
    assert [message.value for message in sent(connection, "t")] == ["before", "after"]


def test_error_of_a_value_keeps_its_class_within_send_many(connect: Connect) -> None:
    with pytest.raises(EncodeError, match="Message 1"):
        OUTBOX.send_many(connect(), [Outgoing("t", object())])


def test_refused_message_does_not_show_its_value(connect: Connect) -> None:
    with pytest.raises(InvalidMessage) as caught:
        OUTBOX.send(connect(), "t", {"card": "4711-secret", "bad": object()})
    assert "secret" not in str(caught.value)


def test_value_of_exactly_sixteen_mib_is_sent(connect: Connect) -> None:
    connection = connect()
    head = len(codec.encode(bytes(MAX_VALUE_BYTES - 8))) - (MAX_VALUE_BYTES - 8)
    value = bytes(MAX_VALUE_BYTES - head)
    OUTBOX.send(connection, "t", value)
    OUTBOX.send_many(connection, [Outgoing("t", value)])
    sizes = connection.execute("SELECT octet_length(value) FROM mailroom.outbox").fetchall()
    assert sizes == [(MAX_VALUE_BYTES,)] * 2


BAD_ROWS = {
    "key": ("topic, value_json, key", "'t', '1', repeat('k', 1025)", "outbox_key"),
    "empty key": ("topic, value_json, key", "'t', '1', ''", "outbox_key"),
    "topic": ("topic, value_json", "'order paid', '1'", "outbox_topic"),
    "topic with a line break": ("topic, value_json", "E't\\n', '1'", "outbox_topic"),
    "topic of 201": ("topic, value_json", "repeat('t', 201), '1'", "outbox_topic"),
    "kind": ("topic, value_json, kind", "'t', '1', 'X'", "outbox_kind"),
    "message type": ("topic, value_json, message_type", "'t', '1', 'Z'", "outbox_message_type"),
    "event type": ("topic, value_json, event_type", "'t', '1', ''", "outbox_event_type"),
    "no value": ("topic", "'t'", "outbox_one_value"),
    "two values": ("topic, value, value_json", "'t', '\\x01', '1'", "outbox_one_value"),
    "large value": ("topic, value", "'t', convert_to(repeat('x', 16777217), 'UTF8')", "outbox_value"),
    "large value_json": ("topic, value_json", "'t', to_jsonb(repeat('x', 16777215))", "outbox_value_json"),
    "large headers": (
        "topic, value_json, headers",
        "'t', '1', jsonb_build_object('a', repeat('x', 8184))",
        "outbox_headers",
    ),
    "headers of a number": ("topic, value_json, headers", """'t', '1', '{"a": 1}'""", "outbox_headers"),
    "nested headers": ("topic, value_json, headers", """'t', '1', '{"a": {"b": "c"}}'""", "outbox_headers"),
    "headers that are a list": ("topic, value_json, headers", """'t', '1', '["a"]'""", "outbox_headers"),
    "headers that are JSON null": ("topic, value_json, headers", "'t', '1', 'null'", "outbox_headers"),
    "deliver_at never": ("topic, value_json, deliver_at", "'t', '1', 'infinity'", "outbox_deliver_at"),
    "expires_at long ago": ("topic, value_json, expires_at", "'t', '1', '0044-03-15 BC'", "outbox_expires_at"),
    "sent_at never": ("topic, value_json, sent_at", "'t', '1', '-infinity'", "outbox_sent_at"),
    "after_clock": ("topic, value_json, after_clock", "'t', '1', 4611686018427387905", "outbox_after_clock"),
    "negative after_clock": ("topic, value_json, after_clock", "'t', '1', -1", "outbox_after_clock"),
    "source": ("topic, value_json, source", "'t', '1', repeat('x', 201)", "outbox_source"),
}


def test_table_refuses_the_same_in_plain_sql(connect: Connect) -> None:
    connection = connect(autocommit=True)
    for columns, values, constraint in BAD_ROWS.values():
        with pytest.raises(errors.CheckViolation) as caught:
            connection.execute(f"INSERT INTO mailroom.outbox ({columns}) VALUES ({values})".encode())
        said = caught.value.diag
        assert said.constraint_name == constraint
        assert (said.schema_name, said.table_name) == ("mailroom", "outbox")
        assert constraint in (f"outbox_{said.column_name}", "outbox_one_value")
        assert said.message_detail is None  # which would repeat the row


def test_row_of_one_more_trigger_and_of_an_update_is_refused_too(connect: Connect) -> None:
    connection = connect()
    connection.execute(
        "CREATE FUNCTION public.enrich() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN new.key := ''; RETURN new; END $$"
    )
    connection.execute(
        "CREATE TRIGGER enrich BEFORE INSERT ON mailroom.outbox FOR EACH ROW EXECUTE FUNCTION public.enrich()"
    )
    with pytest.raises(errors.CheckViolation, match="outbox_key"), connection.transaction():
        OUTBOX.send(connection, "t", 1, key="a")
    connection.execute("DROP TRIGGER enrich ON mailroom.outbox")
    OUTBOX.send(connection, "t", 1, key="a")
    with pytest.raises(errors.CheckViolation, match="outbox_kind"):
        connection.execute("UPDATE mailroom.outbox SET kind = 'X'")


def test_row_of_a_session_that_fires_no_triggers_is_refused_too(connect: Connect) -> None:
    """Such as those that logical replication applies: nothing after the table checks them again."""
    connection = connect(autocommit=True)
    connection.execute("SET session_replication_role = replica")
    for columns, values, constraint in BAD_ROWS.values():
        with pytest.raises(errors.CheckViolation, match=constraint):
            connection.execute(f"INSERT INTO mailroom.outbox ({columns}) VALUES ({values})".encode())


def test_position_is_not_for_writers_to_set(connect: Connect) -> None:
    with pytest.raises(errors.GeneratedAlways):
        connect().execute("INSERT INTO mailroom.outbox (topic, value_json, position) VALUES ('t', '1', 5)")


def test_plain_insert_of_topic_and_json_reaches_the_inbox(connect: Connect) -> None:
    connection = connect(application_name="billing")
    create_inbox(connection, "shipping")
    connection.execute("INSERT INTO mailroom.outbox (topic, value_json) VALUES ('shipping', %s)", [Jsonb({"a": [1]})])
    assert deliver(connection) == 1
    [message] = Inbox("shipping").reap_any(connection)
    assert (message.value, message.raw, message.source) == ({"a": [1]}, b'{"a": [1]}', "billing")
    assert (message.kind, message.message_type, message.event_type, dict(message.headers)) == ("M", "U", None, {})


texts = st.text(st.characters(exclude_categories=[]), max_size=60)  # with NUL and lone surrogates
within = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def accepts(send: Callable[[], object]) -> bool:
    try:
        send()
    except InvalidMessage:
        return False
    return True


@pytest.mark.slow
def test_key_that_python_accepts_the_table_accepts_and_gives_back(connect: Connect) -> None:
    connection = connect()

    @within
    @given(st.one_of(texts, st.integers(1_020, 1_028).map("k".__mul__), st.integers(339, 343).map("€".__mul__)))
    @example("\ufeff")
    @example("\r\n\t\x1f\x7f")
    def check(key: str) -> None:
        legal = "\0" not in key and not any("\ud800" <= c <= "\udfff" for c in key)
        legal = legal and 1 <= len(key.encode()) <= MAX_KEY_BYTES
        assert accepts(lambda: OUTBOX.send_many(connection, [Outgoing("t", 1, key=key)])) == legal
        assert [message.key for message in sent(connection, "t")] == [key] * legal
        connection.rollback()

    check()


@pytest.mark.slow
def test_headers_are_measured_as_the_table_measures_them(connect: Connect) -> None:
    connection = connect()

    @within
    @given(st.dictionaries(texts, texts, max_size=5), st.integers(-3, 3))
    @example({"a": '\x7f\x1f"\\/\u2028\U0001f600'}, 0)
    def check(headers: dict[str, str], beyond: int) -> None:
        if any(
            "\0" in text or any("\ud800" <= c <= "\udfff" for c in text) for pair in headers.items() for text in pair
        ):
            assert not accepts(lambda: OUTBOX.send(connection, "t", 1, headers=headers))
            return
        # Filled up to just below and just above the limit.
        size = len(json.dumps(headers | {"~": ""}, ensure_ascii=False).encode())
        headers = headers | {"~": "x" * (MAX_HEADERS_BYTES - size + beyond)}
        accepted = accepts(lambda: OUTBOX.send(connection, "t", 1, headers=headers))
        assert accepted == (beyond <= 0)
        try:
            connection.execute(
                "INSERT INTO mailroom.outbox (topic, value_json, headers) VALUES ('plain', '1', %s)", [Jsonb(headers)]
            )
        except errors.CheckViolation:
            assert not accepted
        else:
            assert [dict(message.headers) for message in sent(connection, "t")] == [headers] * accepted
            assert accepted
        connection.rollback()

    check()


def test_first_and_last_moment_that_python_accepts_the_table_accepts(connect: Connect) -> None:
    connection = connect()
    for moment in (datetime(1, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, 999999, UTC)):
        OUTBOX.send(connection, "t", 1, deliver_at=moment, expires_at=moment)
        OUTBOX.send_many(connection, [Outgoing("t", 1, deliver_at=moment, expires_at=moment)])
    assert count(connection) == 4


def test_delay_counts_from_the_call(connect: Connect) -> None:
    connection, waits = connect(), timedelta(seconds=90)
    before = datetime.now(UTC)
    delays: list[timedelta | float] = [90, 90.0, waits]
    for delay in delays:
        OUTBOX.send(connection, "t", 1, deliver_after=delay)
        OUTBOX.publish(connection, "t", 1, deliver_after=delay)
        OUTBOX.send_many(connection, [Outgoing("t", 2, deliver_after=delay)])
    moments = [message.deliver_at for message in sent(connection, "t")]
    assert len(moments) == 9
    assert all(moment and before + waits <= moment <= datetime.now(UTC) + waits for moment in moments)


def test_rolled_back_send_leaves_nothing(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, "t", 1)
    OUTBOX.send_many(connection, [Outgoing("t", 2)])
    connection.rollback()
    assert count(connection) == 0


def test_rolled_back_savepoint_takes_its_messages_along_and_no_others(connect: Connect) -> None:
    connection = connect()
    OUTBOX.send(connection, "t", 1)
    with connection.transaction(force_rollback=True):
        OUTBOX.send_many(connection, [Outgoing("t", 2)])
        OUTBOX.send(connection, "t", 3)
    OUTBOX.send(connection, "t", 4)
    connection.commit()
    assert [message.value for message in sent(connect(), "t")] == [1, 4]


def test_messages_of_one_transaction_keep_their_order(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    OUTBOX.send(connection, "shipping", 0, key="k")
    OUTBOX.send_many(connection, (Outgoing("shipping", n, key="k") for n in range(1, 2_500)))
    with connection.transaction():
        OUTBOX.send(connection, "shipping", 2_500, key="k")
    deliver(connection)
    messages = Inbox("shipping").reap(connection, "k", limit=10_000)
    assert [message.value for message in messages] == list(range(2_501))
    assert [message.clock for message in messages] == sorted({message.clock for message in messages})


def test_send_many_of_nothing_sends_nothing(connect: Connect) -> None:
    connection = connect()
    assert OUTBOX.send_many(connection, []) == 0
    assert count(connection) == 0


def test_event_reaches_every_subscriber_and_none_is_fine(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "one", ["order.paid"])
    create_inbox(connection, "two", ["order.paid"])
    OUTBOX.publish(connection, "order.paid", 1, key="k")
    OUTBOX.publish(connection, "nobody.hears", 2)
    assert deliver(connection) == 2
    for name in ("one", "two"):
        [message] = Inbox(name).reap_any(connection)
        assert (message.kind, message.value) == ("E", 1)
    assert connection.execute("SELECT FROM mailroom.dead_letter").rowcount == 0


def test_command_is_answered_on_the_topic_it_asked_for(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    create_inbox(connection, "answers")
    asked = OUTBOX.command(
        connection, "shipping", "ship", reply_to="answers", key="order-42", headers={"saga": "s", "x": "not carried"}
    )
    deliver(connection)
    [command] = Inbox("shipping").reap_any(connection)
    assert (command.kind, command.headers["reply_to"]) == ("C", "answers")
    OUTBOX.reply(connection, command, "shipped", status=400, headers={"more": "m", "status": "not this"})
    deliver(connection)
    [reply] = Inbox("answers").reap_any(connection)
    assert (reply.kind, reply.key, reply.value) == ("R", "order-42", "shipped")
    assert dict(reply.headers) == {
        "correlation": str(asked), "causation": str(asked), "status": "400", "saga": "s", "more": "m"
    }  # fmt: skip


def test_reply_to_a_message_that_asks_for_none_is_refused(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    OUTBOX.command(connection, "shipping", "ship")
    deliver(connection)
    [command] = Inbox("shipping").reap_any(connection)
    with pytest.raises(InvalidMessage, match="reply_to"):
        OUTBOX.reply(connection, command, "shipped")


def test_headers_that_are_none_are_refused_wherever_others_are_added(connect: Connect) -> None:
    connection = connect()
    create_inbox(connection, "shipping")
    OUTBOX.command(connection, "shipping", "ship", reply_to="answers")
    deliver(connection)
    [command] = Inbox("shipping").reap_any(connection)
    none: list[Any] = [5, 0, "saga=s", [("saga", "s")], {"saga": 1}]
    for headers in none:
        with pytest.raises(InvalidMessage, match="text to text"):
            OUTBOX.command(connection, "shipping", "ship", reply_to="answers", headers=headers)
        with pytest.raises(InvalidMessage, match="text to text"):
            OUTBOX.reply(connection, command, "shipped", headers=headers)


def test_command_whose_reply_could_not_be_sent_is_refused(connect: Connect) -> None:
    with pytest.raises(InvalidMessage, match="not valid"):
        OUTBOX.command(connect(), "shipping", "ship", reply_to="no topic")
