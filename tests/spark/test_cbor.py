"""Columns of Spark as CBOR and back: equal to the codec byte for byte, within its limits, and the documented table."""

import math
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason="the extra spark is not installed")

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql.types import DataType, StructType

from mailroom.errors import ConfigurationError, DecodeError, EncodeError
from mailroom.values.codec import MAX_DEPTH, MAX_ITEMS, decode, encode
from mailroom.values.names import MAX_VALUE_BYTES
from spark_jobs.arrow import message_rows
from spark_jobs.arrow.cbor import encoded
from spark_jobs.arrow.cbor_types import arrow_type, check_spark_type, check_type
from spark_jobs.read.cbor_decoded import decoded, from_cbor
from spark_jobs.read.inbox_rows import ALL
from spark_jobs.read.inbox_source import _demand_ours
from spark_jobs.write.columns import BusinessColumn
from spark_jobs.write.shape import Shape
from tests.support.pages import page_named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGE = page_named("spark-types.md")
TIMESTAMP = pa.timestamp("us", "UTC")


# --- any type, any value --------------------------------------------------------------------------------------------


def fraction(scale: int, digits: int) -> Decimal:
    return Decimal(f"{digits}E-{scale}")


INTEGERS = {pa.int8(): 7, pa.int16(): 15, pa.int32(): 31, pa.int64(): 63}
DECIMALS = [(5, 2), (19, 19), (19, 0), (38, 10), (38, 38)]
FINITE = st.floats(allow_nan=False)
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    # Near the edges of the widths as often as anywhere.
    *(
        (kind, st.integers(0, bits).flatmap(lambda width: st.integers(-(2**width), 2**width - 1)))
        for kind, bits in INTEGERS.items()
    ),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), FINITE),
    (pa.string(), st.text() | st.text(min_size=20, max_size=300)),
    (pa.large_string(), st.text()),
    (pa.binary(), st.binary() | st.binary(min_size=20, max_size=300)),
    (pa.large_binary(), st.binary()),
    (pa.date32(), st.dates()),
    (TIMESTAMP, st.datetimes(timezones=st.just(UTC))),
    (TIMESTAMP, st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=0))),
    *(
        (
            pa.decimal128(precision, scale),
            st.integers(0, precision)
            .flatmap(lambda digits: st.integers(1 - 10**digits, 10**digits - 1))
            .map(partial(fraction, scale)),
        )
        for precision, scale in DECIMALS
    ),
]
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def of_parts(parts: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    return lists(parts) | maps(parts) | structs(parts)


def lists(parts: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    return parts.map(lambda part: (pa.list_(pa.field("element", part[0])), st.lists(part[1] | st.none(), max_size=4)))


def maps(parts: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    keys = st.sampled_from([(pa.string(), st.text()), (pa.binary(), st.binary()), (pa.large_string(), st.text())])
    return st.tuples(keys, parts).map(
        lambda pair: (
            pa.map_(pair[0][0], pair[1][0]),
            st.dictionaries(pair[0][1], pair[1][1] | st.none(), max_size=3).map(lambda made: list(made.items())),
        )
    )


def structs(parts: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    return st.dictionaries(st.text(max_size=30), parts, max_size=4).map(
        lambda fields: (
            pa.struct([(name, part[0]) for name, part in fields.items()]),
            st.fixed_dictionaries({name: part[1] | st.none() for name, part in fields.items()}),
        )
    )


TYPED = st.recursive(st.sampled_from(LEAVES), of_parts, max_leaves=6)


@st.composite
def arrays(draw: st.DrawFn) -> pa.Array:
    kind, values = draw(TYPED)
    rows = draw(st.lists(values | st.none(), max_size=12))
    array = pa.array(rows, kind)
    start, end = draw(st.integers(0, len(rows))), draw(st.integers(0, len(rows)))
    return array[min(start, end) : max(start, end)] if draw(st.booleans()) else array


def plain(value: Any, kind: pa.DataType) -> Any:
    """The value that a consumer is to get: of a map, Arrow gives its pairs."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: plain(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    return value


def plain_rows(array: pa.Array) -> list[Any]:
    return [plain(value, array.type) for value in array.to_pylist()]


@settings(max_examples=400, deadline=None)
@given(arrays())
def test_any_array_is_encoded_as_the_codec_encodes_its_values(array: pa.Array) -> None:
    items = encoded(array)
    items.validate(full=True)
    assert items.null_count == 0
    assert items.to_pylist() == [encode(value) for value in plain_rows(array)]
    assert [decode(item) for item in items.to_pylist()] == plain_rows(array)


@settings(max_examples=200, deadline=None)
@given(arrays())
def test_any_array_comes_back_as_its_type(array: pa.Array) -> None:
    kind = small(array.type)
    back = decoded(encoded(array), kind)
    back.validate(full=True)
    assert back.type == kind
    assert back.to_pylist() == array.to_pylist()


def small(kind: pa.DataType) -> pa.DataType:
    """The type as `from_cbor` asks for it."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, small(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", small(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(small(kind.key_type), small(kind.item_type))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


# --- edges ----------------------------------------------------------------------------------------------------------


def test_edges_of_numbers() -> None:
    edges = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1]
    numbers = pa.array(edges + [-1 - edge for edge in edges], pa.int64())
    assert encoded(numbers).to_pylist() == [encode(number) for number in numbers.to_pylist()]
    floats = pa.array([0.0, -0.0, math.inf, -math.inf, 5e-324], pa.float64())
    assert encoded(floats).to_pylist() == [encode(number) for number in floats.to_pylist()]
    edges = [*(2**bits + more for bits in range(127) for more in (-1, 0, 1) if 2**bits < 10**38), 10**38 - 1]
    for scale in (0, 7, 38):
        numbers = [None, *(fraction(scale, sign * edge) for edge in edges for sign in (1, -1))]
        digits = pa.array(numbers, pa.decimal128(38, scale))
        assert encoded(digits).to_pylist() == [encode(number) for number in digits.to_pylist()]
        assert encoded(digits[3:9]).to_pylist() == [encode(number) for number in digits[3:9].to_pylist()]


def test_edges_of_lengths() -> None:
    for length in (23, 24, 255, 256, 65535, 65536):
        for array in (
            pa.array(["x" * length, "y"]),
            pa.array([b"x" * length, b"y"]),
            pa.array([[True] * length, []]),
            pa.array([[(f"{key}", key) for key in range(length)]], pa.map_(pa.string(), pa.int32())),
        ):
            assert encoded(array).to_pylist() == [encode(value) for value in plain_rows(array)]
    wide = pa.array([{f"field_{number}": number for number in range(300)}])
    assert encoded(wide).to_pylist() == [encode(value) for value in wide.to_pylist()]


def test_edges_of_times() -> None:
    texts = ["0001-01-01T00:00:00", "0001-01-01T00:00:00.000001", "1900-03-01T00:00:00", "1969-12-31T23:59:59.999999"]
    texts += ["1970-01-01T00:00:00", "2000-02-29T00:00:00", "2024-12-31T23:59:59", "9999-12-31T23:59:59.999999"]
    moments = [datetime.fromisoformat(f"{text}Z") for text in texts]
    instants = pa.array(moments, TIMESTAMP)
    assert encoded(instants).to_pylist() == [encode(moment) for moment in moments]
    elsewhere = instants.slice(7).cast(pa.timestamp("us", "Etc/GMT+5"))  # as a session of another zone has it
    assert encoded(elsewhere).to_pylist() == [encode(moments[7])]
    days = pa.array(sorted({moment.date() for moment in moments}), pa.date32())
    assert encoded(days).to_pylist() == [encode(day) for day in days.to_pylist()]


def test_what_stands_behind_a_null_is_not_looked_at() -> None:
    nan = pa.array([math.nan, 1.0, math.nan])
    no_text = pa.array([b"\xff", b"a", b"\xff"]).cast(pa.string(), safe=False)
    hidden = pa.StructArray.from_arrays([nan, no_text], ["x", "y"], mask=pa.array([True, False, True]))
    assert [decode(item) for item in encoded(hidden).to_pylist()] == [None, {"x": 1.0, "y": "a"}, None]
    lists = pa.ListArray.from_buffers(
        pa.list_(pa.float64()),
        3,
        [pa.py_buffer(b"\x02"), pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]],
        children=[nan],
    )
    assert [decode(item) for item in encoded(lists).to_pylist()] == [None, [1.0], None]
    assert [decode(item) for item in encoded(lists[1:]).to_pylist()] == [[1.0], None]


# --- what is refused ------------------------------------------------------------------------------------------------


FAULTS: list[tuple[pa.Array, str]] = [
    (pa.array([[{"x": [1.0, math.nan]}]]), r"value\[\]\.x\[\] is NaN.*nanvl"),
    (pa.array([math.nan], pa.float32()), "value is NaN"),
    (
        pa.array([{"d": [-719_163]}], pa.struct([("d", pa.list_(pa.date32()))])),
        r"value\.d\[\] is outside of",
    ),
    (pa.array([2_932_897], pa.int32()).cast(pa.date32()), "outside of the years 1 to 9999"),
    (pa.array([-719_162 * 86_400_000_000 - 1]).cast(TIMESTAMP), "outside of the years 1 to 9999"),
    (pa.array([2_932_897 * 86_400_000_000]).cast(TIMESTAMP), "outside of the years 1 to 9999"),
    (pa.array([b"SECRET\xff"]).cast(pa.string(), safe=False), "not UTF-8"),
    (
        pa.MapArray.from_arrays([0, 1], pa.array([b"SECRET\xff"]).cast(pa.string(), safe=False), pa.array([1])),
        "a key of value is text that is not UTF-8",
    ),
    (pa.array([[], [("a", 1), ("b", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32())), "the same key twice"),
    (pa.array([["x" * 1000] * 17_000]), "takes 17,051,003 bytes as CBOR, the limit being 16,777,216"),
    (pa.array([[], [True] * MAX_ITEMS]), "has more than 250,000 items"),
]


def test_a_fault_of_a_row_is_refused_without_its_content() -> None:
    for array, fault in FAULTS:
        with pytest.raises(EncodeError, match=fault) as refused:
            encoded(array)
        assert "SECRET" not in str(refused.value)
        assert refused.value.__cause__ is None


def test_what_is_just_within_the_limits_passes() -> None:
    for value in ([True] * (MAX_ITEMS - 1), b"x" * (MAX_VALUE_BYTES - 5)):
        assert encoded(pa.array([value]))[0].as_py() == encode(value)
    same_keys = pa.array([[("a", 1), ("b", 2)], [("a", 1), ("b", 2)]], pa.map_(pa.string(), pa.int32()))
    assert [decode(item) for item in encoded(same_keys).to_pylist()] == [{"a": 1, "b": 2}] * 2


def nested(leaf: pa.DataType, levels: int) -> pa.DataType:
    for _ in range(levels):
        leaf = pa.list_(leaf)
    return leaf


def nested_value(leaf: Any, levels: int) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize(
    ("leaf", "kind", "levels"),
    [
        (1, pa.int32(), 0),
        (date(2026, 8, 2), pa.date32(), 1),
        (datetime(2026, 8, 2, tzinfo=UTC), TIMESTAMP, 1),
        (Decimal(10**19 - 1), pa.decimal128(19, 0), 2),
        (Decimal(2**64), pa.decimal128(38, 0), 3),
    ],
    ids=str,
)
def test_depth_is_limited_as_the_codec_limits_it(leaf: Any, kind: pa.DataType, levels: int) -> None:
    deepest = nested_value(leaf, MAX_DEPTH - levels)
    assert encoded(pa.array([deepest], nested(kind, MAX_DEPTH - levels)))[0].as_py() == encode(deepest)
    with pytest.raises(EncodeError):
        encode([deepest])
    with pytest.raises(EncodeError, match=r"value\[\].* nested too deep, the limit being 32"):
        check_type(nested(kind, MAX_DEPTH - levels + 1))


REFUSED: list[tuple[pa.DataType, str]] = [
    (pa.struct([("x", pa.list_(pa.timestamp("us")))]), r"value\.x\[\] is a timestamp_ntz.*cast it to timestamp"),
    (pa.timestamp("ns", "UTC"), "is timestamp.ns"),
    (pa.time64("ns"), "is a time, "),
    (pa.duration("us"), "is an interval"),
    (pa.month_day_nano_interval(), "is an interval"),
    (pa.uint8(), "is uint8"),
    (pa.decimal256(50, 2), "is decimal256"),
    (pa.decimal128(3, -1), "is decimal128"),
    (pa.map_(pa.string(), pa.map_(pa.int32(), pa.string())), r"value\[\] is a map with keys of type int32: cast"),
    (pa.struct([pa.field("a", pa.int32()), pa.field("a", pa.int32())]), "two fields of the same name"),
    (pa.struct([pa.field("metadata", pa.binary(), metadata={"variant": "true"})]), "is variant"),
    (pa.dictionary(pa.int32(), pa.string()), "is dictionary"),
]


def test_a_type_is_refused_before_any_row() -> None:
    for kind, fault in REFUSED:
        with pytest.raises(EncodeError, match=fault):
            encoded(pa.array([], kind))


@pytest.mark.usefixtures("spark")  # which reads DDL
def test_spark_types_that_are_refused() -> None:
    for name in ("TimeType", "VariantType", "GeometryType", "GeographyType"):
        kind = getattr(__import__("pyspark.sql.types", fromlist=[name]), name)
        with pytest.raises(EncodeError, match="which CBOR has no form for"):
            check_spark_type(kind(4326) if name.startswith("Geo") else kind())
    with pytest.raises(EncodeError, match=r"sent\.x\[\] is a timestamp_ntz"):
        check_spark_type(DataType.fromDDL("x array<timestamp_ntz>"), "sent")


# --- reading --------------------------------------------------------------------------------------------------------


READ: list[tuple[Any, str, Any]] = [
    ({"a": 1, "more": 2}, "a int, b array<string>", {"a": 1, "b": None}),
    ({"a": 1}, "a int, b int not null", {"a": 1, "b": None}),
    ({}, "struct<>", {}),
    (5, "decimal(10,2)", Decimal(5)),
    (Decimal("1.500"), "decimal(10,2)", Decimal("1.5")),
    (Decimal("1E+3"), "decimal(10,2)", Decimal(1000)),
    (5, "double", 5.0),
    (0, "double", 0.0),
    (-(2**53), "double", -(2.0**53)),
    (2**53 + 2, "double", 2.0**53 + 2),
    (2**64 - 2**11, "double", 2.0**64 - 2**11),
    (2**24 - 1, "float", 2.0**24 - 1),
    (-(2**63), "float", -(2.0**63)),
    (0.1, "float", 0.10000000149011612),
    (math.inf, "float", math.inf),
    (UUID(int=5), "string", "00000000-0000-0000-0000-000000000005"),
    (
        datetime(2026, 8, 2, 1, tzinfo=timezone(timedelta(hours=5))),
        "timestamp",
        datetime(2026, 8, 1, 20, tzinfo=UTC),
    ),
    ({"a": [1], "b": None}, "map<string,array<int>>", [("a", [1]), ("b", None)]),
]


@pytest.mark.usefixtures("spark")  # which reads DDL
def test_messages_are_read_as_the_schemas_say() -> None:
    for sent, schema, read in READ:
        array = decoded(pa.array([None, encode(sent), encode(None)]), arrow_type(DataType.fromDDL(schema)))
        array.validate(full=True)
        assert array.to_pylist() == [None, read, None], (sent, schema)


def test_nan_that_others_sent_is_read() -> None:
    [number] = decoded(pa.array([bytes.fromhex("f97e00")]), pa.float64()).to_pylist()
    assert math.isnan(number)


UNFIT: list[tuple[Any, str, str]] = [
    ({"a": [{"b": "SECRET"}]}, "a array<struct<b:int>>", r"value\.a\[\]\.b holds a value of type str.* int32"),
    (1.0, "int", "float"),
    (True, "int", "bool"),
    (1, "boolean", "int"),
    (b"SECRET", "string", "bytes"),
    ("SECRET", "binary", "str"),
    (date(2026, 8, 2), "timestamp", "date"),
    (datetime(2026, 8, 2, tzinfo=UTC), "date", "datetime"),
    (1.5, "decimal(10,2)", "float"),
    (1, "void", "int"),
    ([1], "struct<a:int>", "list, which does not fit struct"),
    ({"SECRET": 1}, "array<int>", "dict, which does not fit list"),
    ({b"SECRET": 1}, "map<string,int>", r"value \(its keys\) holds a value of type bytes"),
    (2**31, "int", "beyond its range"),
    (2**63, "bigint", "beyond its range"),
    (2**53 + 1, "double", "beyond its range"),
    (-(2**53) - 1, "double", "beyond its range"),
    (2**64 - 1, "double", "beyond its range"),
    ([0.5, 2**53 + 1], "array<double>", r"value\[\] holds a value beyond its range"),
    (2**24 + 1, "float", "beyond its range"),
    (-(2**24) - 1, "float", "beyond its range"),
    (1e300, "float", "beyond its range"),
    (Decimal("1.555"), "decimal(10,2)", "beyond its range"),
    (10**9, "decimal(10,2)", "beyond its range"),
    (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))), "timestamp", "beyond its range"),
]


@pytest.mark.usefixtures("spark")  # which reads DDL
def test_what_does_not_fit_is_told_by_its_row_without_its_content() -> None:
    for sent, schema, fault in UNFIT:
        with pytest.raises(DecodeError, match=f"Row 3 of a batch of 4 cannot be read.*{fault}") as refused:
            decoded(pa.array([None, encode(None), encode(sent), encode(sent)]), arrow_type(DataType.fromDDL(schema)))
        assert "SECRET" not in str(refused.value)


def test_what_is_no_cbor_is_told_by_its_row() -> None:
    with pytest.raises(DecodeError, match=r"Row 2 of a batch of 2 cannot be read\. The value cannot be decoded"):
        decoded(pa.array([b"\x01", b"\x01\x01"]), pa.int32())


# --- the documented tables, in Spark --------------------------------------------------------------------------------


def table(last_heading: str) -> list[list[str]]:
    """The rows of the table whose last column has this heading; of each cell what is code in it, else its text."""
    _, found, rest = PAGE.read_text().partition(f"| {last_heading} |\n")
    assert found, f"{PAGE.name} has no table {last_heading!r}"
    rows = [line.strip("|").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[1:]]
    return [[code[-1] if (code := re.findall("`([^`]*)`", cell)) else cell.strip() for cell in row] for row in rows]


def sent_through(frame: "DataFrame") -> "DataFrame":
    """The same columns as CBOR, made where the data source makes them."""

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            named = zip(batch.columns, batch.schema.names, strict=True)
            columns = [encoded(column, name).cast(pa.binary()) for column, name in named]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names)

    return frame.mapInArrow(send, ", ".join(f"{name} binary" for name in frame.columns))


def test_documented_types_are_sent_and_come_back_as_documented(spark: "SparkSession") -> None:
    rows = table("in Python")
    frame = spark.sql(
        "SELECT " + ", ".join(f"{example} AS c{number}" for number, (_, example, _, _) in enumerate(rows))
    )
    types = [field.dataType for field in frame.schema]
    assert [kind.simpleString() for kind in types] == [kind for kind, *_ in rows]
    for kind in types:
        check_spark_type(kind)
    sent = sent_through(frame)
    read = sent.select(*(from_cbor(name, kind).alias(name) for name, kind in zip(frame.columns, types, strict=True)))
    assert read.collect() == frame.collect()
    [items] = sent.collect()
    names: dict[str, Any] = {"Decimal": Decimal, "date": date, "datetime": datetime, "UTC": UTC}
    for item, (spark_type, _, cbor, python) in zip(items, rows, strict=True):
        assert bytes(item).hex() == cbor, spark_type
        value, documented = decode(bytes(item)), eval(python, names)
        assert (type(value), value) == (type(documented), documented), spark_type


def handed_over(frame: "DataFrame") -> pa.Array:
    """The first column as Spark hands it to Python; in this process, where failing takes no four attempts."""
    return frame.toArrow().column(0).combine_chunks()


def test_documented_refusals_and_what_to_send_instead(spark: "SparkSession") -> None:
    for spark_type, example, instead in table("send instead, if the column is `x`"):
        frame = spark.sql(f"SELECT {example} AS x")
        assert frame.schema["x"].dataType.simpleString() == spark_type
        with pytest.raises(EncodeError):
            check_spark_type(frame.schema["x"].dataType)
        frame = frame.selectExpr(f"{instead} AS x")
        check_spark_type(frame.schema["x"].dataType)
        assert decode(encoded(handed_over(frame))[0].as_py()) is not None, spark_type


def test_documented_faults_of_rows_and_what_to_send_instead(spark: "SparkSession") -> None:
    for what, example, instead in table("send instead"):
        frame = spark.sql(f"SELECT {example} AS x")
        with pytest.raises(EncodeError, match="Cannot send this value: value is "):
            encoded(handed_over(frame))
        item = encoded(handed_over(frame.selectExpr(f"{instead} AS x")))[0].as_py()
        assert decode(item) in (None, "99999999999999999999", "\ufffd"), what


def test_a_fault_of_a_row_fails_the_job(spark: "SparkSession") -> None:
    with pytest.raises(PythonException, match=r"Cannot send this value: x\.price is NaN"):
        sent_through(spark.sql("SELECT named_struct('price', double('NaN')) AS x")).collect()


def test_tasks_encode_what_spark_hands_over_at_any_nesting(spark: "SparkSession") -> None:
    frame = spark.range(0, 1_000, numPartitions=2).selectExpr(
        "if(id % 7 = 0, null, named_struct('number', id, 'items', array_repeat(named_struct('price', "
        "cast(id / 4 as decimal(12,2)), 'at', timestamp_seconds(id * 1e6), 'tags', map('day', "
        "date_add(date'2026-01-01', int(id)))), int(id % 3)))) AS value"
    )
    for large in ("false", "true"):
        spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", large)
        try:
            sent = sent_through(frame)
            assert (
                sent.select(from_cbor("value", frame.schema["value"].dataType).alias("value")).collect()
                == frame.collect()
            )
        finally:
            spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


def test_a_message_that_does_not_fit_fails_the_job_without_its_content(spark: "SparkSession") -> None:
    frame = spark.createDataFrame([(encode({"number": "SECRET"}),)], "value binary")
    with pytest.raises(PythonException, match=r"Row 1 of a batch of 1 cannot be read\. value\.number holds") as failed:
        frame.select(from_cbor("value", "number int not null")).collect()
    assert "SECRET" not in str(failed.value)
    [[read]] = frame.select(from_cbor("value", "struct<number:string,gate:string not null>")).collect()
    assert read.asDict() == {"number": "SECRET", "gate": None}
    with pytest.raises(EncodeError, match=r"value\.at is a timestamp_ntz"):
        from_cbor("value", "at timestamp_ntz")
    with pytest.raises(ConfigurationError, match="on_error is 'skip': it is fail, null, report"):
        from_cbor("value", "number int", on_error="skip")


ODD = [encode({"number": 1}), encode({"number": "SECRET"}), b"\xff", None, encode({"number": 2})]
NAMED = {"message_id": pa.array(["a", "b", "c", "d", "e"]), "key": pa.array(["k1", "k2", "k3", "k4", None])}
NUMBERS = pa.struct([("number", pa.int32())])


def test_odd_messages_become_null_on_request() -> None:
    read = decoded(pa.array(ODD), NUMBERS, NAMED, "null")
    assert read.to_pylist() == [{"number": 1}, None, None, None, {"number": 2}]


def test_odd_messages_are_reported_on_request_by_id_and_key() -> None:
    rows = decoded(pa.array(ODD), NUMBERS, NAMED, "report").to_pylist()
    assert [row["value"] for row in rows] == [{"number": 1}, None, None, None, {"number": 2}]
    [first, second] = [row["error"] for row in rows if row["error"]]
    assert first.startswith("Row 2 of a batch of 5 (message_id 'b', key 'k2') cannot be read. value.number holds")
    assert second.startswith("Row 3 of a batch of 5 (message_id 'c', key 'k3') cannot be read.")
    assert "SECRET" not in first
    assert [row["error"] for row in decoded(pa.array(ODD[:1]), NUMBERS, {}, "report").to_pylist()] == [None]


def test_an_odd_message_that_fails_the_job_is_named() -> None:
    with pytest.raises(DecodeError, match=r"Row 2 of a batch of 5 \(message_id 'b', key 'k2'\) cannot be read"):
        decoded(pa.array(ODD), NUMBERS, NAMED)


def struct(ddl: str) -> StructType:
    kind = DataType.fromDDL(ddl)
    assert isinstance(kind, StructType)
    return kind


def test_settings_of_the_session_do_not_change_what_is_accepted(spark: "SparkSession") -> None:
    """`timestamp` is an instant; text of a limited length is text."""
    frame = spark.createDataFrame([("m", encode({"at": datetime(2026, 8, 2, tzinfo=UTC)}))], "id string, value binary")
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    spark.conf.set("spark.sql.preserveCharVarcharTypeInfo", "true")
    try:
        read = frame.select(from_cbor("value", "at timestamp", on_error="report", named_by=["id"]).alias("read"))
        assert read.schema["read"].dataType.simpleString() == "struct<value:struct<at:timestamp>,error:string>"
        assert [row.read.error for row in read.collect()] == [None]
        _demand_ours(struct(message_rows.ddl(message_rows.ROW_COLUMNS)), ALL)
        texts = struct("key varchar(9), topic char(5), headers map<varchar(2),char(1)>, value int")
        assert Shape.of(texts, {}).names == ("topic", "key", "value", "headers")
        assert BusinessColumn.of(struct("name varchar(9)")["name"]).staged == "text"
    finally:
        spark.conf.unset("spark.sql.timestampType")
        spark.conf.unset("spark.sql.preserveCharVarcharTypeInfo")
