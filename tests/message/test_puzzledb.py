"""PuzzleDB's messages: the bytes of its own encoder, whatever else means the same, and what Mailroom makes of them."""

import itertools
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import UUID

import cbor2
import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inbox import Inbox
from mailroom import create_inbox
from mailroom.errors import DecodeError, EncodeError, InvalidMessage
from mailroom.message.message import Message
from mailroom.puzzledb import FIELDS, MessageObject, encode
from mailroom.testing import deliver
from mailroom.values import codec
from mailroom.values.codec import decode
from mailroom.values.names import MAX_AFTER_CLOCK
from outbox import Outbox
from tests.message.test_codec import hostile, supported
from tests.support.databases import Connect
from tests.support.listed import listed

GOLDEN = Path(__file__).parents[1] / "data" / "golden_puzzledb.txt"
ID = UUID(bytes=bytes(range(1, 17)))
CREATED = MessageObject("O", "C", b"\xa0", ID, "puzzledb", "node1", 42)
LONG = {size: b"\xf6" * size for size in (23, 24, 254, 255, 256)}
OBJECTS: dict[str, MessageObject] = {
    "sorted": CREATED,
    "struct_order": CREATED,
    "reversed": CREATED,
    "wide_id": replace(CREATED, from_id=UUID("00171819-7f80-feff-0000-000000000000")),
    "empty": MessageObject("U"),
    "largest_clock": replace(CREATED, clock=2**64 - 1),
    "object_created": CREATED,
    "object_updated": replace(CREATED, event="U"),
    "object_deleted": replace(CREATED, event="D"),
    "database_updated": replace(CREATED, type="D", event="U"),
    "collection_deleted": replace(CREATED, type="C", event="D"),
    "user_created": replace(CREATED, type="U"),
    "user_event_1": replace(CREATED, type="U", event="\x01"),
    "user_event_23": replace(CREATED, type="U", event="\x17"),
    "user_event_24": replace(CREATED, type="U", event="\x18"),
    "user_event_255": replace(CREATED, type="U", event="\xff"),
    **{f"object_of_{size}_bytes": replace(CREATED, object=content) for size, content in LONG.items()},
    "host_of_254_bytes": replace(CREATED, from_host="n" * 254),
    "host_of_255_bytes": replace(CREATED, from_host="n" * 255),
    "host_of_255_bytes_and_fewer_letters": replace(CREATED, from_host="é" * 127 + "n"),
}
VALUES: dict[str, object] = {
    "value_struct": {"Value": 9},
    "value_negative": {"Value": -5},
    "value_small_integers": [23, 24, -24, -25, 1, -1, 1, -1],
    "value_database": {"Database": "db"},
    "value_collection": {"Collection": "c", "Database": "db"},
    "value_node": {
        "Clock": 42,
        "Cluster": "puzzledb",
        "Host": "node1",
        "ID": str(UUID(int=7)),
        "Status": "up",
        "Time": datetime(2026, 2, 3, 20, 5, 23, tzinfo=timezone(timedelta(hours=9))),
    },
    "value_others": [True, False, None, 1.5, -2.25, b"", "", [], {}],
    "value_array_of_24": [None] * 24,
}
IN_ANOTHER_ORDER = {"struct_order", "reversed"}
WRITTEN_OTHERWISE = {"value_small_integers", "value_others"}  # Go's types of fewer than eight bytes


def golden() -> dict[str, bytes]:
    records = re.split(r"^== (\w+)\n", GOLDEN.read_text(), flags=re.M)[1:]
    return {
        name: bytes.fromhex(re.sub(r"#.*", "", text)) for name, text in zip(records[::2], records[1::2], strict=True)
    }


def field_map(**fields: object) -> dict[str, Any]:
    """The map of a message object as a plain value."""
    return {
        "FromID": list(ID.bytes),
        "FromCluster": "puzzledb",
        "FromHost": "node1",
        "MsgClock": 42,
        "MsgType": ord("O"),
        "EvtType": ord("C"),
        "EncBytes": b"\xa0",
    } | fields


# --- the bytes of PuzzleDB's programs -------------------------------------------------------------------------------


def test_every_golden_record_has_what_it_must_mean() -> None:
    assert golden().keys() == OBJECTS.keys() | VALUES.keys()


@listed("name", OBJECTS)
def test_what_go_cbor_writes_is_read(name: str) -> None:
    assert MessageObject.loads(golden()[name]) == OBJECTS[name]


@listed("name", sorted(OBJECTS.keys() - IN_ANOTHER_ORDER))
def test_what_is_written_are_the_bytes_of_go_cbor(name: str) -> None:
    assert OBJECTS[name].dumps(deleted="O") == golden()[name]


@listed("name", VALUES)
def test_objects_of_go_cbor_are_values(name: str) -> None:
    assert repr(decode(golden()[name])) == repr(VALUES[name])


@listed("name", sorted(VALUES.keys() - WRITTEN_OTHERWISE))
def test_object_is_written_with_the_bytes_of_go_cbor(name: str) -> None:
    assert encode(VALUES[name]) == golden()[name]


# cbor/decoder.go, Decode, and cbor/func.go, readNint8Bytes to readNint64Bytes: a negative integer is read into a signed
# one of its width. A shorter form of these is misread, without an error.
@listed("number", [-129, -200, -(2**15) - 1, -(2**31) - 1, -(2**63)])
def test_negative_integer_is_written_so_that_go_cbor_reads_it(number: int) -> None:
    assert encode(number) == b"\x3b" + (-1 - number).to_bytes(8)
    with pytest.raises(EncodeError, match="below -2\\^63, which go-cbor misreads: send it as text"):
        encode([-(2**63) - 1])


# cbor/decoder.go, Decode: itemMap[key] panics for a key that is a []byte.
def test_key_of_bytes_would_be_the_end_of_a_program_of_puzzledb_s() -> None:
    with pytest.raises(EncodeError, match="a key that is bytes"):
        encode({"outer": {b"key": 1}})


def test_times_are_written_as_go_writes_them() -> None:
    moment = datetime(2026, 2, 3, 20, 5, 23, 500_000, tzinfo=UTC)
    assert encode(moment) == b"\xc0\x78\x1b2026-02-03T20:05:23.500000Z"


# cbor/encoder.go, encodeNumberOfBytes: n < math.MaxUint16 is false for 65,535, which goes out in four bytes.
@listed(("size", "head"), [(65_534, "59 fffe"), (65_535, "5a 0000ffff"), (65_536, "5a 00010000")])
def test_long_object_has_the_head_that_go_cbor_writes(size: int, head: str) -> None:
    short, content = bytes.fromhex("41 a0"), b"\xf6" * size
    raw = golden()["sorted"].replace(short, bytes.fromhex(head) + content)
    long = replace(CREATED, object=content)
    assert long.dumps() == raw
    assert MessageObject.loads(raw) == long


@listed("kind", ["O", "D", "C", "U"])
def test_deleted_is_o_in_the_code_of_puzzledb_and_d_in_its_specification(kind: Any) -> None:
    deleted = replace(CREATED, type=kind, event="D")
    by_code, by_specification = (cbor2.dumps(field_map(MsgType=ord(kind), EvtType=ord(letter))) for letter in "OD")
    assert MessageObject.loads(by_code) == MessageObject.loads(by_specification) == deleted
    assert cbor2.loads(deleted.dumps())["EvtType"] == ord("D")
    assert cbor2.loads(deleted.dumps(deleted="O"))["EvtType"] == ord("O")


# --- everything else that means the same ----------------------------------------------------------------------------


def test_fields_may_come_in_any_order() -> None:
    pairs = [cbor2.dumps(name) + cbor2.dumps(value) for name, value in field_map().items()]
    assert {MessageObject.loads(b"\xa7" + b"".join(order)) for order in itertools.permutations(pairs)} == {CREATED}


def wide(value: object, width: int) -> bytes:
    """The value as CBOR whose integers and lengths all have `width` bytes."""

    def head(major: int, argument: int) -> bytes:
        return bytes([major << 5 | 23 + width.bit_length()]) + argument.to_bytes(width)

    match value:
        case int():
            return head(0, value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case list():
            return head(4, len(value)) + b"".join(wide(each, width) for each in value)
        case dict():
            return head(5, len(value)) + b"".join(wide(each, width) for pair in value.items() for each in pair)
        case _:
            raise AssertionError(value)


@listed("width", [1, 2, 4, 8])
def test_integers_and_lengths_may_have_any_width(width: int) -> None:
    assert MessageObject.loads(wide(field_map(), width)) == CREATED
    assert MessageObject.loads(cbor2.dumps(field_map(), canonical=True)) == CREATED


@listed("given", [list(ID.bytes), ID.bytes, ID, str(ID), str(ID).upper()])
def test_id_may_be_integers_or_bytes_or_a_tag_or_text(given: object) -> None:
    assert MessageObject.loads(cbor2.dumps(field_map(FromID=given))).from_id == ID


@listed("missing", ["EncBytes", "EvtType", "FromCluster", "FromHost", "FromID", "MsgClock"])
def test_field_that_is_missing_is_what_it_is_in_go(missing: str) -> None:
    fields = field_map()
    del fields[missing]
    empty = {
        "EncBytes": replace(CREATED, object=b""),
        "EvtType": replace(CREATED, event=None),
        "FromCluster": replace(CREATED, from_cluster=""),
        "FromHost": replace(CREATED, from_host=""),
        "FromID": replace(CREATED, from_id=UUID(int=0)),
        "MsgClock": replace(CREATED, clock=0),
    }
    assert MessageObject.loads(cbor2.dumps(fields)) == empty[missing]


# --- what is refused ------------------------------------------------------------------------------------------------

SECRET = "SECRET"
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "premature end of stream"),
    "no map": (cbor2.dumps([1]), "it is not a map"),
    "cut off": (golden()["sorted"][:-1], "premature end of stream"),
    "bytes behind": (golden()["sorted"] + b"\x00", "more bytes follow after its end"),
    "a field twice": (b"\xa2" + (cbor2.dumps("MsgType") + b"\x00") * 2, "Duplicate map key"),
    "indefinite": (b"\xbf" + golden()["sorted"][1:] + b"\xff", "indefinite length"),
    "another field": (
        cbor2.dumps(field_map(SECRET=1)),
        "it has a field that is none of EncBytes, EvtType, FromCluster",
    ),
    "a field in bytes": (cbor2.dumps({b"MsgType": 79}), "it has a field that is none of"),
    "no type": (cbor2.dumps({}), "its type is none of O, D, C, U"),
    "another type": (cbor2.dumps(field_map(MsgType=88)), "its type is none of O, D, C, U"),
    "type of two bytes": (cbor2.dumps(field_map(MsgType=256)), "its MsgType is not an integer from 0 to 255"),
    "type in text": (cbor2.dumps(field_map(MsgType="O")), "its MsgType is not an integer from 0 to 255"),
    "type true": (cbor2.dumps(field_map(MsgType=True)), "its MsgType is not an integer"),
    "another event": (cbor2.dumps(field_map(EvtType=88)), "its event is none of C, U, D."),
    "event of two bytes": (cbor2.dumps(field_map(EvtType=256)), "its EvtType is not an integer from 0 to 255"),
    "negative clock": (
        cbor2.dumps(field_map(MsgClock=-1)),
        "its MsgClock is not an integer from 0 to 18446744073709551615",
    ),
    "longer clock": (cbor2.dumps(field_map(MsgClock=2**64)), "beyond 64 bits"),
    "clock with a point": (cbor2.dumps(field_map(MsgClock=1.0)), "its MsgClock is not an integer"),
    "object in text": (cbor2.dumps(field_map(EncBytes=SECRET)), "its object is not bytes"),
    "no object": (cbor2.dumps(field_map(EncBytes=None)), "its object is not bytes"),
    "host in bytes": (cbor2.dumps(field_map(FromHost=b"SECRET")), "its from_cluster or from_host is not text"),
    "cluster null": (cbor2.dumps(field_map(FromCluster=None)), "its from_cluster or from_host is not text"),
    "NUL in the host": (cbor2.dumps(field_map(FromHost="SECRET\0")), "from_host of a message object contains a NUL"),
    "host not in UTF-8": (cbor2.dumps(field_map()).replace(b"node1", b"node\xff"), "error decoding text string"),
    "id of 15 integers": (cbor2.dumps(field_map(FromID=[0] * 15)), "its FromID is not a UUID"),
    "id of wide integers": (cbor2.dumps(field_map(FromID=[256] * 16)), "its FromID is not a UUID"),
    "id of truths": (cbor2.dumps(field_map(FromID=[True] * 16)), "its FromID is not a UUID"),
    "id of 17 bytes": (cbor2.dumps(field_map(FromID=bytes(17))), "its FromID is not a UUID"),
    "id in other text": (cbor2.dumps(field_map(FromID="+" + "1" * 31)), "its FromID is not a UUID"),
    "id a number": (cbor2.dumps(field_map(FromID=7)), "its FromID is not a UUID"),
    "id of another tag": (cbor2.dumps(field_map(FromID=cbor2.CBORTag(99, ID.bytes))), "tag 99 is not one of"),
}


@listed("name", REFUSED)
def test_what_is_no_message_object_is_refused_with_what_is_wrong(name: str) -> None:
    raw, fault = REFUSED[name]
    with pytest.raises(DecodeError) as refusal:
        MessageObject.loads(raw)
    assert fault in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert SECRET not in "".join(format_exception(refusal.value))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"type": "X"}, "its type is none of O, D, C, U"),
    "type in bytes": ({"type": b"O"}, "its type is none of"),
    "event": ({"event": "X"}, "its event is none of C, U, D."),
    "user's event": ({"type": "U", "event": "XY"}, "its event is none of C, U, D, or with type U another character"),
    "user's wide event": ({"type": "U", "event": "\u0100"}, "of one byte"),
    "user's event 0": ({"type": "U", "event": "\0"}, "of one byte"),
    "event that is read as D": ({"type": "U", "event": "O"}, "its event is none of"),
    "event as a number": ({"type": "U", "event": 67}, "its event is none of"),
    "object": ({"object": "text"}, "its object is not bytes, such as"),
    "id": ({"from_id": str(ID)}, "its from_id is not a UUID"),
    "host": ({"from_host": None}, "its from_cluster or from_host is not text"),
    "surrogate": ({"from_host": "\ud800"}, "from_host of a message object is not valid Unicode"),
    "negative clock": ({"clock": -1}, "its clock is not an integer of 64 bits"),
    "long clock": ({"clock": 2**64}, "its clock is not an integer of 64 bits"),
    "true as a clock": ({"clock": True}, "its clock is not an integer"),
}


@listed("name", WRONG)
def test_what_could_not_be_read_again_cannot_be_made(name: str) -> None:
    wrong, fault = WRONG[name]
    fields: dict[str, Any] = {"type": "O"} | wrong
    with pytest.raises(InvalidMessage, match=re.escape(fault)):
        MessageObject(**fields)


def test_object_is_not_shown() -> None:
    assert SECRET not in repr(MessageObject("U", None, SECRET.encode()))


# --- any bytes ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
events = st.sampled_from([None, "C", "U", "D"])
own_events = st.integers(1, 255).map(chr).filter(lambda event: event != "O")
clocks = st.integers(0, 2**64 - 1)
objects = st.one_of(
    st.builds(MessageObject, st.sampled_from("ODC"), events, st.binary(), st.uuids(), texts, texts, clocks),
    st.builds(MessageObject, st.just("U"), events | own_events, st.binary(), st.uuids(), texts, texts, clocks),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary() | st.uuids(),
    lambda inner: st.lists(inner, max_size=17) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)
# Maps that are nearly message objects: some fields missing, wrong or unknown.
fields_of_some = st.dictionaries(
    st.sampled_from([*FIELDS, "FromId"]), plain | st.integers(0, 300) | st.lists(st.integers(0, 260), max_size=17)
)
near = st.one_of(plain, fields_of_some, st.builds(dict.__or__, st.builds(field_map), fields_of_some)).map(cbor2.dumps)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The bytes of a message object with some changed, put in or left out."""
    raw = draw(objects).dumps() if draw(st.booleans()) else draw(near)
    at, length = draw(st.integers(0, len(raw))), draw(st.integers(0, 3))
    return raw[:at] + draw(st.binary(max_size=3)) + raw[at + length :]


@given(objects, st.sampled_from(["D", "O"]))
@settings(deadline=None)
def test_what_is_written_is_read_as_the_same(wanted: MessageObject, deleted: Any) -> None:
    raw = wanted.dumps(deleted=deleted)
    assert MessageObject.loads(raw) == wanted
    assert raw == wanted.dumps(deleted=deleted)
    assert list(cbor2.loads(raw)) == sorted(FIELDS)


@pytest.mark.slow
@given(supported | hostile)
@settings(deadline=None)
def test_object_comes_back_as_codec_brings_it_back_or_is_refused(value: object) -> None:
    try:
        raw = encode(value)
    except EncodeError:
        return
    assert decode(raw) == value == decode(codec.encode(value))


@pytest.mark.slow
@given(st.binary() | near | damaged())
@example(cbor2.dumps(field_map(FromID=[[]] * 16)))
@example(b"\xa1" * 40)
@example(b"\xbb" + b"\xff" * 8)
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_message_object_or_one_clear_error(raw: bytes) -> None:
    try:
        found = MessageObject.loads(raw)
    except DecodeError as error:
        told = str(error)
        assert re.fullmatch(r"(This cannot be a message object of PuzzleDB: |The from_)[^\n]{5,300}\.", told)
    else:
        assert MessageObject.loads(found.dumps()) == found


# --- as messages of Mailroom ----------------------------------------------------------------------------------------


Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(connect: Connect) -> Connection:
    opened = connect()
    create_inbox(opened, "puzzles")
    return opened


def arrived(connection: Connection, *sent: MessageObject) -> list[Message]:
    """Send message objects to `puzzles`, and return all that arrives."""
    Outbox().send_many(connection, [each.outgoing("puzzles", key="all") for each in sent])
    deliver(connection)
    return Inbox("puzzles").reap(connection, "all")


def test_message_objects_go_through_mailroom_and_only_their_clocks_change(connection: Connection) -> None:
    sent = [each for each in OBJECTS.values() if each.clock <= MAX_AFTER_CLOCK]
    messages = arrived(connection, *sent)
    wanted = [replace(each, clock=message.sent_clock) for each, message in zip(sent, messages, strict=True)]
    assert [MessageObject.of(message) for message in messages] == wanted


def test_message_carries_the_parts_of_the_object(connection: Connection) -> None:
    [message] = arrived(connection, CREATED)
    assert (message.message_type, message.event_type, message.value, message.kind) == ("O", "C", b"\xa0", "M")
    assert message.headers == {"from_id": str(ID), "from_cluster": "puzzledb", "from_host": "node1"}
    assert message.expires_at is None


def test_message_is_stamped_later_than_the_clock_that_it_comes_with(connection: Connection) -> None:
    first, second = arrived(connection, replace(CREATED, clock=1_000), CREATED)
    assert 1_000 < first.clock < second.clock
    assert MessageObject.of(first).clock == first.sent_clock


def test_clock_is_that_of_the_sending(connection: Connection) -> None:
    arrived(connection, CREATED)  # raises the clock
    Outbox().send_many(connection, [CREATED.outgoing("puzzles", key="all")])
    deliver(connection)
    connection.execute("UPDATE mailroom.inbox SET sent_clock = 7")  # as of a message that another node has stamped
    [message] = arrived(connection)
    assert MessageObject.of(message).clock == 7 < message.clock


def test_clock_above_what_mailroom_counts_to_is_refused_at_the_send(connection: Connection) -> None:
    [message] = arrived(connection, replace(CREATED, clock=2**32))
    assert message.clock > 2**32
    with pytest.raises(psycopg.errors.CheckViolation, match="beyond the clock of this node"), connection.transaction():
        arrived(connection, replace(CREATED, clock=MAX_AFTER_CLOCK))
    with pytest.raises(InvalidMessage, match="after_clock must be an int from 0"):
        arrived(connection, replace(CREATED, clock=MAX_AFTER_CLOCK + 1))


def test_event_of_the_user_s_own_is_a_header(connection: Connection) -> None:
    [message] = arrived(connection, MessageObject("U", "\xff"))
    assert (message.event_type, message.headers["user_event"]) == (None, "255")


def test_age_and_kind_are_the_message_s(connection: Connection) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    outgoing = CREATED.outgoing("puzzles", key="all", kind="C", expires_at=tomorrow)
    Outbox().send_many(connection, [outgoing])
    [message] = arrived(connection)
    assert (message.kind, message.expires_at) == ("C", tomorrow)
    Outbox().send_many(connection, [CREATED.outgoing("puzzles", key="all", expires_at=tomorrow)])
    deliver(connection, now=tomorrow + timedelta(seconds=1))
    assert arrived(connection) == []


def test_any_message_is_a_message_object(connection: Connection) -> None:
    Outbox().send(connection, "puzzles", {"new": 1}, key="all", message_type="O", event_type="U")
    connection.execute(
        """INSERT INTO mailroom.outbox (topic, key, value_json) VALUES ('puzzles', 'all', '{"new": [1.5, null]}')"""
    )
    plain, by_hand = arrived(connection)
    assert MessageObject.of(plain) == MessageObject("O", "U", encode({"new": 1}), plain.origin, clock=plain.sent_clock)
    assert decode(MessageObject.of(by_hand).object) == {"new": [1.5, None]}
    assert MessageObject.of(by_hand).event is None


@listed(
    ("headers", "fault"),
    [
        ({"from_id": "SECRET"}, "its from_id is not a UUID"),
        ({"user_event": "SECRET"}, "its header user_event is not an integer from 1 to 255"),
        ({"user_event": "0"}, "its event is none of"),
        ({"user_event": "256"}, "its event is none of"),
        ({"user_event": "79"}, "its event is none of"),
    ],
)
def test_message_with_headers_that_cannot_be_read_is_one_clear_error(
    connection: Connection, headers: dict[str, str], fault: str
) -> None:
    Outbox().send(connection, "puzzles", b"", key="all", headers=headers)
    [message] = arrived(connection)
    with pytest.raises(DecodeError) as refusal:
        MessageObject.of(message)
    assert fault in str(refusal.value)
    assert SECRET not in "".join(format_exception(refusal.value))


def test_value_that_cannot_be_read_is_a_decode_error(connection: Connection) -> None:
    insert = "INSERT INTO mailroom.outbox (topic, key, value, value_json) VALUES ('puzzles', 'all', %s, %s)"
    connection.execute(insert, [b"\xff", None])
    connection.execute(insert, [None, str(10**30)])
    broken, long = arrived(connection)
    with pytest.raises(DecodeError, match=r"The value cannot be decoded: .* Message\.raw still holds its bytes"):
        MessageObject.of(broken)
    with pytest.raises(DecodeError, match="beyond 64 bits"):
        MessageObject.of(long)
