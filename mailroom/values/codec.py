"""Values on the wire: CBOR (RFC 8949) within hard limits. Whatever `encode` accepts, `decode` returns equal.

A value is None, a bool, an int of 64 bits, a float, text, bytes, an aware datetime, a date, a UUID, a Decimal of up to
1,000 digits, a list of values, or a map of values with text or bytes as keys. Both sides refuse everything else: it
would come back as something else, in Python or in another language.
"""

import os
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from types import NoneType
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from cbor2 import CBORDecodeError, CBOREncoder, dumps, loads

from mailroom.errors import DecodeError, EncodeError
from mailroom.values.names import MAX_VALUE_BYTES

__all__ = [
    "MAX_DEPTH",
    "MAX_ITEMS",
    "decode",
    "encode",
]

MAX_DEPTH = 32
# An item of one byte decodes into up to 72 bytes. So this many items take about as much memory as the largest value.
MAX_ITEMS = 250_000
MIN_INT, MAX_INT = -(2**64), 2**64 - 1
# Together what PostgreSQL's numeric(1000, s) holds.
# D-messages-10: Decimals have up to 1,000 digits.
MAX_DECIMAL_DIGITS = 1_000
MAX_DECIMAL_EXPONENT = 1_000

T = TypeVar("T")


def encode(value: object, *, max_bytes: int = MAX_VALUE_BYTES) -> bytes:
    """Return `value` as CBOR of at most `max_bytes` (by default 16 MiB, the limit of `decode`).

    It may be nested 32 deep (`MAX_DEPTH`) and have 250,000 items (`MAX_ITEMS`). A list, a map, a date, a datetime and a
    UUID count as one level, a Decimal as two. A list, map, key, number, text and so on counts as one item, a date,
    datetime or UUID as two, a Decimal as four. A Decimal whose digits exceed 64 bits counts as one more level and item.

    The same value with its keys in the same order always gives the same bytes. A datetime keeps its instant and its UTC
    offset, not the name of its zone. An instance of a subclass of a supported type (a text enum, an OrderedDict) comes
    back as that type. Raises `EncodeError`, which says where in the value the fault is and what to send instead.
    """
    # The check must come first: cbor2 recurses without a limit, and a value nested deep enough crashes the process. The
    # check is complete, so the bytes are not decoded again for comparison, which would double the time.
    try:
        _check((value,), 0, _PLAIN)
        raw = dumps(value, default=_encode_subclass)
    except Exception as error:
        # Not chained: a UnicodeEncodeError, or an exception raised by the value's own code, may quote the payload.
        raise EncodeError(_refusal(value, error), code="MR-value-unsupported") from None
    if len(raw) > max_bytes:
        raise EncodeError(
            f"The value takes {len(raw):,} bytes as CBOR; the limit is {max_bytes:,}. "
            "Store it elsewhere and send a reference to it.",
            code="MR-value-too-large",
        )
    if len(raw) > MAX_ITEMS and _has_too_many_items(raw):  # an item takes at least one byte
        raise EncodeError(
            f"The value has more than {MAX_ITEMS:,} items: lists, maps, keys, numbers, texts and so on. "
            "Send it in parts, or pack numbers that belong together into bytes.",
            code="MR-value-too-large",
        )
    return raw


def decode(raw: bytes) -> object:
    """Return the value of `raw`, one CBOR item; lists and maps come back as list and dict.

    Raises `DecodeError`, and nothing else however hostile the bytes, if `raw` is not a value as this module describes
    it: more than 16 MiB or 250,000 items, nested deeper than 32, indefinite lengths, duplicate keys, bytes after the
    end, other tags, integers beyond 64 bits, `undefined`. The error never shows content. NaN is accepted here, although
    `encode` refuses it.
    """
    try:
        return read_item(raw)
    except DecodeError as fault:
        raise DecodeError(f"The value cannot be decoded: {fault}. Message.raw still holds its bytes.") from None


def read_item(raw: bytes) -> object:
    """Do what `decode` does for bytes that are no message's value: the error says no more than what is wrong."""
    if len(raw) > MAX_VALUE_BYTES:
        raise DecodeError(f"it has {len(raw):,} bytes; the limit is {MAX_VALUE_BYTES:,}")
    if len(raw) > MAX_ITEMS and _has_too_many_items(raw):
        raise DecodeError(f"it has more than {MAX_ITEMS:,} items")
    framed = _PAIR + raw + _MARKED
    try:
        value, mark = _loaded(framed, MAX_DEPTH + 1)
        if len(framed.translate(None, _RARE)) < len(framed):
            _check_decoded((value,))
    except Exception:
        mark = None  # what is wrong is found in the bytes as they are
    if mark == _MARK:
        return value
    try:
        _check_decoded((_loaded(raw, MAX_DEPTH),))
    except Exception as error:
        # Not chained: the causes quote the payload.
        raise DecodeError(_decode_fault(error)) from None
    raise DecodeError("more bytes follow after its end")


# `loads` takes a third less time than a decoder over a stream, but does not tell whether bytes follow. So it reads a
# pair of the item and a mark. An item that ends before its bytes do, or after them, is followed by something else: the
# mark is drawn anew by each process, so nobody can write it.
# D-messages-12: A value is read with a mark behind it.
_MARK = os.urandom(16).hex().encode()
_PAIR, _MARKED = b"\x82", dumps(_MARK)


def _loaded(raw: bytes, max_depth: int) -> Any:
    # A new decoder for each value, as `loads` makes it: reused ones have leaked parts of one message into the next.
    return loads(
        raw,
        semantic_decoders=_TAGS,
        max_depth=max_depth,
        allow_indefinite=False,
        allow_duplicate_keys=False,
        strict_hashable_types=True,
    )


# The number of bytes from one head to the next, by the first byte of the head. It is 0 if a length follows, and for
# reserved heads and indefinite lengths.
_STEPS = bytes(
    0 if argument > 27 or (argument > 23 and major in (2, 3))
    else 1 + (argument if major in (2, 3) else (1 << argument - 24) if argument > 23 else 0)
    for major in range(8) for argument in range(32)
)  # fmt: skip


def _has_too_many_items(raw: bytes) -> bool:
    """Count heads up to the limit, or up to the first byte that is not a head, where the decoder stops too."""
    size = len(raw)
    position = items = 0
    while position < size:
        items += 1
        if items > MAX_ITEMS:
            return True
        step = _STEPS[raw[position]]
        if not step:
            width = 1 << (raw[position] & 31) - 24
            if width > 8:
                return False
            step = 1 + width + int.from_bytes(raw[position + 1 : position + 1 + width])
        position += step
    return False


# --- encoding -------------------------------------------------------------------------------------------------------

_PLAIN: frozenset[type] = frozenset({str, bytes, bool, NoneType})
_KEYS: frozenset[type] = frozenset({str, bytes})


class _Refused(Exception):
    """What is wrong with an item, and the path to it: the item first, then its containers from the inside out."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.trail: list[object] = []


def _check(items: Iterable[Any], depth: int, plain: frozenset[type]) -> None:
    """Raise `_Refused` unless each item can be sent at this `depth`. Types in `plain` need no check."""
    item = None
    try:
        for item in items:
            kind = type(item)
            if kind in plain:
                continue
            if kind is int:
                if MIN_INT <= item <= MAX_INT:
                    continue
            elif kind is float:
                if item == item:
                    continue
            # What most containers are, and what `_check_container` would find: a call of it is saved.
            elif depth < MAX_DEPTH and kind is list:
                _check(item, depth + 1, plain)
                continue
            elif depth < MAX_DEPTH and kind is dict and plain is _PLAIN and _KEYS.issuperset(map(type, item)):
                _check(item.values(), depth + 1, plain)
                continue
            if isinstance(item, (dict, list)):
                _check_container(item, depth + 1, plain)
            else:
                _check_leaf(item, kind, depth)
    except _Refused as refused:
        refused.trail.append(item)
        raise


def _check_container(container: dict[object, object] | list[object], depth: int, plain: frozenset[type]) -> None:
    if depth > MAX_DEPTH and len(container):  # the decoder counts an empty one as a leaf
        raise _Refused(f"is nested more than {MAX_DEPTH} deep, or contains itself: send a flatter value")
    kind = type(container)
    exact = kind is dict or kind is list
    if isinstance(container, dict):
        if not _KEYS.issuperset(map(type, container)):
            for key in container:
                if not isinstance(key, (str, bytes)):
                    raise _Refused(f"has a key that is {_a(type(key))}: send text as keys")
            exact = False
        if plain is not _PLAIN:
            _check(container.keys(), depth, plain)
        _check(container.values(), depth, plain)
    else:
        _check(container, depth, plain)
    if not exact and not _equals_its_copy(container):
        raise _Refused(f"is {_a(kind)} that does not equal its plain copy: send a plain list, or a dict with text keys")


def _equals_its_copy(container: dict[Any, object] | list[object]) -> bool:
    """Return whether a container equals its plain copy; a subclass may not, and its keys may hash otherwise."""
    copy = {key[:]: item for key, item in container.items()} if isinstance(container, dict) else list(container)
    # The bytes are compared too: only then will the decoder see what the copy holds, and the copy's items are checked.
    if container != copy:
        return False
    return dumps(container, default=_encode_subclass) == dumps(copy, default=_encode_subclass)


def _check_leaf(item: Any, kind: type, depth: int) -> None:
    base = kind if kind in _LEAVES else next((base for base in _LEAVES if isinstance(item, base)), None)
    if base is None:
        raise _Refused(f"is {_a(kind)}, {_instead(item)}")
    fault_of, levels = _LEAVES[base]
    fault = fault_of(item)
    if fault:
        raise _Refused(fault)
    if depth + levels(item) > MAX_DEPTH:
        raise _Refused(
            f"is {_a(kind)} and nested too deep by its tag, the limit being {MAX_DEPTH}: send a flatter value"
        )
    if base is not kind and not _comes_back_equal(item):
        raise _Refused(f"is {_a(kind)} that does not come back equal: send a plain {base.__name__}")


def _instead(item: object) -> str:
    if isinstance(item, tuple):
        return "which CBOR gives back as a list: send a list"
    if isinstance(item, (set, frozenset)):
        return "which has no order and comes back as a list: send a sorted list"
    return "which CBOR cannot give back: send its parts as a dict, or its text"


def _no_fault(_item: object) -> None:
    return None


def _text_fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is text with a lone surrogate, which UTF-8 cannot hold: send bytes, or mend the text"
    return None


def _int_fault(number: int) -> str | None:
    return None if MIN_INT <= number <= MAX_INT else "is an int beyond 64 bits: send it as text"


def _float_fault(number: float) -> str | None:
    return None if number == number else "is NaN, which equals nothing, not even itself: send None"


def _datetime_fault(moment: datetime) -> str | None:
    offset = moment.utcoffset()
    if offset is None:
        return "is a datetime without a time zone: send an aware one, such as datetime.now(UTC)"
    if offset.seconds % 60 or offset.microseconds:
        return "is a datetime whose UTC offset has seconds, which RFC 3339 cannot write: send .astimezone(UTC)"
    return None


def _decimal_fault(number: Decimal) -> str | None:
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        return "is a Decimal without a value (NaN or Infinity): send None"
    if len(digits) > MAX_DECIMAL_DIGITS:
        return f"is a Decimal of more than {MAX_DECIMAL_DIGITS:,} digits: send it as text"
    if abs(exponent) > MAX_DECIMAL_EXPONENT:
        return f"is a Decimal with an exponent beyond {MAX_DECIMAL_EXPONENT}: send it as text"
    return None


def _no_level(_item: object) -> int:
    return 0


def _one_level(_item: object) -> int:
    return 1


def _levels_of_decimal(number: Decimal) -> int:
    """A tag and its list; and the tag of digits that take more than 64 bits, which hold any 19 of them."""
    sign, digits, _ = number.as_tuple()
    is_long = len(digits) > 19 and (len(digits) > 20 or int("".join(map(str, digits))) > MAX_INT + sign)
    return 2 + is_long


# By type: its possible faults, and the number of levels of its encoding. datetime comes before date, its base class.
_LEAVES: dict[type, tuple[Callable[[Any], str | None], Callable[[Any], int]]] = {
    str: (_text_fault, _no_level),
    int: (_int_fault, _no_level),
    float: (_float_fault, _no_level),
    bytes: (_no_fault, _no_level),
    bytearray: (_no_fault, _no_level),
    datetime: (_datetime_fault, _one_level),
    date: (_no_fault, _one_level),
    UUID: (_no_fault, _one_level),
    Decimal: (_decimal_fault, _levels_of_decimal),
}


def _encode_subclass(encoder: CBOREncoder, leaf: object) -> None:
    """Encode subclasses, where cbor2 knows only the exact type: some drivers have a UUID of their own."""
    match leaf:
        case datetime():
            encoder.encode_datetime(leaf)
        case date():
            encoder.encode_date(leaf)
        case UUID():
            encoder.encode_uuid(leaf)
        case Decimal():
            encoder.encode_decimal(leaf)
        case _:
            raise TypeError(f"no encoder for {_a(type(leaf))}")


def _comes_back_equal(leaf: object) -> bool:
    """Return whether an instance of a subclass comes back as a value that it equals."""
    expected = leaf
    if isinstance(leaf, datetime):
        # In an hour that a time zone repeats, Python considers no datetime of another zone equal, not even the same
        # instant.
        expected = leaf.replace(tzinfo=timezone(leaf.utcoffset() or timedelta()), fold=0)
    try:
        return bool(decode(dumps(leaf, default=_encode_subclass)) == expected)
    except DecodeError:
        return False


def _refusal(value: object, error: Exception) -> str:
    """Return a text that says where in `value` the fault is, and why; `error` is the one that its check raised."""
    if isinstance(error, UnicodeEncodeError):
        # Each text is checked only now, so that the common case pays nothing for it.
        try:
            _check((value,), 0, _PLAIN - _KEYS)
        except _Refused as refused:
            error = refused
    if not isinstance(error, _Refused):
        return f"The value cannot be encoded: it raised {type(error).__name__}. Send plain dicts and lists."
    return f"Cannot send this value: {_path(error.trail[::-1])} {error}."


def _path(trail: list[object]) -> str:
    steps = ["value", *(_step(parent, child) for parent, child in pairwise(trail))]
    # A long path is shortened in the middle; that of a cyclic value has no end.
    return "".join(steps if len(steps) <= 9 else [*steps[:5], " ... ", *steps[-3:]])


def _step(parent: object, child: object) -> str:
    if isinstance(parent, dict):
        for key, item in parent.items():
            if item is child:
                # A key is shown only if it could be the name of a field: other keys may be a user's data.
                return f".{key}" if type(key) is str and key.isidentifier() and len(key) <= 40 else "[...]"
        return " has a key that"
    if isinstance(parent, list):
        for index, item in enumerate(parent):
            if item is child:
                return f"[{index}]"
    return "[...]"


def _a(kind: type) -> str:
    name = kind.__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


# --- decoding -------------------------------------------------------------------------------------------------------

_TOO_MANY_DIGITS = 10**MAX_DECIMAL_DIGITS
_DECODED = frozenset(_LEAVES) | {bool, NoneType}
# All that `_check_decoded` refuses has one of these bytes: the first byte of tag 2 or 3, also if its number is longer
# than it need be, or of a simple value other than true, false and null. Most values have none. In others they may be
# part of something else.
_RARE = bytes((0xC2, 0xC3, *range(0xD8, 0xDC), *range(0xE0, 0xF4), 0xF7, 0xF8))


def _check_decoded(items: Iterable[object]) -> None:
    """Refuse what cbor2 has no option to refuse: `undefined` and unassigned simple values."""
    for item in items:
        kind = type(item)
        if kind in _DECODED:
            continue
        if isinstance(item, dict):
            _check_decoded(item.values())
        elif isinstance(item, list):
            _check_decoded(item)
        elif kind is Bignum:
            raise DecodeError("it holds an integer beyond 64 bits outside of a decimal")
        else:
            raise DecodeError("it holds undefined or a simple value other than true, false and null")


def _datetime_of_text(content: object, _immutable: bool) -> datetime:
    moment = datetime.fromisoformat(_exactly(str, content))
    if _datetime_fault(moment):
        raise DecodeError("a datetime has no time zone, or an offset with seconds")
    return moment


def _datetime_of_seconds(content: object, _immutable: bool) -> datetime:
    seconds = content if type(content) is float else _exactly(int, content)
    return datetime.fromtimestamp(seconds, UTC)


def _decimal(content: object, _immutable: bool) -> Decimal:
    # cbor2 gives a tuple where the result must be hashable, else a list.
    if not isinstance(content, list | tuple) or len(content) != 2:
        raise DecodeError("a decimal is not a pair of exponent and digits")
    exponent, digits = content
    digits = digits.number if type(digits) is Bignum else _exactly(int, digits)
    if abs(_exactly(int, exponent)) > MAX_DECIMAL_EXPONENT:
        raise DecodeError(f"a decimal has an exponent beyond {MAX_DECIMAL_EXPONENT}")
    if abs(digits) >= _TOO_MANY_DIGITS:
        raise DecodeError(f"a decimal has more than {MAX_DECIMAL_DIGITS} digits")
    # From text, since arithmetic would round to the precision of the caller's decimal context.
    return Decimal(f"{digits}E{exponent}")


class Bignum:
    """An integer beyond 64 bits. It is allowed only in a decimal."""

    __slots__ = ("number",)

    def __init__(self, content: object) -> None:
        raw = _exactly(bytes, content)
        # A longer one certainly has too many digits, so it is not even computed.
        self.number = int.from_bytes(raw) if len(raw) <= MAX_DECIMAL_DIGITS else _TOO_MANY_DIGITS


def _bignum(content: object, _immutable: bool) -> Bignum:
    return Bignum(content)


def _negative_bignum(content: object, _immutable: bool) -> Bignum:
    found = Bignum(content)
    found.number = -1 - found.number
    return found


def _uuid(content: object, _immutable: bool) -> UUID:
    return UUID(bytes=_exactly(bytes, content))


def _date(content: object, _immutable: bool) -> date:
    return date.fromisoformat(_exactly(str, content))


def _exactly(kind: type[T], content: object) -> T:
    # Not isinstance, for which True is an int. And UUID() accepts any sixteen integers as bytes.
    if type(content) is not kind:
        raise DecodeError(f"a tag holds {_a(type(content))} where {_a(kind)} belongs")
    return content


class _AllowedTags(dict[int, Callable[[Any, bool], object]]):
    """The allowed tags. cbor2 asks before it reads the content of a tag, so shared references are never followed."""

    def __missing__(self, tag: int) -> NoReturn:
        raise DecodeError(f"tag {tag} is not one of {', '.join(map(str, self))}")


_TAGS = _AllowedTags({0: _datetime_of_text, 1: _datetime_of_seconds, 2: _bignum, 3: _negative_bignum, 4: _decimal})
_TAGS |= {37: _uuid, 1004: _date}


def _decode_fault(error: Exception) -> str:
    for known in (error, error.__cause__):
        if isinstance(known, DecodeError):
            return str(known)
    if isinstance(error, CBORDecodeError):
        # Of all texts of cbor2 that can occur here, this is the only one that goes on with content: the key.
        before, duplicate, _ = str(error).partition("Duplicate map key")
        cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
        return before + duplicate + cause
    return f"it raised {type(error).__name__}"
