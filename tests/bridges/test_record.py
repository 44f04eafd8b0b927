"""What a bridge writes to a broker."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.links.at_source.fetch import fetching
from mailroom.bridges.record import Carried, Form, Unencodable, carried, fill, record_of
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from mailroom.values import codec
from tests.bridges.messages import ID, SENDER, SENT, message
from tests.golden_records import GOLDEN, golden
from tests.support.listed import listed
from tests.support.node import Node


def by_json(text: str | None) -> Carried:
    return replace(message(), value=None, value_json=text)


def headers_of(given: Any, form: Form | None = None) -> dict[str, str]:
    return {name: raw.decode() for name, raw in record_of(given, form or Form(), SENDER).headers}


def test_records_are_the_same_bytes_as_ever() -> None:
    assert GOLDEN.read_text() == golden(), (
        "programs of others read these. If it has to be: python -m tests.golden_records"
    )


def test_rows_of_transit_are_read_as_they_were_written(node: Node) -> None:
    insert = """
        INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type,
                                      event_type, value, value_json, headers, expires_at, after_clock, source, sent_at)
        VALUES (1, %s, 77, %s, %s, 'order.paid', 'k1', %s, 'U', %s, %s, %s, %s, %s, 7, 'shop', %s)
    """
    raw = codec.encode("paid")
    for seq, row in enumerate(
        [("E", "U", raw, None, '{"user": "ada"}', SENT), ("M", None, None, '{"n": 1}', None, None),
         ("H", None, None, None, None, None)], start=1,
    ):  # fmt: skip
        kind, event, value, value_json, headers, expires = row
        node.connection.execute(insert, [seq, SENT, ID, kind, event, value, value_json, headers, expires, SENT])
    batch = run(node.connection, fetching("mailroom", 1, after=0, to=9, decoded=True))
    first, second, mark = carried(batch.columns)  # type: ignore[arg-type]  # decoded: arrays
    assert first == message("paid", seq=1, event_type="U", headers={"user": "ada"}, expires_at=SENT, after_clock=7)
    assert second == replace(by_json('{"n": 1}'), seq=2, kind="M", after_clock=7)
    assert (first.is_mark, mark.is_mark) == (False, True)
    assert carried(run(node.connection, fetching("mailroom", 2, after=0, to=9, decoded=True)).columns) == []  # type: ignore[arg-type]


def test_a_mark_has_no_record() -> None:
    with pytest.raises(ValueError, match="a mark is not a message"):
        record_of(message(kind="H"), Form(), SENDER)


def test_a_record_tells_of_which_row_it_is() -> None:
    record = record_of(message(seq=9), Form(), SENDER)
    assert (record.seq, record.clock, record.id, record.at) == (9, 77, ID, SENT)


def test_nothing_shows_a_value_or_a_header() -> None:
    given = replace(message("SECRET", headers={"user": "SECRET"}), value_json='"SECRET"')
    assert "SECRET" not in repr(given) + repr(record_of(given, Form(), SENDER))


def test_a_message_without_order_has_no_key() -> None:
    record = record_of(message(key=str(ID)), Form(), SENDER)
    assert record.key is None
    assert not {"ce_subject", "ce_partitionkey"} & {name for name, _ in record.headers}


@listed(
    ("event_type", "tombstones", "is_one"),
    [("D", True, True), ("D", False, False), ("U", True, False), (None, True, False)],
)
def test_a_tombstone_is_only_what_was_deleted_and_on_request(
    event_type: str | None, tombstones: bool, is_one: bool
) -> None:
    record = record_of(message(event_type=event_type), Form(tombstones=tombstones), SENDER)
    assert record.value == (None if is_one else b'"paid"')
    assert ("content-type" in dict(record.headers)) is not is_one


def test_a_value_that_is_null_is_no_tombstone() -> None:
    assert record_of(message(None, event_type="D"), Form(), SENDER).value == b"null"
    assert record_of(message(None, event_type="D"), Form(encode="cbor"), SENDER).value == b"\xf6"


def test_the_sequence_can_be_compared_as_text() -> None:
    low, high = (headers_of(message(sent_clock=clock))["ce_sequence"] for clock in (9, 2**62))
    assert len(low) == len(high) == 19
    assert low < high


@listed(
    ("name", "text"),
    [("id", "x"), ("ID", "x"), ("Content-Type", "x"), ("ce_x", "x"), ("CE_ID", "x"), ("Mailroom-Kind", "x"), ("", "x"),
     ("a b", "x"), ("ä", "x"), ("a:b", "x"), ("a", "b\r\nc: d"), ("a", " b"), ("a", "b ")],
)  # fmt: skip
def test_a_header_that_cannot_stand_by_itself_is_set_apart(name: str, text: str) -> None:
    found = headers_of(message(headers={name: text, "user": "ada"}))
    assert json.loads(found["mailroom-headers"]) == {name: text}
    assert found["user"] == "ada"
    assert text not in [other for header, other in found.items() if header == name]


@listed("name", ["user", "x.y_z-1", "traceparent", "identity", "certain"])
def test_other_headers_stand_by_themselves(name: str) -> None:
    found = headers_of(message(headers={name: "Zürich 1"}))
    assert found[name] == "Zürich 1"
    assert "mailroom-headers" not in found


@listed(
    ("given", "form", "text"),
    [
        (message({"AA==": 1, b"\0": 2}), Form(), "two keys of a map .*--encode cbor"),
        (by_json("[" * 40 + "]" * 40), Form(encode="cbor"), "nested too deep.*--encode json"),
        (by_json("9" * 1100), Form(encode="cbor"), "long numbers.*--encode json"),
        (by_json(f"[{'1,' * 250_000}1]"), Form(encode="cbor"), "too large.*--encode json"),
    ],
)  # fmt: skip
def test_what_has_no_record_says_what_to_do(given: Any, form: Form, text: str) -> None:
    with pytest.raises(Unencodable, match=text) as refusal:
        record_of(given, form, SENDER)
    assert str(ID) in str(refusal.value)


@listed("raw", [b"", b"\xff", b"\x61", b"\x66SECRETx"])
def test_a_value_that_is_no_cbor_is_refused_and_not_shown(raw: bytes) -> None:
    given = replace(message(), value=raw)
    with pytest.raises(Unencodable, match=r"its value cannot be read.*Correct its sender") as refusal:
        record_of(given, Form(), SENDER)
    assert "SECRET" not in str(refusal.value)


def test_a_row_without_any_value_is_refused() -> None:
    with pytest.raises(Unencodable, match="it has no value"):
        record_of(by_json(None), Form(encode="cbor"), SENDER)


# --- the form --------------------------------------------------------------------------------------------------------


def test_each_format_names_the_topic_in_its_way_unless_it_is_told() -> None:
    assert [Form(format=form).topic for form in ("cloudevents", "debezium", "plain")] == [
        "{topic}", "outbox.event.{topic}", "{topic}"
    ]  # fmt: skip
    assert Form(topic="{topic}", format="debezium").topic == "{topic}"
    assert fill("a.{topic}.b", "order.paid") == "a.order.paid.b"
    assert record_of(message(), Form(topic="orders"), SENDER).topic == "orders"


@listed(
    ("wrong", "text"),
    [
        ({"topic": "{key}"}, "topic is '{key}'; give text in which {topic} may stand"),
        ({"topic": "{topic"}, "no other braces"),
        ({"topic": "{topic!r}"}, "no other braces"),
        ({"topic": "a\nb"}, "no other braces"),
        ({"topic": None}, "no other braces"),
        ({"format": "avro"}, "format is 'avro'; give one of cloudevents, debezium, plain"),
        ({"encode": "xml"}, "encode is 'xml'; give one of json, cbor"),
        ({"tombstones": "no"}, "tombstones is 'no'; give True or False"),
    ],
)
def test_a_form_that_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Form(**wrong)
    assert text in str(refusal.value)
    assert refusal.value.code == "MR-invalid-argument"
