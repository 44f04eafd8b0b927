"""From one Mailroom through a broker to another: the same message."""

from base64 import b64encode
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailroom.bridges.arrival import Incoming, Intake, incoming
from mailroom.bridges.record import Carried, Form, Unencodable, record_of
from mailroom.message.message import parsed
from mailroom.values import codec
from tests.bridges.messages import FORMS, ID, PLACE, SENDER, arrived, message, messages
from tests.golden_records import RECORDS
from tests.support.listed import listed

KEPT = (
    *("message_id", "topic", "key", "kind", "message_type", "event_type", "headers", "expires_at", "sent_at"),
    *("sender", "link", "clock"),
)


def through(given: Carried, form: Form) -> Incoming:
    return incoming(arrived(record_of(given, form, SENDER)), Intake(), PLACE)


def assert_same_but_for_the_value(found: Incoming, given: Carried) -> None:
    expected = {name: getattr(given, name) for name in KEPT[:9]}
    expected |= {"sender": SENDER.node_id, "link": SENDER.link, "clock": given.sent_clock}
    assert {name: getattr(found, name) for name in KEPT} == expected


def as_json_gives_it_back(value: object) -> Any:
    match value:
        case bytes():
            return b64encode(value).decode()
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case date() | UUID():
            return str(value)
        case float() if value in (float("inf"), float("-inf")):
            return "Infinity" if value > 0 else "-Infinity"
        case list():
            return [as_json_gives_it_back(item) for item in value]
        case dict():
            return {as_json_gives_it_back(key): as_json_gives_it_back(item) for key, item in value.items()}
    return exact(value)


def exact(value: object) -> Any:
    """Numbers without the type that JSON does not keep."""
    match value:
        case float() | int() if not isinstance(value, bool):
            return Decimal(repr(value))
        case list():
            return [exact(item) for item in value]
        case dict():
            return {key: exact(item) for key, item in value.items()}
    return value


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(messages, st.sampled_from(FORMS))
def test_a_message_comes_back_the_same(given: Carried, form: Form) -> None:
    try:
        found = through(given, form)
    except Unencodable:  # two keys of a map; test_json_form is of that
        assert form.encode == "json"
        found = through(given, replace(form, encode="cbor"))
        form = replace(form, encode="cbor")
    assert_same_but_for_the_value(found, given)
    if form.encode == "cbor":
        assert found.value == given.value
    else:
        assert given.value is not None
        assert exact(codec.decode(found.value)) == as_json_gives_it_back(codec.decode(given.value))


@listed("form", FORMS)
def test_a_value_that_was_written_as_json_comes_back_the_same(form: Form) -> None:
    text = '{"n": 12, "x": [1.50, null, "\\u00fc", true], "y": 0.1}'
    given = replace(message(), value=None, value_json=text)
    found = through(given, form)
    assert_same_but_for_the_value(found, given)
    assert codec.decode(found.value) == parsed(text)


@listed("name", RECORDS)
def test_golden_records_are_read(name: str) -> None:
    given, form = RECORDS[name]
    found = through(given, form)
    assert_same_but_for_the_value(found, given)


def test_a_tombstone_loses_the_value_and_nothing_else() -> None:
    given = message("paid", event_type="D")
    found = through(given, Form(tombstones=True))
    assert_same_but_for_the_value(found, given)
    assert codec.decode(found.value) is None


def test_headers_that_a_broker_or_its_tools_add_become_headers() -> None:
    record = arrived(record_of(message(headers={"user": "ada"}), Form(), SENDER))
    record.headers = [*record.headers, ("added", b"x"), ("ce_added", b"x"), ("mailroom-added", b"x")]
    assert incoming(record, Intake(), PLACE).headers == {"user": "ada", "added": "x"}


def test_the_sender_is_told_as_the_source() -> None:
    assert through(message(), Form()).source == "/mailroom/paris"
    assert through(message(key=str(ID)), Form(format="plain")).source is None
