"""Values as JSON at a broker, beside how psql shows them."""

import json
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings

from mailroom.bridges.json_form import NotJson, as_json, check_items, of_json
from mailroom.errors import DecodeError
from mailroom.values import codec
from tests.message.test_codec import GOLDEN_VALUES, supported
from tests.support.listed import listed
from tests.support.node import Node


def read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def as_shown(node: Node, raw: bytes) -> Any:
    [(text,)] = node.connection.execute("SELECT mailroom.cbor_to_jsonb(%s)::text", [raw]).fetchall()
    return read(text)


def without_nul(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\0", "␀")
        case list():
            return [without_nul(item) for item in value]
        case dict():
            return {without_nul(key): without_nul(item) for key, item in value.items()}
    return value


def assert_psql_agrees(node: Node, raw: bytes) -> None:
    try:
        text = as_json(codec.decode(raw))
    except NotJson:  # two keys, of which psql shows the last one
        return
    assert is_same(without_nul(read(text)), as_shown(node, raw))


def is_same(ours: Any, shown: Any) -> bool:
    """Whether two readers find the same: psql writes a large float with all its digits, and Python with an exponent."""
    match ours, shown:
        case list(), list():
            return len(ours) == len(shown) and all(map(is_same, ours, shown))
        case dict(), dict():
            return ours.keys() == shown.keys() and all(is_same(ours[key], shown[key]) for key in ours)
        case Decimal(), Decimal() if ours != shown:
            is_float = abs(ours) < Decimal(2) ** 1000 and Decimal(repr(float(ours))) == ours
            return is_float and float(ours) == float(shown)
    return bool(ours == shown)


@pytest.mark.slow
def test_a_record_and_psql_show_the_same_value(node: Node) -> None:
    values = {**GOLDEN_VALUES, "keys": {"a": 1, b"a": 2, '\\ "': [True, False, None]}}
    del values["epoch_half_seconds"], values["nanoseconds"]  # shown with other zeros, or with more than Python has
    for value in values.values():
        assert_psql_agrees(node, cbor2.dumps(value))
    for raw in ("fb4366fdefbe01ab7e", "f97e00", "f9fc00", "f90001", "c11a6a6f0168", "fa40490fdb"):
        assert_psql_agrees(node, bytes.fromhex(raw))

    # In one test, for one database.
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.nested_given, HealthCheck.too_slow],
    )
    @given(supported)
    def any_value(value: object) -> None:
        assert_psql_agrees(node, codec.encode(value))

    any_value()


def test_it_is_compact() -> None:
    assert as_json({"a": [1, 2.5, "ü", None, True], "b": {}}) == '{"a":[1,2.5,"ü",null,true],"b":{}}'


@listed(
    ("value", "text"),
    [
        (b"\0\xff", '"AP8="'),
        (datetime(2026, 8, 2, 12, 30, tzinfo=UTC), '"2026-08-02T12:30:00Z"'),
        (datetime(999, 1, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=-9))), '"0999-01-02T03:04:05.000006-09:00"'),
        (date(2026, 8, 2), '"2026-08-02"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Decimal("129.950"), "129.950"),
        (Decimal("1E+1000"), "1E+1000"),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
        ("NUL \0", '"NUL \\u0000"'),
        ({"a": 1, b"\0": 2}, '{"a":1,"AA==":2}'),
    ],
)
def test_what_json_has_no_type_for(value: object, text: str) -> None:
    assert as_json(value) == text


@listed("value", [{"AA==": 1, b"\0": 2}, [{b"": 1, "": 2}]])
def test_two_keys_that_are_the_same_text_are_refused(value: object) -> None:
    with pytest.raises(NotJson, match="two keys of a map are the same text"):
        as_json(value)


@listed(
    ("text", "value"),
    [
        ("129.95", 129.95),
        ("0.1", 0.1),
        ("1e5", 1e5),
        ("-0.0", -0.0),
        ("9.9999999999999", 9.9999999999999),
        ("900719925474099.3", Decimal("900719925474099.3")),
        ("129.950000000000000001", Decimal("129.950000000000000001")),
        ("1e400", Decimal("1e400")),
        ("1e-400", Decimal("1e-400")),
        ("18446744073709551615", 2**64 - 1),
        ("-18446744073709551616", -(2**64)),
        ("18446744073709551616", Decimal(2**64)),
        ("1" * 1000, Decimal("1" * 1000)),
    ],
)
def test_no_number_loses_a_digit(text: str, value: object) -> None:
    found = of_json(text)
    assert (type(found), found) == (type(value), value)
    assert codec.decode(codec.encode(found)) == value


@listed("text", ["", "NaN", "[Infinity]", "-Infinity", "{", "a", "1 2", "\ufeff1", '"\n"', "01"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(NotJson):
        of_json(text)


@listed("text", ["[" * 100_000, "9" * 3_000, "1." + "9" * 3_000, "1e" + "9" * 50])
def test_json_that_no_value_can_hold_is_refused_as_that(text: str) -> None:
    with pytest.raises(DecodeError):
        of_json(text)


def test_items_are_counted_before_they_are_read_and_texts_have_none() -> None:
    for few in ('"' + "[," * 300_000 + '"', '["' + '\\",[' * 300_000 + '", 1]', '"' + '\\"' * 500_000):
        check_items(few)
    for many in ("[" + "[]," * 200_000 + "1]", '["' + "," * 9 + '"' + ',"a"' * 250_000 + "]"):
        with pytest.raises(DecodeError, match="more than 250,000 items"):
            of_json(many)
