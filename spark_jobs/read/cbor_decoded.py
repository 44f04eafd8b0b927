"""The way back: a column of CBOR as a column of any Spark type."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import accumulate, chain
from types import MappingProxyType, NoneType
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark.sql import Column
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # its stub lacks it
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from mailroom.errors import ConfigurationError, DecodeError
from mailroom.values.codec import decode
from mailroom.values.names import shown
from spark_jobs.arrow.cbor_leaves import DAY_US, in_years
from spark_jobs.arrow.cbor_types import arrow_type, check_type

ON_ERROR = ("fail", "null", "report")
REPORTED = ["value", "error"]


def from_cbor(
    column: Column | str, schema: DataType | str, *, on_error: str = "fail", named_by: Sequence[str] = ()
) -> Column:
    """Return the binary `column`, one CBOR item per row, read as `schema`: a Spark type, or its text as in DDL.

    A field that the schema does not name is left out, one that a value does not have is null; NOT NULL has no effect.
    In a text, `timestamp` is an instant, whatever `spark.sql.timestampType` says.

    A value that does not fit the type, or is not our CBOR, fails the job (`DecodeError`); a stream stands at it for
    ever. `on_error="null"` makes it null, and "report" makes the column a struct of `value` and `error`, one of which
    is null. The error names the row of the batch and the part, not the content; and what the columns `named_by` hold
    there, such as ("message_id", "key").

    Raises `EncodeError` for a schema that CBOR has no form for, `ConfigurationError` for another `on_error`.
    """
    if on_error not in ON_ERROR:
        raise ConfigurationError(f"on_error is {shown(on_error)}: it is {', '.join(ON_ERROR)}.", code="MR-spark-option")
    wanted = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    if isinstance(schema, str) and "ntz" not in schema.lower():
        wanted = _with_instants(wanted)
    arrow = arrow_type(wanted)
    check_type(arrow)
    names = tuple(named_by)

    def from_cbor(raw: pa.Array, *named: pa.Array) -> pa.Array:
        return decoded(raw, arrow, dict(zip(names, named, strict=True)), on_error)

    # Spark does not check NOT NULL.
    nullable = wanted.toNullable() if isinstance(wanted, (StructType, ArrayType, MapType)) else wanted
    if on_error == "report":
        nullable = StructType().add("value", nullable).add("error", StringType())
    read: Callable[..., Column] = arrow_udf(from_cbor, returnType=nullable)
    return read(column, *names)


def _with_instants(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _with_instants(field.dataType)) for field in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_with_instants(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_with_instants(kind.keyType), _with_instants(kind.valueType))
    return TimestampType() if isinstance(kind, TimestampNTZType) else kind


def decoded(
    raw: pa.Array, arrow: pa.DataType, named: Mapping[str, pa.Array] = MappingProxyType({}), on_error: str = "fail"
) -> pa.Array:
    """Decode an array of CBOR items, null being null, into an array of the type. Raises `DecodeError`.

    `named` are columns that name a row in its error, and `on_error` says what becomes of one (`from_cbor`).
    """
    items = raw.to_pylist()
    faults: list[str | None] = [None] * len(items)
    try:
        read = _read(items, arrow)
    except (DecodeError, _Unfit):
        # Only now row by row: by column it is several times as fast, but does not know whose part it holds.
        for row, item in enumerate(items):
            fault = _fault(item, arrow)
            if fault is None:
                continue
            ids = ", ".join(f"{name} {shown(str(column[row].as_py()))}" for name, column in named.items())
            what = f"Row {row + 1:,} of a batch of {len(items):,}{f' ({ids})' if ids else ''} cannot be read. {fault}"
            if on_error == "fail":
                raise DecodeError(what) from None
            faults[row], items[row] = what, None
        read = _read(items, arrow)
    return read if on_error != "report" else pa.StructArray.from_arrays([read, pa.array(faults, pa.string())], REPORTED)


class _Unfit(Exception):
    """A value that is not of the type its column is to have."""


def _fault(item: bytes | None, arrow: pa.DataType) -> str | None:
    try:
        _read([item], arrow)
    except (DecodeError, _Unfit) as error:
        return str(error)
    return None


def _read(items: list[bytes | None], arrow: pa.DataType) -> pa.Array:
    return _column([None if item is None else decode(item) for item in items], arrow, "value")


def _column(values: list[Any], arrow: pa.DataType, path: str) -> pa.Array:
    """Make an array of values; column by column, so that each type is checked once."""
    if types.is_struct(arrow):
        _expect(values, {dict}, arrow, path)
        return _structs(values, arrow, path)
    if types.is_list(arrow):
        _expect(values, {list}, arrow, path)
        inner = _column(list(chain.from_iterable(filter(None, values))), arrow.value_type, f"{path}[]")
        return pa.ListArray.from_arrays(_offsets(values), inner, type=arrow)
    if types.is_map(arrow):
        _expect(values, {dict}, arrow, path)
        maps = list(filter(None, values))
        keys = _column(list(chain.from_iterable(maps)), arrow.key_type, f"{path} (its keys)")
        inner = _column([item for each in maps for item in each.values()], arrow.item_type, f"{path}[]")
        return pa.MapArray.from_arrays(_offsets(values), keys, inner)
    return _leaves(values, arrow, path)


def _structs(values: list[dict[str, Any] | None], arrow: pa.DataType, path: str) -> pa.Array:
    absent = pa.array([value is None for value in values], pa.bool_())
    if not arrow.num_fields:
        return pa.array([None if value is None else {} for value in values], arrow)
    present = [value or {} for value in values]
    columns = [
        _column([value.get(field.name) for value in present], field.type, f"{path}.{field.name}") for field in arrow
    ]
    return pa.StructArray.from_arrays(columns, fields=list(arrow), mask=absent)


def _leaves(values: list[Any], arrow: pa.DataType, path: str) -> pa.Array:
    # Arrow by itself is not this strict: it cuts 1.5 to 1, a datetime to its date, and takes bytes for text.
    found = _expect(values, _fitting(arrow), arrow, path)
    if UUID in found:
        values = [str(value) if isinstance(value, UUID) else value for value in values]
    try:
        if types.is_floating(arrow):
            return _floats(values, arrow, found)
        column = pa.array(values, arrow)
        # An offset can take the first or last day out of the years that Spark has.
        if types.is_timestamp(arrow) and not in_years(column.view(pa.int64()).drop_null().to_numpy(), DAY_US):
            raise OverflowError
        return column
    except (pa.ArrowException, OverflowError):
        # Not chained: the causes quote the value.
        raise _unfit(path, "a value beyond its range", arrow) from None


def _floats(values: list[Any], arrow: pa.DataType, found: set[type]) -> pa.Array:
    """Doubles are rounded to floats, as by every cast, but not to infinity; integers are the very same or refused."""
    if int in found:
        digits = 24 if types.is_float32(arrow) else 53
        # Arrow by itself refuses what is beyond 2**53 although a double may hold it, and a cast from there rounds.
        values = [_exact(value, digits) if type(value) is int else value for value in values]
    doubles = pa.array(values, pa.float64())
    narrow = doubles.cast(arrow)
    if pc.any(pc.and_(pc.is_inf(narrow), pc.is_finite(doubles))).as_py():
        raise OverflowError
    return narrow


def _exact(number: int, digits: int) -> float:
    """Return an integer as a float of that many binary digits. Raises `OverflowError` if it has more."""
    if number.bit_length() - (number & -number).bit_length() >= digits:
        raise OverflowError
    return float(number)


def _fitting(arrow: pa.DataType) -> set[type]:
    """The types of Python whose values a column may hold without becoming something else."""
    if types.is_string(arrow):
        return {str, UUID}
    if types.is_floating(arrow):
        return {float, int}
    if types.is_integer(arrow):
        return {int}
    if types.is_decimal(arrow):
        return {Decimal, int}
    if types.is_timestamp(arrow):
        return {datetime}
    if types.is_date(arrow):
        return {date}
    if types.is_boolean(arrow):
        return {bool}
    return {bytes} if types.is_binary(arrow) else set()


def _expect(values: list[Any], fitting: set[type], arrow: pa.DataType, path: str) -> set[type]:
    found = set(map(type, values)) - {NoneType}
    for kind in found - fitting:
        raise _unfit(path, f"a value of type {kind.__name__}", arrow)
    return found


def _unfit(path: str, what: str, arrow: pa.DataType) -> _Unfit:
    kind = arrow if not types.is_nested(arrow) else "struct" if types.is_struct(arrow) else str(arrow).partition("<")[0]
    return _Unfit(f"{path} holds {what}, which does not fit {kind}: give another schema.")


def _offsets(values: list[Any]) -> pa.Array:
    """Where each list begins; null for a list that is null, as Arrow wants it."""
    starts = list(accumulate((len(value) if value else 0 for value in values), initial=0))
    return pa.array(
        [None if value is None else start for value, start in zip(values, starts, strict=False)] + starts[-1:],
        pa.int32(),
    )
