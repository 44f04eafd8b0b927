"""The Spark types a value may have, and why the others are refused: before a job starts, not in its last task."""

import pyarrow as pa
from pyarrow import types
from pyspark.sql import types as spark_types
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from mailroom.errors import EncodeError
from mailroom.values.codec import MAX_DEPTH

_STRINGS = {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}
_NUMBERS = {pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()}
_PLAIN = {pa.null(), pa.bool_(), *_NUMBERS, *_STRINGS}
_INTERVAL = pa.month_day_nano_interval()

# As Spark hands them to Python, the refused ones too: `check_type` says what is wrong with each.
_ATOMIC: dict[type[DataType], pa.DataType] = {
    spark_types.NullType: pa.null(),
    spark_types.BooleanType: pa.bool_(),
    spark_types.ByteType: pa.int8(),
    spark_types.ShortType: pa.int16(),
    spark_types.IntegerType: pa.int32(),
    spark_types.LongType: pa.int64(),
    spark_types.FloatType: pa.float32(),
    spark_types.DoubleType: pa.float64(),
    spark_types.StringType: pa.string(),
    spark_types.CharType: pa.string(),
    spark_types.VarcharType: pa.string(),
    spark_types.BinaryType: pa.binary(),
    spark_types.DateType: pa.date32(),
    spark_types.TimestampType: pa.timestamp("us", "UTC"),
    spark_types.TimestampNTZType: pa.timestamp("us"),
    spark_types.TimeType: pa.time64("ns"),
    spark_types.DayTimeIntervalType: pa.duration("us"),
    spark_types.YearMonthIntervalType: _INTERVAL,
    spark_types.CalendarIntervalType: _INTERVAL,
}
# Spark marks a field of these, which are else structs of the same fields.
_MARKS = (b"variant", b"geometry", b"geography")
_AS_STRING = "cast it to string, or send its parts"


def check_spark_type(spark_type: DataType, path: str = "value") -> None:
    """Raise `EncodeError` unless a value of this type can be sent; it names the part by its `path`."""
    check_type(arrow_type(spark_type, path), path)


def check_type(arrow: pa.DataType, path: str = "value") -> None:
    """`check_spark_type`, for the type of an Arrow array as Spark hands it over."""
    _check(arrow, path, 0)


def arrow_type(spark_type: DataType, path: str = "value") -> pa.DataType:
    """Return the Arrow type that stands for a Spark type, with all its parts nullable.

    Raises `EncodeError` for a type that Arrow has none for, or shows as a struct that it is not.
    """
    match spark_type:
        case StructType():
            return pa.struct([(field.name, arrow_type(field.dataType, f"{path}.{field.name}")) for field in spark_type])
        case ArrayType():
            return pa.list_(pa.field("element", arrow_type(spark_type.elementType, f"{path}[]")))
        case MapType():
            return pa.map_(
                arrow_type(spark_type.keyType, f"{path} (its keys)"), arrow_type(spark_type.valueType, f"{path}[]")
            )
        case DecimalType():
            return pa.decimal128(spark_type.precision, spark_type.scale)
    found = _ATOMIC.get(type(spark_type))
    if found is None:
        raise refused(path, f"is {spark_type.simpleString()}, which CBOR has no form for: {_AS_STRING}")
    return found


def refused(path: str, fault: str) -> EncodeError:
    """Return the error that says what is wrong with the part at `path`, and what to send instead."""
    return EncodeError(f"Cannot send this value: {path} {fault}.", code="MR-value-unsupported")


def _check(arrow: pa.DataType, path: str, depth: int) -> None:
    levels = _levels(arrow)
    if levels is None:
        raise refused(path, _fault(arrow))
    # By the type alone: that of empty lists too, since later ones may not be.
    depth += levels
    if depth > MAX_DEPTH:
        raise refused(path, f"is nested too deep, the limit being {MAX_DEPTH}: send a flatter value")
    if types.is_struct(arrow):
        names = [field.name for field in arrow]
        if len(set(names)) < len(names):
            raise refused(path, "has two fields of the same name: rename one")
        for field in arrow:
            _check(field.type, f"{path}.{field.name}", depth)
    elif types.is_map(arrow):
        if arrow.key_type not in _STRINGS:
            raise refused(path, f"is a map with keys of type {arrow.key_type}: cast the keys to string")
        _check(arrow.item_type, f"{path}[]", depth)
    elif types.is_list(arrow):
        _check(arrow.value_type, f"{path}[]", depth)


def _levels(arrow: pa.DataType) -> int | None:
    """How many levels deep the codec takes one of this type to be, without its parts; None if it cannot be sent."""
    if types.is_struct(arrow):
        return None if _mark(arrow) else 1
    if types.is_list(arrow) or types.is_map(arrow) or types.is_date32(arrow):
        return 1
    if types.is_timestamp(arrow):
        return 1 if arrow.tz and arrow.unit == "us" else None
    if types.is_decimal128(arrow):
        if not 0 <= arrow.scale <= 38:
            return None
        return 2 if arrow.precision <= 19 else 3  # the third is the tag of digits that take more than 64 bits
    return 0 if arrow in _PLAIN else None


def _fault(arrow: pa.DataType) -> str:
    if types.is_timestamp(arrow) and not arrow.tz:
        return "is a timestamp_ntz, which has no time zone: cast it to timestamp_ltz"
    if types.is_time(arrow):
        return "is a time, which CBOR has no form for: cast it to string"
    if types.is_duration(arrow) or arrow == _INTERVAL:
        return "is an interval, which CBOR has no form for: cast it to string, or to a number of its unit"
    what = _mark(arrow) if types.is_struct(arrow) else arrow
    return f"is {what}, which CBOR has no form for: {_AS_STRING}"


def _mark(arrow: pa.DataType) -> str | None:
    for field in arrow:
        for mark in _MARKS:
            if (field.metadata or {}).get(mark) == b"true":
                return mark.decode()
    return None
