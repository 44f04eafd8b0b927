"""Values of each supported type come back equal by the codec, and what would not is refused without its content."""

import enum
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailroom.errors import ConfigurationError, DecodeError, EncodeError
from mailroom.message.typed.values import Values, values_of
from mailroom.values import codec
from tests.support.listed import listed
from tests.support.noted import END

ROOT = Path(__file__).parents[2]
SECRET = "SECRET"
X = TypeVar("X")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Place(NamedTuple):
    shelf: int
    row: str = "a"


class Rest(TypedDict, total=False):
    note: str


@dataclass
class Item:
    name: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    """One field of each kind of type."""

    item: Item
    items: list[Item]
    by_name: dict[str, Item]
    by_number: dict[int, Size]
    by_id: dict[UUID, date]
    perhaps: Item | None
    colour: Colour
    place: Place
    pair: tuple[int, str]
    many: tuple[Decimal, ...]
    numbers: frozenset[int]
    at: datetime
    day: date
    hour: time
    took: timedelta
    id: UUID
    price: Decimal
    data: bytes
    weight: float
    rest: Rest
    any: Any = None
    tags: list[str] = field(default_factory=list)


@dataclass
class Tree:
    name: str
    branches: list["Tree"] = field(default_factory=list)


@dataclass
class Box(Generic[X]):
    content: X


class Struct(msgspec.Struct, rename="kebab", tag="struct", frozen=True):
    item_name: str
    place: Place | None = None


class Other(msgspec.Struct, tag="other", frozen=True):
    number: int


class Row(msgspec.Struct, array_like=True, frozen=True):
    number: int
    place: Place


class Line(pydantic.BaseModel):
    item: str = pydantic.Field(alias="itemName")
    amount: int = 1


class Number(pydantic.BaseModel):
    number: int


class Invoice(pydantic.BaseModel):
    """One field of each kind of type that pydantic has, and some of its own."""

    lines: list[Line]
    by_name: dict[str, Line]
    by_number: dict[int, str]
    colour: Colour
    pair: tuple[int, str]
    numbers: set[int]
    at: datetime
    day: date
    took: timedelta
    id: UUID
    price: Decimal
    data: bytes
    link: pydantic.HttpUrl
    path: Path

    @pydantic.computed_field  # type: ignore[prop-decorator]  # mypy knows no decorator above a property
    @property
    def total(self) -> int:
        return len(self.lines)


@pydantic.dataclasses.dataclass
class Checked:
    amount: pydantic.PositiveInt


@dataclass
class Bill:
    """A dataclass that holds a model is pydantic's."""

    invoice: Line
    number: int


@dataclass
class Never:
    """Its text and its exception hold the value."""

    amount: int

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError(f"{SECRET} - at `$.amount`")
        if self.amount == 0:
            raise KeyError(SECRET)


LOOP: list[Any] = []
LOOP.append(LOOP)

LINE = Line(itemName="teapot", amount=2)
INVOICE = Invoice(
    lines=[LINE], by_name={"a": LINE}, by_number={7: "x"}, colour=Colour.RED, pair=(1, "x"), numbers={1, 2},
    at=datetime(2026, 1, 2, 3, 4, 5, 6, UTC), day=date(2026, 1, 2), took=timedelta(hours=1), id=UUID(int=7),
    price=Decimal("1.50"), data=b"\xff\x00", link=pydantic.HttpUrl("https://example.org/a"), path=Path("/a"),
)  # fmt: skip


def of(value_type: Any) -> Values[Any]:
    return values_of(value_type, "give read= and write=")


def back(value_type: Any, value: Any) -> Any:
    """What a receiver gets."""
    values = of(value_type)
    return values.read(codec.decode(codec.encode(values.write(value))))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTS = st.integers(-(2**63), 2**63 - 1)
MOMENTS = st.datetimes(timezones=st.just(UTC))
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=6)
ITEMS = st.builds(Item, TEXTS, INTS)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | TEXTS | st.binary(max_size=8) | MOMENTS | st.uuids() | DECIMALS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ORDERS = st.builds(
    Order,
    item=ITEMS,
    items=st.lists(ITEMS, max_size=3),
    by_name=st.dictionaries(TEXTS, ITEMS, max_size=3),
    by_number=st.dictionaries(INTS, st.sampled_from(Size), max_size=3),
    by_id=st.dictionaries(st.uuids(), st.dates(), max_size=3),
    perhaps=st.none() | ITEMS,
    colour=st.sampled_from(Colour),
    place=st.builds(Place, INTS, TEXTS),
    pair=st.tuples(INTS, TEXTS),
    many=st.lists(DECIMALS, max_size=3).map(tuple),
    numbers=st.frozensets(INTS, max_size=3),
    at=MOMENTS,
    day=st.dates(),
    hour=st.times(),
    took=st.timedeltas(timedelta(days=-99_999), timedelta(days=99_999)),
    id=st.uuids(),
    price=DECIMALS,
    data=st.binary(max_size=8),
    weight=st.floats(allow_nan=False),
    rest=st.just({}) | st.fixed_dictionaries({"note": TEXTS}),
    any=PLAIN,
    tags=st.lists(TEXTS, max_size=3),
)
ORDER = Order(
    Item("teapot"), [], {}, {}, {}, None, Colour.RED, Place(1), (1, "x"), (), frozenset(),
    datetime(2026, 1, 2, 3, 4, 5, 6, UTC), date(2026, 1, 2), time(1, 2), timedelta(seconds=1), UUID(int=7),
    Decimal("1.50"), b"\xff\x00", 1.5, {},
)  # fmt: skip


class Text(str):
    __slots__ = ()


class Moment(datetime):
    pass


class Unknown:
    pass


@dataclass
class HasUnknown:
    inner: list[Unknown]


@dataclass
class HasInit:
    number: InitVar[int]


@attrs.define
class Attrs:
    number: int


class Mixed(enum.Enum):
    A = "a"
    B = 2


class Strange(pydantic.BaseModel):
    """Of its field pydantic cannot make a JSON schema."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    unknown: Unknown


class Secretive(pydantic.BaseModel):
    password: pydantic.SecretStr


@pytest.mark.slow
@given(ORDERS)
def test_a_dataclass_comes_back_equal(order: Order) -> None:
    assert back(Order, order) == order


@pytest.mark.slow
@given(ORDERS)
def test_the_texts_of_json_are_read_as_well(order: Order) -> None:
    order = replace(order, any=None, weight=1.5)  # under Any a text stays one, and JSON has no infinity
    assert of(Order).read(json.loads(msgspec.json.encode(order))) == order


@listed(
    ("value_type", "value"),
    [
        (int, 5),
        (dict, {"a": [1, None]}),
        (dict, {b"key": 1}),
        (Any, {"a": [1, None]}),
        (dict[str, object], {"a": [1, None]}),
        (list[Item], [Item("teapot", 2)]),
        (dict[str, Item], {"a": Item("teapot")}),
        (dict[Colour, int], {Colour.RED: 1}),
        (dict[bytes, tuple[int, int]], {b"\xff": (1, 2)}),
        (dict[datetime, int], {datetime(2026, 1, 2, tzinfo=UTC): 1}),
        (Item | None, None),
        (Literal["a", "b"], "b"),
        (NewType("Number", int), 5),
        (Sequence[int], [1, 2]),
        (Place, Place(1)),
        (Tree, Tree("a", [Tree("b"), Tree("c", [Tree("d")])])),
        (Box[Item], Box(Item("teapot"))),
        (Struct, Struct("teapot", Place(1, "b"))),
        (Struct | Other, Other(5)),
        (Row, Row(5, Place(1))),
        (datetime, Moment(2026, 1, 2, tzinfo=UTC)),
        (Item, Item(Text("teapot"))),
        (Invoice, INVOICE),
        (list[Line], [LINE]),
        (Line | Number, Number(number=5)),
        (Line | None, None),
        (Bill, Bill(LINE, 5)),
        (Checked, Checked(5)),
    ],
)
def test_values_of_every_type_come_back_equal(value_type: Any, value: object) -> None:
    assert back(value_type, value) == value


def test_what_cbor_has_travels_as_it_is() -> None:
    plain: Any = of(Order).write(ORDER)
    assert [plain[name] for name in ("at", "day", "id", "price", "data")] == [
        ORDER.at, ORDER.day, ORDER.id, ORDER.price, ORDER.data,
    ]  # fmt: skip
    plain = of(Invoice).write(INVOICE)
    assert [plain[name] for name in ("at", "day", "id", "price", "data")] == [
        INVOICE.at, INVOICE.day, INVOICE.id, INVOICE.price, INVOICE.data,
    ]  # fmt: skip
    assert plain["lines"] == [{"itemName": "teapot", "amount": 2}]


def test_the_texts_of_json_are_read_by_pydantic_as_well() -> None:
    sent = INVOICE.model_copy(update={"data": b"text"})
    assert of(Invoice).read(json.loads(sent.model_dump_json(by_alias=True))) == sent


@listed(("value_type", "plain"), [(Item, {"name": "teapot", "more": 1}), (Line, {"itemName": "teapot", "x": 1})])
def test_a_sender_may_know_more_fields_and_fewer(value_type: Any, plain: object) -> None:
    assert of(value_type).read(plain).amount == 1


@listed(
    "value_type",
    [
        Unknown, HasUnknown, HasInit, Attrs, list[Attrs], Mixed, type, complex, Fraction, Callable, msgspec.Raw,
        memoryview, "Item", Item | Tree, UUID | str, dict[int | str, int], dict[tuple[int, int], int],
    ],
)  # fmt: skip
def test_a_type_whose_values_would_not_come_back_is_refused_at_once(value_type: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^Values of the type .+ cannot be sent: .+\. So give read= and write=\." + END
    ):
        of(value_type)


def test_a_type_that_names_what_is_not_there_is_refused_at_once() -> None:
    @dataclass
    class Later:
        inner: "NotYet"  # type: ignore[name-defined]  # noqa: F821  # as if under TYPE_CHECKING

    with pytest.raises(ConfigurationError, match=r"NotYet.*give read= and write="):
        of(Later)


# By type: a plain value that does not fit, and how the error names the field.
MISFITS: list[tuple[Any, Any, str]] = [
    (int, SECRET, "value does not fit"),
    (Item, SECRET, "value does not fit"),
    (Item, {"name": "teapot", "amount": SECRET}, "value.amount does not fit"),
    (Item, {SECRET: 1}, "value.name is missing"),
    (list[Item], [{"name": "a"}, {"amount": 1}], "value[1].name is missing"),
    (dict[str, Item], {SECRET: {"name": 1}}, "value[...].name does not fit"),
    (dict[str, list[Item]], {SECRET: [{}]}, "value[...][0].name is missing"),
    (dict[str, dict[str, int]], {SECRET: {SECRET: SECRET}}, "value[...][...] does not fit"),
    (dict[UUID, int], {SECRET: 1}, "a key of value does not fit"),
    (Tree, {"name": "", "branches": [{"name": "", "branches": [{}]}]}, "value.branches[0].branches[0].name is missing"),
    (Colour, SECRET, "value does not fit"),
    (Struct, {"type": "struct", "item-name": 1}, "value.item-name does not fit"),
    (Struct | Other, {"type": SECRET}, "value.type does not fit"),
    (Never, {"amount": -1}, "value does not fit"),
    (Never, {"amount": 0}, "value does not fit"),
    (list[Never], [{"amount": -1}], "value[0] does not fit"),
    (dict[str, Never], {SECRET: {"amount": 0}}, "value does not fit"),
    (Rest, {"note": 1}, "value.note does not fit"),
    (Line, SECRET, "value does not fit"),
    (Line, {"itemName": "a", "amount": SECRET}, "value.amount does not fit"),
    (Line, {SECRET: 1}, "value.itemName is missing"),
    (list[Line], [{"itemName": "a"}, {}], "value[1].itemName is missing"),
    (dict[str, Line], {SECRET: {}}, "value[...].itemName is missing"),
    (Checked, {"amount": -1}, "value.amount does not fit"),
    (Strange, {"unknown": SECRET}, "value[...] does not fit"),
]  # fmt: skip


@listed(("value_type", "plain", "where"), MISFITS)
def test_what_does_not_fit_is_an_error_that_names_the_field_and_no_content(
    value_type: Any, plain: Any, where: str
) -> None:
    values = of(value_type)
    with pytest.raises(DecodeError, match=rf": {re.escape(where)}\. Message\.raw") as caught:
        values.read(plain)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@listed(
    ("value_type", "value", "said"),
    [
        (Item, Item("teapot", amount=SECRET), "it is not a valid Item, value.amount does not fit."),  # type: ignore[arg-type]
        (Item, Place(1), "it is not a valid Item, value does not fit."),
        (Item, Item("teapot", amount=Unknown()), "which CBOR cannot give back"),  # type: ignore[arg-type]
        (list, LOOP, "RecursionError came out of it."),
        (Line, Line.model_construct(item="teapot", amount=SECRET), "it cannot be written as Line"),
        (Line, {"itemName": SECRET}, "it cannot be written as Line"),
        (Secretive, Secretive(password=SECRET), "it holds a SecretStr, of which pydantic writes asterisks."),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_no_receiver_could_read_is_not_sent(value_type: Any, value: object, said: str) -> None:
    with pytest.raises(EncodeError, match=re.escape(said)) as caught:
        of(value_type).write(value)
    assert str(caught.value).startswith("Cannot send this value: ")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@listed(("value_type", "value"), [(list, (1, 2)), (dict, {1: 2}), (list[int], (1, 2)), (Any, {"a": (1,)})])
def test_a_tuple_or_a_key_that_would_come_back_as_something_else_is_refused(value_type: Any, value: object) -> None:
    with pytest.raises(EncodeError):
        codec.encode(of(value_type).write(value))


def test_pydantic_is_imported_only_for_its_models() -> None:
    program = """
import sys
from dataclasses import dataclass
from mailroom import Topic

@dataclass
class Item:
    name: str

Topic("item", Item)
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
