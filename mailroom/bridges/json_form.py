"""A value as JSON at a broker, and a value of JSON from there.

A value is written as `cbor_to_jsonb` shows it in psql: bytes as base64, times, dates and UUIDs as text, Infinity and
NaN as text, a decimal as a number with all its digits. There is one difference: a NUL stays in a text, since JSON can
hold what PostgreSQL's text cannot. Two keys of a map that would be the same text are refused: `cbor_to_jsonb` keeps the
last one, but a record is not for people only.

So these come back as something else: bytes, times, dates, UUIDs, Infinity and NaN as text, and a decimal as an int or
a float, if one is the same number. No number loses a digit: what neither can be comes back as a decimal.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from types import NoneType
from typing import Any, NoReturn
from uuid import UUID

from mailroom.errors import DecodeError
from mailroom.message.headers import TEXT
from mailroom.values.codec import MAX_DECIMAL_DIGITS, MAX_INT, MAX_ITEMS, MIN_INT

# A longer number has more digits than a decimal may have: sign, digits, point, and an exponent of four digits.
LONG = re.compile(r"[0-9]{19}")
MAX_NUMBER = MAX_DECIMAL_DIGITS * 2 + 10
ITEMS = "[{,"
# Also one that never ends, so that none is looked at twice.
QUOTED = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
EXACT_DIGITS = 15  # of this many digits every decimal is a float's own text again (DBL_DIG of C)


class NotJson(ValueError):
    """Text is no JSON, or a value has no JSON: the text says why, and never shows content."""


def as_json(value: object) -> str:
    """Return a decoded value as JSON without spaces. Raises `NotJson` for two keys of a map that are the same text."""
    try:
        return _PLAIN(value)
    except (TypeError, ValueError):  # it holds something that JSON does not have
        return _written(value)


def _written(value: object) -> str:
    return _WRITERS[type(value)](value)


def of_json(text: str) -> object:
    """Return the value of JSON. Raises `NotJson`, or `DecodeError` for JSON that no value can hold."""
    check_items(text)
    try:
        # Whole numbers of up to 18 digits are read by the decoder itself, without a call of Python for each.
        return (_DECODER if LONG.search(text) else _SHORT_DECODER).decode(text)
    except RecursionError:
        raise DecodeError("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"it is no JSON (at character {error.pos})") from None


def check_items(text: str) -> None:
    """Raise `DecodeError` for JSON of more items than a value may have, before they take many times its memory."""
    # Each container and each comma outside of texts begins an item. Most have few, whatever their texts hold.
    if sum(map(text.count, ITEMS)) > MAX_ITEMS and sum(map(QUOTED.sub("", text).count, ITEMS)) > MAX_ITEMS:
        raise DecodeError(f"it has more than {MAX_ITEMS:,} items", code="MR-value-too-large")


def _map(value: dict[Any, object]) -> str:
    keys = [_written(key) for key in value]  # text or bytes
    if len({*keys}) < len(keys):
        raise NotJson("two keys of a map are the same text in JSON")
    return "{" + ",".join([f"{key}:{_written(item)}" for key, item in zip(keys, value.values(), strict=True)]) + "}"


def _float(number: float) -> str:
    if math.isfinite(number):
        return repr(number)
    return '"NaN"' if number != number else '"Infinity"' if number > 0 else '"-Infinity"'


# A tenth of the time of the writers below, and the same text for what JSON has. No key is anything but text or bytes,
# which it refuses; and no value holds itself.
_PLAIN = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False).encode

# By the exact types that the codec decodes to.
_WRITERS: dict[type, Callable[[Any], str]] = {
    str: TEXT,
    int: str,
    NoneType: lambda _: "null",
    bool: lambda value: "true" if value else "false",
    float: _float,
    list: lambda items: "[" + ",".join([_written(item) for item in items]) + "]",
    dict: _map,
    Decimal: str,
    bytes: lambda value: f'"{b64encode(value).decode()}"',
    datetime: lambda moment: f'"{moment.isoformat().replace("+00:00", "Z")}"',
    date: lambda day: f'"{day.isoformat()}"',
    UUID: lambda value: f'"{value}"',
}


def _whole(text: str) -> int | Decimal:
    if len(text) <= 21 and MIN_INT <= (number := int(text)) <= MAX_INT:
        return number
    return _decimal(text)


def _fraction(text: str) -> float | Decimal:
    if len(text) <= EXACT_DIGITS and "e" not in text and "E" not in text:
        return float(text)
    exact = _decimal(text)
    number = float(text)
    # A float is what most readers expect. It is not taken where it would be another number.
    return number if math.isfinite(number) and Decimal(repr(number)) == exact else exact


def _decimal(text: str) -> Decimal:
    if len(text) > MAX_NUMBER:
        raise DecodeError(f"a number has more than {MAX_DECIMAL_DIGITS:,} digits")
    try:
        return Decimal(text)
    except ArithmeticError:
        raise DecodeError("a number has an exponent that no value can have") from None


def _no_constant(_: str) -> NoReturn:
    raise NotJson("it holds NaN or Infinity, which JSON does not have")


# Made once: `loads` would make one for each value.
_DECODER = json.JSONDecoder(parse_float=_fraction, parse_int=_whole, parse_constant=_no_constant)
_SHORT_DECODER = json.JSONDecoder(parse_float=_fraction, parse_constant=_no_constant)
