"""The codec: what goes in comes back equal, and nothing that comes from outside gets further than `DecodeError`."""

import enum
import math
import random
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import UUID

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailroom.errors import DecodeError, EncodeError
from mailroom.values.codec import MAX_DEPTH, MAX_ITEMS, decode, encode
from mailroom.values.names import MAX_VALUE_BYTES
from tests.support.listed import listed

GOLDEN = Path(__file__).parents[1] / "data" / "golden_values.txt"
GOLDEN_VALUES: dict[str, object] = {
    "order": {
        "order": "order-42",
        "state": "paid",
        "total": Decimal("129.95"),
        "lines": [{"sku": "A-1", "count": 2}, {"sku": "B-7", "count": 1}],
        "express": True,
        "coupon": None,
    },
    "integers": [
        *(0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1),
        *(-1, -24, -25, -(2**63), -(2**64)),
    ],
    "floats": [0.0, -0.0, 1.5, -2.25, 1e300, 5e-324, math.inf, -math.inf],
    "text": ["", "a", "NUL \0 inside", "Zürich 東京 🚚", "x" * 300],
    "bytes": [b"", b"\x00\xff", {b"key": b"value"}],
    "containers": [[], {}, [[]], {"": {}}],
    "datetime_utc": datetime(2026, 8, 2, 12, 30, 45, 123456, tzinfo=UTC),
    "datetime_offset": datetime(999, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=-9, minutes=-30))),
    "date": date(2026, 8, 2),
    "uuid": UUID("12345678-1234-5678-9abc-def012345678"),
    "decimals": [
        Decimal("0"),
        Decimal("-1.10"),
        Decimal("9999999999999999999"),
        Decimal("1E+1000"),
        Decimal("-1E-1000"),
    ],
    "decimal_edges": [Decimal(2**64 - 1), Decimal(-(2**64))],
    "long_decimals": [
        Decimal("129.950000000000000000"),
        Decimal(2**64),
        Decimal(-(2**64) - 1),
        Decimal("-12345678901234567890123456789012345678E-38"),
        Decimal(10**1000 - 1),
    ],
    "wide_integers": [0, 1, 11, 5],
    "wide_lengths": {"": None},
    "short_floats": [1.0, 1.5, math.inf],
    "epoch_seconds": datetime(2026, 8, 2, 8, 29, 52, tzinfo=UTC),
    "epoch_half_seconds": datetime(2026, 8, 2, 8, 29, 52, 500_000, tzinfo=UTC),
    "nanoseconds": datetime(2026, 8, 2, 12, 30, 45, 123456, tzinfo=UTC),
    "go_message": {
        "EvtType": ord("C"),
        "FromID": list(range(1, 17)),
        "MsgClock": 42,
        "EncBytes": b"\xa0",
        "FromHost": "node1",
        "FromCluster": "puzzledb",
        "MsgType": ord("O"),
    },
    "nan": math.nan,
}


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain(enum.Enum):
    ONE = 1


class Shouting(str):
    """Text that says it equals something else than what it holds."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == self.upper() + "!"

    def __hash__(self) -> int:
        return hash(self.upper())


class Reversed(list[int]):
    """A list that shows its items in another order than it compares them."""

    def __iter__(self) -> Iterator[int]:
        return iter(self[::-1])


class Exploding(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        raise RuntimeError("SECRET")

    dst = utcoffset

    def tzname(self, moment: datetime | None) -> str:
        return "Exploding"


class Autumn(tzinfo):
    """A zone whose clocks go back at 03:00: 02:30 comes twice, told apart by `fold`, as in the zones of Europe."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1 if moment is None or moment.fold else 2)

    def dst(self, moment: datetime | None) -> timedelta:
        return self.utcoffset(moment) - timedelta(hours=1)

    def tzname(self, moment: datetime | None) -> str:
        return "Autumn"


class LateDatetime(datetime):
    """A subclass such as test doubles and data frames bring along."""


class DriverUUID(UUID):
    """As asyncpg has one."""


class Money(Decimal):
    """A Decimal with a name."""


class Holiday(date):
    """A date with a name."""


class GermanDatetime(datetime):
    def isoformat(self, *_args: Any, **_kwargs: Any) -> str:
        return f"{self.day}.{self.month}.{self.year}"


class Shrunk(dict[str, int]):
    def __len__(self) -> int:
        return 0


@dataclass
class Order:
    number: int


Point = namedtuple("Point", "x y")


def nested(levels: int, core: object = 1) -> object:
    for _ in range(levels):
        core = [core]
    return core


def cyclic() -> dict[str, object]:
    value: dict[str, object] = {}
    value["me"] = [value]
    return value


def golden() -> dict[str, bytes]:
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: bytes.fromhex(digits) for name, digits in lines}


# --- what comes back ------------------------------------------------------------------------------------------------


@listed("name", GOLDEN_VALUES)
def test_old_message_stays_readable(name: str) -> None:
    assert repr(decode(golden()[name])) == repr(GOLDEN_VALUES[name])


@listed("name", sorted(GOLDEN_VALUES.keys() - {"nan"}))
def test_what_an_old_message_held_can_be_sent_on(name: str) -> None:
    assert repr(decode(encode(GOLDEN_VALUES[name]))) == repr(GOLDEN_VALUES[name])


def test_every_golden_line_has_its_expected_value() -> None:
    assert golden().keys() == GOLDEN_VALUES.keys()


@listed("value", [True, 1, 1.0, None, "1", b"1"])
def test_scalar_comes_back_as_its_own_type(value: object) -> None:
    assert type(decode(encode(value))) is type(value)


@listed(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (bytearray(b"x"), b"x"),
        (DriverUUID(int=7), UUID(int=7)),
        (Money("1.10"), Decimal("1.10")),
        (Holiday(2026, 12, 25), date(2026, 12, 25)),
        (LateDatetime(2026, 8, 2, tzinfo=UTC), datetime(2026, 8, 2, tzinfo=UTC)),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Counter("aab"), {"a": 2, "b": 1}),
    ],
)
def test_subclass_comes_back_as_the_plain_type(value: object, plain: object) -> None:
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(plain)


def test_enum_of_text_is_a_key_like_its_text() -> None:
    assert decode(encode({Colour.RED: 1})) == {"red": 1}


def test_same_value_gives_the_same_bytes() -> None:
    value = GOLDEN_VALUES["order"]
    assert encode(value) == encode(decode(encode(value))) == golden()["order"]


@listed("fold", [0, 1])
@listed("kind", [datetime, LateDatetime])
@listed("holder", [list, lambda items: defaultdict(int, at=items[0])])
def test_datetime_in_the_hour_that_clocks_repeat_keeps_instant_and_offset(fold: int, kind: Any, holder: Any) -> None:
    moment = kind(2026, 10, 25, 2, 30, 0, 1, fold=fold, tzinfo=Autumn())
    back: Any = decode(encode(holder([moment])))
    (back_moment,) = back.values() if isinstance(back, dict) else back
    assert back_moment.astimezone(UTC) == moment.astimezone(UTC)
    assert back_moment.utcoffset() == moment.utcoffset()


def test_decimal_is_exact_whatever_the_caller_s_context() -> None:
    raw = encode(Decimal("1234567890.123456789"))
    with localcontext(prec=3):
        assert str(decode(raw)) == "1234567890.123456789"


def test_value_may_be_nested_to_the_limit_and_no_deeper() -> None:
    long, short = Decimal(2**64), Decimal(2**64 - 1)
    dates = UUID(int=0), date.min
    for value in (
        nested(32),
        nested(32, []),
        *(nested(31, each) for each in dates),
        nested(30, short),
        nested(29, long),
    ):
        assert decode(encode(value)) == value
    for value in (
        nested(33),
        nested(33, {}),
        *(nested(32, each) for each in dates),
        nested(31, short),
        nested(30, long),
    ):
        with pytest.raises(EncodeError, match="nested"):
            encode(value)


def test_value_may_be_as_large_as_the_limit_and_no_larger() -> None:
    largest = b"x" * (MAX_VALUE_BYTES - 5)
    raw = encode(largest)
    assert len(raw) == MAX_VALUE_BYTES
    assert decode(raw) == largest
    with pytest.raises(EncodeError, match=r"16,777,217 bytes as CBOR; the limit is 16,777,216"):
        encode(largest + b"x")


WITH_ITEMS: dict[str, tuple[object, int]] = {
    "number": (7, 1),
    "long number": (2**40, 1),
    "float": (1.5, 1),
    "null": (None, 1),
    "long text": ("SECRET" * 5, 1),
    "bytes": (b"\x80" * 60, 1),
    "empty list": ([], 1),
    "list": ([1, 2], 3),
    "map": ({"a": 1, "b": []}, 5),
    "datetime": (datetime(2026, 8, 2, tzinfo=UTC), 2),
    "UUID": (UUID(int=7), 2),
    "Decimal": (Decimal("1.10"), 4),
    "long Decimal": (Decimal(2**64), 5),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", WITH_ITEMS)
def test_value_may_have_as_many_items_as_the_limit_and_no_more(kind: str) -> None:
    item, items = WITH_ITEMS[kind]
    largest: list[object] = [item] * ((MAX_ITEMS - 1) // items)
    largest += [0] * (MAX_ITEMS - 1 - len(largest) * items)
    assert decode(encode(largest)) == largest
    with pytest.raises(EncodeError, match=r"more than 250,000 items: .* Send it in parts") as refusal:
        encode([*largest, 0])
    assert "SECRET" not in str(refusal.value)
    with pytest.raises(DecodeError, match="it has more than 250,000 items"):
        decode(cbor2.dumps([*largest, 0]))


@pytest.mark.slow
def test_sixteen_mib_of_little_items_are_refused_before_they_take_memory() -> None:
    raw = head(4, MAX_VALUE_BYTES - 9) + b"\x80" * (MAX_VALUE_BYTES - 9)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError, match="more than 250,000 items"):
            decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@listed("bad", [0x1C, 0x1F, 0x9F, 0x5F, 0x7C, 0xFE])
def test_what_is_no_item_ends_the_count_and_is_refused_as_what_it_is(bad: int) -> None:
    raw = head(4, MAX_ITEMS * 2) + bytes([bad]) * (MAX_ITEMS * 2)
    with pytest.raises(DecodeError) as refusal:
        decode(raw)
    assert "more than" not in str(refusal.value)


text = st.text(st.characters(codec="utf-8"))
keys = text | st.binary(max_size=8) | st.just(Colour.RED)
zones = st.builds(timezone, st.integers(-1439, 1439).map(lambda minutes: timedelta(minutes=minutes))) | st.just(UTC)
decimals = st.builds(
    lambda digits, exponent: Decimal(f"{digits}E{exponent}"),
    st.integers(-(2**64), 2**64 - 1) | st.integers(1 - 10**1000, 10**1000 - 1),
    st.integers(-1000, 1000),
)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**64), 2**64 - 1), st.floats(allow_nan=False), text, st.binary()),
    *(st.datetimes(timezones=zones), st.dates(), st.uuids(), decimals),
)
supported = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5), max_leaves=20
)
hostile_leaves = st.one_of(
    *(st.integers(), st.floats(), st.text(), st.decimals(), st.fractions(), st.complex_numbers(), st.times()),
    *(st.datetimes(), st.timedeltas(), st.ip_addresses(), st.slices(5), st.just(Shouting("x")), st.just(Plain.ONE)),
    # At noon in June no zone repeats or skips an hour: Python would call nothing equal to such a datetime.
    st.builds(datetime, st.integers(1, 9999), st.just(6), st.just(15), st.just(12), tzinfo=st.timezones()),
    st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(lambda o: datetime(2000, 1, 1, tzinfo=timezone(o))),
    st.sampled_from([cbor2.undefined, cbor2.CBORSimpleValue(5), cbor2.CBORTag(37, b"x"), object(), int, range(3)]),
)
hostile = st.recursive(
    scalars | hostile_leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.lists(inner, max_size=4).map(Reversed),
        st.dictionaries(keys | st.integers() | st.none() | st.text() | st.just(Shouting("x")), inner, max_size=4),
        st.dictionaries(text, inner, max_size=4).map(OrderedDict),
        st.frozensets(st.integers(), max_size=4),
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(supported)
@settings(deadline=None)
def test_every_supported_value_comes_back_equal(value: object) -> None:
    assert decode(encode(value)) == value


@pytest.mark.slow
@given(supported | hostile)
@settings(max_examples=300, deadline=None)
def test_whatever_the_encoder_accepts_the_decoder_returns_equal(value: object) -> None:
    try:
        raw = encode(value)
    except EncodeError:
        return
    assert decode(raw) == value


# --- what the encoder refuses ---------------------------------------------------------------------------------------

REFUSED: list[tuple[object, str]] = [
    ({"items": [1, 2, (3, 4)]}, "value.items[2] is a tuple, which CBOR gives back as a list: send a list"),
    (Point(1, 2), "value is a Point, which CBOR gives back as a list: send a list"),
    ({"tags": {1}}, "value.tags is a set, which has no order and comes back as a list: send a sorted list"),
    ([frozenset()], "value[0] is a frozenset, which has no order"),
    ({"a": {"b": math.nan}}, "value.a.b is NaN, which equals nothing, not even itself: send None"),
    (
        {"at": datetime(2026, 8, 2)},  # noqa: DTZ001 (the fault)
        "value.at is a datetime without a time zone",
    ),
    (LateDatetime(2026, 8, 2), "value is a datetime without a time zone"),
    (
        datetime(1880, 1, 1, tzinfo=timezone(timedelta(seconds=15))),
        "value is a datetime whose UTC offset has seconds, which RFC 3339 cannot write: send .astimezone(UTC)",
    ),
    (datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=1))), "value is a datetime whose UTC offset has sec"),
    (2**64, "value is an int beyond 64 bits: send it as text"),
    (-(2**64) - 1, "value is an int beyond 64 bits"),
    ({"n": {1: "a"}}, "value.n has a key that is an int: send text as keys"),
    ({("a", 1): "a"}, "value has a key that is a tuple: send text as keys"),
    ({None: "a"}, "value has a key that is a NoneType: send text as keys"),
    ([Order(1)], "value[0] is an Order, which CBOR cannot give back: send its parts as a dict, or its text"),
    (Plain.ONE, "value is a Plain, which"),
    (time(12), "value is a time, which"),
    (timedelta(1), "value is a timedelta, which"),
    (Fraction(1, 3), "value is a Fraction, which"),
    (range(3), "value is a range, which"),
    (memoryview(b"x"), "value is a memoryview, which"),
    (cbor2.undefined, "value is an UndefinedType, which"),
    (cbor2.CBORSimpleValue(16), "value is a CBORSimpleValue, which"),
    (cbor2.CBORTag(28, []), "value is a CBORTag, which"),
    (["\ud800"], "value[0] is text with a lone surrogate, which UTF-8 cannot hold"),
    ({"name": {"\udfff": 1}}, "value.name has a key that is text with a lone surrogate"),
    (Decimal("NaN"), "value is a Decimal without a value (NaN or Infinity): send None"),
    (Decimal("sNaN"), "value is a Decimal without a value"),
    (Decimal("-Infinity"), "value is a Decimal without a value"),
    (Decimal("1E+1001"), "value is a Decimal with an exponent beyond 1000: send it as text"),
    (Decimal("1E-1001"), "value is a Decimal with an exponent beyond 1000"),
    (Decimal("1E+999999999999"), "value is a Decimal with an exponent beyond 1000"),
    (Decimal(10**1000), "value is a Decimal of more than 1,000 digits: send it as text"),
    (Decimal("1." + "0" * 5000), "value is a Decimal of more than 1,000 digits"),
    (
        nested(33),
        "value[0][0][0][0] ... [0][0][0] is nested more than 32 deep, or contains itself: send a flatter value",
    ),
    (cyclic(), "value.me[0].me[0] ... [0].me[0] is nested more than 32 deep, or contains itself"),
    (Shouting("x"), "value is a Shouting that does not come back equal: send a plain str"),
    ({Shouting("x"): 1}, "value is a dict that does not equal its plain copy"),
    (
        GermanDatetime(2026, 8, 2, tzinfo=UTC),
        "value is a GermanDatetime that does not come back equal: send a plain date",
    ),
    (Shrunk(a=1), "value is a Shrunk that does not equal its plain copy"),
    (Reversed([1, 2]), "value is a Reversed that does not equal its plain copy"),
    ([OrderedDict(a=1, b={1})], "value[0].b is a set"),
    ({"not a field's name": {1}}, "value[...] is a set"),
]


@listed(("value", "reason"), REFUSED)
def test_refusal_says_where_and_why_and_what_to_send(value: object, reason: str) -> None:
    with pytest.raises(EncodeError) as refusal:
        encode(value)
    assert str(refusal.value).startswith(f"Cannot send this value: {reason}")


@listed(
    "value",
    [
        {"a": "SECRET\ud800"},
        {"SECRET\ud800": 1},
        {"SECRET key": {1}},
        [("SECRET",)],
        datetime(2026, 1, 1, tzinfo=Exploding()),
    ],
)
def test_refusal_never_shows_the_payload(value: object) -> None:
    with pytest.raises(EncodeError) as refusal:
        encode(value)
    assert "SECRET" not in "".join(format_exception(refusal.value))


def test_value_nested_without_end_is_refused_and_does_not_end_the_process() -> None:
    value = nested(sys.getrecursionlimit() * 100)
    with pytest.raises(EncodeError, match="more than 32 deep"):
        encode(value)
    # Taken apart by hand: freeing it in one go would recurse as deep.
    while isinstance(value, list):
        value = value.pop()


# --- what the decoder refuses ---------------------------------------------------------------------------------------


def head(major: int, count: int) -> bytes:
    return bytes([major << 5 | 27]) + count.to_bytes(8, "big")


def colliding_bignum_keys() -> bytes:
    # Multiples of the modulus of Python's integer hash all hash to 0: inserting n of them takes n * n steps.
    numbers = [n * (2**61 - 1) for n in range(10, 15_000)]
    return head(5, len(numbers)) + b"".join(cbor2.dumps(number << 64) + b"\x00" for number in numbers)


def shared_reference_bomb() -> bytes:
    # Each list holds the one before ten times, by reference: 12 levels decode to 10**12 items.
    bomb = b"\xd8\x1c\x80"
    for level in range(12):
        bomb = b"\xd8\x1c\x8b" + bomb + bytes([0xD8, 0x1D, 12 - level]) * 10
    return bomb


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "premature end"),
    "truncated": (cbor2.dumps({"a": "text"})[:-1], "premature end"),
    "trailing bytes": (b"\x01\x01", "more bytes follow"),
    "trailing bytes past the read-ahead": (cbor2.dumps(b"x" * 4093) + b"\x01", "more bytes follow"),
    "duplicate key": (b"\xa2\x61a\x01\x61a\x02", "Duplicate map key"),
    "colliding bignum keys": (colliding_bignum_keys(), "must be a text string or byte string, not Bignum"),
    "int key": (b"\xa1\x01\x02", "map key must be a text string or byte string"),
    "null key": (b"\xa1\xf6\x02", "map key must be a text string or byte string"),
    "datetime key": (b"\xa1\xc1\x01\x02", "map key must be a text string or byte string"),
    "list key": (b"\xa1\x81\x01\x02", "map key must be a text string or byte string"),
    "shared reference bomb": (shared_reference_bomb(), "tag 28"),
    "cyclic list": (b"\xd8\x1c\x81\xd8\x1d\x00", "tag 28"),
    "string references": (b"\xd9\x01\x00\x82\x63abc\xd8\x19\x00", "tag 256"),
    "bignum of a megabyte": (
        b"\xc2\x5a\x00\x10\x00\x00" + b"\xff" * 2**20,
        "an integer beyond 64 bits outside of a decimal",
    ),
    "negative bignum": (b"\xc3\x41\x01", "an integer beyond 64 bits outside of a decimal"),
    "bigfloat": (b"\xc5\x82\x01\x01", "tag 5"),
    "set": (b"\xd9\x01\x02\x81\x01", "tag 258"),
    "fraction": (b"\xd8\x1e\x82\x01\x03", "tag 30"),
    "regular expression": (b"\xd8\x23\x61a", "tag 35"),
    "MIME message": (b"\xd8\x24\x61a", "tag 36"),
    "IP address": (b"\xd8\x34\x44\x7f\x00\x00\x01", "tag 52"),
    "epoch date": (b"\xd8\x64\x01", "tag 100"),
    "complex": (b"\xd9\xa7\xf8\x82\xf9\x3c\x00\xf9\x3c\x00", "tag 43000"),
    "self-described": (b"\xd9\xd9\xf7\x01", "tag 55799"),
    "unknown tag": (b"\xd9\x03\xe7\x01", "tag 999"),
    "largest tag": (head(6, 2**64 - 1) + b"\x01", "tag 18446744073709551615"),
    "tag without content": (b"\xc5", "tag 5 is not one of 0, 1, 2, 3, 4, 37, 1004"),
    "undefined": (b"\xf7", "undefined"),
    "undefined inside": (b"\x81\xa1\x61a\x82\x01\xf7", "undefined"),
    "simple value": (b"\xf0", "simple value"),
    "simple value of two bytes": (b"\x81\xf8\xff", "simple value"),
    "false of two bytes": (b"\xf8\x14", "simple value"),
    "break": (b"\xff", "break"),
    "reserved": (b"\x1c", "subtype"),
    "indefinite list": (b"\x9f\xff", "indefinite"),
    "indefinite map": (b"\xbf\xff", "indefinite"),
    "indefinite text": (b"\x7f\x61a\xff", "indefinite"),
    "indefinite bytes": (b"\x5f\x41a\xff", "indefinite"),
    "invalid UTF-8": (b"\x62\xc3\x28", "text string (UnicodeDecodeError)"),
    "surrogate in UTF-8": (b"\x63\xed\xa0\x80", "text string (UnicodeDecodeError)"),
    "too deep": (b"\x81" * (MAX_DEPTH + 1) + b"\x01", "maximum container nesting depth (32)"),
    "far too deep": (b"\x81" * 100_000, "maximum container nesting depth (32)"),
    "chain of tags": (b"\xc1" * 100_000, "maximum container nesting depth (32)"),
    "huge list": (head(4, 2**64 - 1), ""),
    "huge text": (head(3, 2**63 - 1), ""),
    "too large": (b"\x5a\x01\x00\x00\x00" + b"x" * 2**24, "16,777,221 bytes; the limit is 16,777,216"),
    "datetime without zone": (b"\xc0\x732026-08-02T12:00:00", "a datetime has no time zone"),
    "datetime with seconds in its offset": (b"\xc0\x78\x1c2026-08-02T12:00:00+00:19:32", "an offset with seconds"),
    "datetime that is none": (b"\xc0\x61x", "tag 0 (ValueError)"),
    "datetime of an int": (b"\xc0\x01", "a tag holds an int where a str belongs"),
    "epoch of text": (b"\xc1\x611", "a tag holds a str where an int belongs"),
    "epoch of true": (b"\xc1\xf5", "a tag holds a bool where an int belongs"),
    "epoch NaN": (b"\xc1\xf9\x7e\x00", "tag 1 (ValueError)"),
    "epoch infinite": (b"\xc1\xf9\x7c\x00", "tag 1 (OverflowError)"),
    "epoch beyond year 9999": (b"\xc1\x1b\x00\x00\x00\xff\x00\x00\x00\x00", "tag 1"),
    "decimal with a huge exponent": (b"\xc4\x82\x1a\x3b\x9a\xca\x00\x01", "an exponent beyond 1000"),
    "decimal just beyond": (b"\xc4\x82\x39\x03\xe8\x01", "an exponent beyond 1000"),
    "decimal of too many digits": (b"\xc4\x82\x00" + cbor2.dumps(10**1000), "a decimal has more than 1000 digits"),
    "negative one": (b"\xc4\x82\x00" + cbor2.dumps(-(10**1000)), "a decimal has more than 1000 digits"),
    "decimal of ever so many": (b"\xc4\x82\x00\xc2" + cbor2.dumps(b"1" * 10_000), "more than 1000 digits"),
    "decimal of a bignum of text": (b"\xc4\x82\x00\xc2\x61\x31", "a tag holds a str where a bytes belongs"),
    "exponent that is a bignum": (b"\xc4\x82\xc2\x41\x01\x01", "a tag holds a Bignum where an int belongs"),
    "bignum": (cbor2.dumps(2**64), "an integer beyond 64 bits outside of a decimal"),
    "negative bignum in a list": (cbor2.dumps([-(2**64) - 1]), "an integer beyond 64 bits outside of a decimal"),
    "bignum as key": (cbor2.dumps({2**64: 1}), "must be a text string or byte string, not Bignum"),
    "decimal of a float": (b"\xc4\x82\x00\xf9\x3c\x00", "a tag holds a float where an int belongs"),
    "decimal of three": (b"\xc4\x83\x00\x01\x02", "not a pair"),
    "decimal of no list": (b"\xc4\x01", "not a pair"),
    "UUID of 15 bytes": (b"\xd8\x25\x4f" + b"x" * 15, "tag 37 (ValueError)"),
    "UUID of sixteen ints": (b"\xd8\x25\x90" + b"\x01" * 16, "a tag holds a list where a bytes belongs"),
    "date that is none": (b"\xd9\x03\xec\x6a2026-02-30", "tag 1004 (ValueError)"),
    "date of bytes": (b"\xd9\x03\xec\x4a2026-02-28", "a tag holds a bytes where a str belongs"),
}


@listed("name", WRONG)
def test_wrong_bytes_raise_decode_error_that_says_what_is_wrong(name: str) -> None:
    raw, reason = WRONG[name]
    with pytest.raises(DecodeError) as refusal:
        decode(raw)
    assert reason in str(refusal.value)


@listed(
    "raw",
    [
        b"\xa2\x66SECRET\x01\x66SECRET\x02",
        b"\xa2\x46SECRET\x01\x46SECRET\x02",
        b"\x67SECRET\xff",
        b"\xc0\x66SECRET",
        b"\xd9\x03\xec\x66SECRET",
        b"\xd8\x25\x46SECRET",
        b"\xc2\x46SECRET",
        b"\x66SECRET\x66SECRET",
    ],
)
def test_decode_error_never_shows_the_payload(raw: bytes) -> None:
    with pytest.raises(DecodeError) as refusal:
        decode(raw)
    assert "SECRET" not in "".join(format_exception(refusal.value))


def test_what_one_message_shared_is_unknown_to_the_next() -> None:
    with pytest.raises(DecodeError):
        decode(b"\x82\xd8\x1c\x81\x01\xd8\x1d\x00")
    with pytest.raises(DecodeError):
        decode(b"\xd8\x1d\x00")


def decodes_or_refuses(raw: bytes) -> None:
    try:
        value = decode(raw)
    except DecodeError:
        return
    # Also what is decoded stays inside the supported types: all but NaN could be sent on.
    if "nan" not in repr(value):
        assert decode(encode(value)) == value


@pytest.mark.slow
@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_bytes_decode_or_raise_decode_error(raw: bytes) -> None:
    decodes_or_refuses(raw)


@pytest.mark.slow
@given(supported.map(encode), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_damaged_values_decode_or_raise_decode_error(raw: bytes, chance: random.Random) -> None:
    damaged = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(4):
            case 0:
                damaged[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                damaged[at:at] = damaged[chance.randrange(len(damaged) + 1) :][:16]
            case 2:
                del damaged[at : at + chance.randint(1, 4)]
            case 3:
                # Heads of tags and special values, which random bytes rarely hit together with content.
                damaged[at:at] = chance.choice([b"\xc0", b"\xc1", b"\xc4\x82", b"\xd8\x25", b"\xd9\x03\xec", b"\xf7"])
    decodes_or_refuses(bytes(damaged))


@pytest.mark.slow
@given(supported.map(encode), st.binary(min_size=1, max_size=3))
@settings(deadline=None)
def test_bytes_behind_a_value_are_always_noticed(raw: bytes, more: bytes) -> None:
    with pytest.raises(DecodeError, match="more bytes follow"):
        decode(raw + more)


@listed("size", [4095, 4096, 4097, 65_535, 65_536, 65_537, 200_000])
def test_end_of_a_value_is_found_at_every_size_of_read_ahead(size: int) -> None:
    raw = encode(["é" * (size // 2), b"x" * size, 1])
    assert encode(decode(raw)) == raw
    with pytest.raises(DecodeError, match="more bytes follow"):
        decode(raw + b"\x01")
