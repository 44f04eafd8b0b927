"""What a bridge makes of records, its own and those of others, however hostile."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailroom.bridges.arrival import Arrived, Incoming, Intake, Undecodable, incoming
from mailroom.errors import ConfigurationError
from mailroom.values import codec
from mailroom.values.names import MAX_VALUE_BYTES
from tests.bridges.messages import ID, PLACE, SENT
from tests.support.listed import listed

OTHER = UUID("9f3c1f6e-6f0a-4d57-9a36-0d6f1f7f2a11")


def record(value: bytes | None = b'{"n":1}', *headers: tuple[str, bytes | None], **other: Any) -> Arrived:
    """A foreign record."""
    key = other.get("key", b"k1")
    return Arrived(other.get("topic", "orders"), 2, other.get("offset", 41), key, value, headers, other.get("at", SENT))


def taken(arrived: Arrived, place: str = PLACE, **how: Any) -> Incoming:
    return incoming(arrived, Intake(**how), place)


def value_of(value: bytes | None, content_type: str | None = None, **how: Any) -> object:
    headers = [] if content_type is None else [("content-type", content_type.encode())]
    return codec.decode(taken(record(value, *headers), **how).value)


def refused(text: str, arrived: Arrived, **how: Any) -> None:
    with pytest.raises(Undecodable, match=text) as refusal:
        taken(arrived, **how)
    assert str(refusal.value).startswith(f"The record at {arrived.topic}[2]@41 of brokers is not a message: ")


# --- foreign records -------------------------------------------------------------------------------------------------


def test_a_plain_record_of_another_program_is_a_message() -> None:
    found = taken(record(b'{"n":1}', ("user", b"ada")))
    assert codec.decode(found.value) == {"n": 1}
    assert (found.topic, found.key, found.kind, found.message_type, found.event_type) == (
        "orders",
        "k1",
        "M",
        "U",
        None,
    )
    assert (found.headers, found.sent_at, found.expires_at, found.source) == ({"user": "ada"}, SENT, None, None)
    assert (found.sender, found.link, found.clock) == (None, None, None)


def test_a_cloud_event_is_taken_at_its_word() -> None:
    headers = [
        ("ce_specversion", b"1.0"), ("ce_id", str(OTHER).encode()), ("ce_type", b"order.paid"),
        ("ce_source", b"/shop"), ("ce_time", b"2026-08-02T14:30:45.123456+02:00"), ("ce_traceparent", b"00-1"),
        ("content-type", b"application/json; charset=utf-8"),
    ]  # fmt: skip
    found = taken(record(b'"x"', *headers, at=None))
    assert (found.message_id, found.topic, found.source, found.sent_at) == (OTHER, "order.paid", "/shop", SENT)
    assert found.kind == "M"
    assert found.headers == {name: raw.decode() for name, raw in headers} | {"traceparent": "00-1"}


def test_a_record_of_debezium_has_the_id_of_its_row() -> None:
    found = taken(record(b"{}", ("id", str(OTHER).encode()), topic="outbox.event.order"))
    assert (found.message_id, found.topic) == (OTHER, "outbox.event.order")


@listed("text", [b"42", b"{%s}", b"urn:uuid:%s", b"%s0"])
def test_an_id_that_is_no_uuid_is_made_of_the_place(text: bytes) -> None:
    given = record(b"{}", ("ce_id", text.replace(b"%s", str(OTHER).encode())))
    assert taken(given).message_id == taken(record()).message_id


def test_an_id_of_a_place_is_the_same_each_time_and_another_one_elsewhere() -> None:
    here = taken(record(b"1")).message_id
    assert here == taken(record(b"2", at=None)).message_id == UUID("e0fd6008-95ab-5142-b6a8-1d605c76fc7a")
    others = [taken(record(offset=42)), taken(record(topic="orders2")), taken(record(), "other")]
    assert len({here, *(each.message_id for each in others)}) == 4
    # No two places may run into each other.
    assert taken(record(topic="b"), 'a", "').message_id != taken(record(topic='", "b'), "a", as_topic="x").message_id


@listed("key", [None, b""])
def test_a_record_without_a_key_is_a_message_without_order(key: bytes | None) -> None:
    found = taken(record(key=key))
    assert found.key == str(found.message_id)


@listed("how", ["auto", "json", "cbor", "bytes", "text"])
def test_a_tombstone_says_that_its_key_was_deleted(how: str) -> None:
    found = taken(record(None), decode=how)
    assert (codec.decode(found.value), found.event_type, found.key) == (None, "D", "k1")


@listed("moment", [None, datetime(9999, 6, 1, tzinfo=UTC)])
def test_a_time_that_the_tables_cannot_have_is_none(moment: datetime | None) -> None:
    assert taken(record(at=moment)).sent_at is None


@listed("text", [b"yesterday", b"2026-13-01T00:00:00Z", b"\xff", b"20260802T123045Z", b"2026-08-02T12:30:45"])
def test_the_time_of_a_cloud_event_that_is_none_costs_nobody_the_message(text: bytes) -> None:
    assert taken(record(b"1", ("ce_time", text))).sent_at == SENT


@listed("text", [b"0001-01-01T00:00:00+14:00", b"9998-12-31T23:59:59-14:00"])
def test_a_time_that_is_out_of_range_only_in_utc_is_none(text: bytes) -> None:
    assert taken(record(b"1", ("ce_time", text), at=None)).sent_at is None


# --- values ----------------------------------------------------------------------------------------------------------


@listed(
    ("raw", "content_type", "value"),
    [
        (b'{"a":[1,2.5]}', None, {"a": [1, 2.5]}),
        (b"12", None, 12),
        (b"129.950000000000000001", None, Decimal("129.950000000000000001")),
        (b"paid \xc3\xbc", None, "paid ü"),
        (b"NaN", None, "NaN"),
        (b"", None, ""),
        (b"\xff\xfe", None, b"\xff\xfe"),
        (b"12", "text/plain; charset=utf-8", "12"),
        (b"12", "application/octet-stream", b"12"),
        (b"\x82\x01\x02", "application/cbor", [1, 2]),
        (b"\x82\x01\x02", "application/x+cbor", [1, 2]),
        (b"[1]", "APPLICATION/JSON ; charset=utf-8", [1]),
        (b'{"data":1}', "application/cloudevents+json", {"data": 1}),
        (b"<a/>", "application/xml", "<a/>"),
    ],
)
def test_a_value_is_what_its_type_says_or_what_it_looks_like(
    raw: bytes, content_type: str | None, value: object
) -> None:
    found = value_of(raw, content_type)
    assert (type(found), found) == (type(value), value)


@listed(("how", "value"), [("json", 12), ("cbor", -18), ("bytes", b"1"), ("text", "1")])
def test_who_is_told_what_a_value_is_asks_no_header(how: str, value: object) -> None:
    raw = {"json": b"12", "cbor": b"1"}.get(how, b"1")
    assert value_of(raw, "image/png", decode=how) == value


def test_cbor_stays_as_it_was_written() -> None:
    raw = bytes.fromhex("1b0000000000000007")  # wider than needed
    assert taken(record(raw), decode="cbor").value == raw


@listed(
    ("raw", "how", "text"),
    [
        (b"SECRET", "json", r"its value cannot be read, it is no JSON \(at character 0\)"),
        (b'{"SECRET":NaN}', "json", "NaN or Infinity"),
        (b"\xffSECRET", "json", "the value is not UTF-8"),
        (b"\xffSECRET", "text", "the value is not UTF-8"),
        (b"\xffSECRET", "cbor", "its value cannot be read"),
        (b"[" * 50 + b"]" * 50, "auto", "nested too deep, or has a number or text"),
        (b"[" * 100_000, "auto", "nested too deep"),
        (b'"SECRET\\ud800"', "auto", "a number or text that no value can have"),
        (b"9" * 1001, "auto", "a number or text that no value can have"),
        (b"9" * 9999, "auto", "more than 1,000 digits"),
        (b"[" + b"1," * 250_000 + b"1]", "auto", "more than 250,000 items"),
        (b"\0" * (MAX_VALUE_BYTES + 1), "bytes", "its value has 16,777,217 bytes, and 16,777,216 are allowed"),
        (b"\0" * MAX_VALUE_BYTES, "bytes", "more items or bytes"),
    ],
)
def test_a_value_that_no_message_can_have_says_why(raw: bytes, how: str, text: str) -> None:
    refused(text, record(raw), decode=how)
    with pytest.raises(Undecodable) as refusal:
        taken(record(raw), decode=how)
    assert "SECRET" not in str(refusal.value)


@listed("rest", [b"\x06paid", b"\xff\xfe"])
def test_value_of_a_schema_registry_is_bytes_or_refused_by_its_name(rest: bytes) -> None:
    """Confluent's wire format: a zero, the number of the schema in four bytes, and then Avro."""
    raw = b"\0\0\0\0\x11" + rest
    assert value_of(raw, None) == raw
    assert value_of(raw, None, decode="bytes") == raw
    for how in ("json", "cbor"):
        refused(
            r"as those of a schema registry do \(a byte 0, and the number 17 of its schema\)", record(raw), decode=how
        )


# --- keys ------------------------------------------------------------------------------------------------------------


@listed(("how", "key"), [("record", "k1"), ("header:user", "ada"), ("path:order.id", "42"), ("path:order.name", "n")])
def test_a_key_is_where_the_bridge_was_told(how: str, key: str) -> None:
    assert taken(record(b'{"order":{"id":42,"name":"n"}}', ("user", b"ada")), key=how).key == key


def test_a_key_is_found_in_cbor() -> None:
    assert taken(record(codec.encode({"id": ID})), key="path:id", decode="cbor").key == str(ID)


@listed(
    ("how", "text"),
    [
        ("header:user", "it lacks the header that has the key"),
        ("path:order", "its key is not a text, int or UUID"),
        ("path:order.no", "its value lacks the field that is the key"),
        ("path:order.id.no", "its value lacks the field"),
        ("path:flag", "its key is not a text, int or UUID"),
        ("path:none", "its key is not a text, int or UUID"),
        ("path:empty", "1 to 1,024 bytes"),
        ("path:long", "1 to 1,024 bytes"),
        ("path:nul", "a character that PostgreSQL cannot store"),
    ],
)
def test_a_key_that_is_not_there_or_cannot_be_one_is_refused(how: str, text: str) -> None:
    value = {"order": {"id": 1}, "flag": True, "none": None, "empty": "", "long": "k" * 1025, "nul": "\0"}
    refused(text, record(json.dumps(value).encode()), key=how)


@listed(
    ("key", "text"),
    [(b"\xff", "its key is not UTF-8: .* --key"), (b"k" * 1025, "1 to 1,024"), (b"a\0", "cannot store")],
)
def test_a_record_whose_key_no_message_can_have_is_refused(key: bytes, text: str) -> None:
    refused(text, record(key=key))


# --- topics and headers ----------------------------------------------------------------------------------------------


def test_the_topic_is_what_the_bridge_was_told_else_what_the_record_says() -> None:
    arrived = record(b"1", ("ce_type", b"order.paid"))
    assert taken(arrived).topic == "order.paid"
    assert taken(arrived, as_topic="{topic}").topic == "orders"
    assert taken(arrived, as_topic="shop.{topic}.v1").topic == "shop.orders.v1"
    assert taken(record(b"1", ("mailroom-topic", b"t"))).topic == "t"


@listed("topic", [b"1st", b"com.example/order", b"a b", b"t" * 201, b"\xc3\xbc"])
def test_a_topic_that_no_message_can_have_is_refused(topic: bytes) -> None:
    refused("its topic cannot be one of a message: name one by --as-topic", record(b"1", ("ce_type", topic)))


def test_headers_that_are_no_text_are_kept_as_base64() -> None:
    found = taken(
        record(b"1", ("number", b"\xff\0"), ("nul", b"a\0"), ("none", None), ("twice", b"1"), ("twice", b"2"))
    )
    assert found.headers == {"number-base64": "/wA=", "nul-base64": "YQA=", "none": "", "twice": "2"}


@listed(
    ("headers", "text"),
    [
        ([("a", b"x" * 8192)], "its headers have more than 8,192 bytes as JSON"),
        ([("a\0", b"x")], "its headers have a character that PostgreSQL cannot store"),
        ([("a\ud800", b"x")], "its headers have a character that PostgreSQL cannot store"),
        ([("mailroom-headers", b"[1]")], "mailroom-headers is not what Mailroom writes"),
        ([("mailroom-headers", b'{"a":1}')], "mailroom-headers is not what Mailroom writes"),
        ([("mailroom-headers", b"[" * 9999)], "mailroom-headers is not what Mailroom writes"),
        ([("mailroom-headers", b"\xff")], "mailroom-headers is not UTF-8"),
        ([("mailroom-kind", b"HU")], "mailroom-kind is not what Mailroom writes"),
        ([("mailroom-kind", b"MUX")], "mailroom-kind is not what Mailroom writes"),
        ([("mailroom-id", b"7")], "mailroom-id is not what Mailroom writes"),
        ([("mailroom-expires", b"soon")], "mailroom-expires is not what Mailroom writes"),
        ([("mailroom-expires", b"2026-02-30T00:00:00Z")], "mailroom-expires is not a time"),
        ([("mailroom-expires", b"9999-02-03T00:00:00Z")], "mailroom-expires is not a time, or outside"),
        ([("mailroom-time", b"2026-02-30T00:00:00Z")], "mailroom-time is not a time"),
        ([("ce_type", b"\xff")], "ce_type is not UTF-8"),
    ],
)
def test_headers_that_no_message_can_have_are_refused(headers: Sequence[tuple[str, bytes]], text: str) -> None:
    refused(text, record(b"1", *headers))


CARRIAGE = {"mailroom-origin": str(OTHER).encode(), "mailroom-link": b"3", "mailroom-clock": b"77"}


def test_whoever_says_what_a_bridge_of_ours_says_is_one() -> None:
    found = taken(record(b"1", *CARRIAGE.items()))
    assert (found.sender, found.link, found.clock) == (OTHER, 3, 77)


@listed(
    "changed",
    [{"mailroom-origin": None}, {"mailroom-link": None}, {"mailroom-clock": None}, {"mailroom-clock": b"9" * 19},
     {"mailroom-clock": b"-1"}, {"mailroom-clock": b"0"}, {"mailroom-clock": "٣".encode()}, {"mailroom-link": b"1.0"},
     {"mailroom-link": b"1" * 20}, {"mailroom-origin": b"paris"}],
)  # fmt: skip
def test_a_bridge_says_all_of_it_or_nothing(changed: dict[str, bytes | None]) -> None:
    headers = [(name, raw) for name, raw in (CARRIAGE | changed).items() if raw is not None]
    refused("mailroom-", record(b"1", *headers))


# --- hostile ---------------------------------------------------------------------------------------------------------

OURS = [
    *("ce_id", "ce_type", "ce_time", "ce_source", "ce_traceparent", "content-type", "id", "traceparent"),
    *("mailroom-id", "mailroom-topic", "mailroom-time", "mailroom-kind", "mailroom-origin", "mailroom-link"),
    *("mailroom-clock", "mailroom-expires", "mailroom-headers"),
]
TEXTS = [
    *(b"application/json", b"application/cbor", b"text/plain", b"3", b"77", b"MU", b"EUD", str(OTHER).encode()),
    *(b"2026-08-02T12:30:45Z", b"0001-01-01T00:00:00+14:00", b'{"a":"b"}', b"order.paid"),
]
raws = st.binary(max_size=40) | st.sampled_from(TEXTS)
hostile = st.builds(
    Arrived,
    st.text(st.characters(), max_size=5) | st.just("orders"),
    st.integers(0, 5),
    st.integers(0, 2**63),
    st.none() | raws,
    st.none()
    | raws
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()),
    st.lists(st.tuples(st.sampled_from(OURS) | st.text(st.characters(), max_size=5), st.none() | raws), max_size=8),
    st.none() | st.just(SENT),
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    hostile,
    st.sampled_from(["auto", "json", "cbor", "bytes", "text"]),
    st.sampled_from(["record", "path:a", "header:id"]),
)
def test_whatever_comes_is_a_message_or_refused(arrived: Arrived, decode: Any, key: str) -> None:
    how = Intake(decode=decode, key=key)
    try:
        found = incoming(arrived, how, PLACE)
    except Undecodable:
        return
    codec.decode(found.value)
    assert found.key
    assert (found.sender is None) == (found.link is None) == (found.clock is None)
    assert found == incoming(arrived, how, PLACE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(OURS), st.binary(max_size=4), st.sampled_from(["auto", "json", "cbor", "text"]))
def test_no_refusal_shows_content(name: str, salt: bytes, decode: Any) -> None:
    secret = b"S3CR3T" + salt
    value = b'{"S3CR3T": "S3CR3T' + salt
    try:
        found = incoming(record(value, (name, secret), key=secret), Intake(decode=decode), PLACE)
    except Undecodable as error:
        assert "S3CR3T" not in str(error) + repr(error)  # noqa: PT017  # both outcomes are right
    else:
        assert "S3CR3T" not in repr(found).replace(repr(found.key), "").replace(repr(found.source), "").replace(
            repr(found.topic), ""
        )


# --- the intake ------------------------------------------------------------------------------------------------------


@listed(
    ("wrong", "text"),
    [
        ({"as_topic": ""}, "as_topic is ''; give text in which {topic} may stand"),
        ({"as_topic": "{key}"}, "no other braces"),
        ({"key": "value"}, "key is 'value'; give record, header:NAME, or path:"),
        ({"key": "header:"}, "give record, header:NAME, or path:"),
        ({"key": "recordx"}, "give record, header:NAME, or path:"),
        ({"key": "path:a..b"}, "give record, header:NAME, or path:"),
        ({"key": "path:.a"}, "give record, header:NAME, or path:"),
        ({"key": None}, "give record, header:NAME, or path:"),
        ({"decode": "avro"}, "decode is 'avro'; give one of auto, json, cbor, bytes, text"),
    ],
)
def test_an_intake_that_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Intake(**wrong)
    assert text in str(refusal.value)
    assert refusal.value.code == "MR-invalid-argument"


def test_a_message_that_expires_says_so() -> None:
    found = taken(record(b"1", ("mailroom-expires", b"2026-08-02T13:30:45.123456Z"), ("mailroom-kind", b"CDU")))
    assert found.expires_at == SENT + timedelta(hours=1)
    assert (found.kind, found.message_type, found.event_type) == ("C", "D", "U")
