"""The way back: a column of CBOR as a column of any Spark type."""

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from itertools import accumulate, chain
from types import NoneType
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark.sql import Column
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # its stub lacks it
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from mailroom.codec import decode
from mailroom.errors import DecodeError
from spark_jobs.write.cbor_leaves import DAY_US, in_years
from spark_jobs.write.cbor_types import arrow_type, check_type


def from_cbor(column: Column | str, schema: DataType | str) -> Column:
    """Return the binary `column`, one CBOR item per row, read as `schema`: a Spark type, or its text as in DDL.

    A field that the schema does not name is left out, one that a value does not have is null; NOT NULL has no effect.
    A value that does not fit the type fails the job, as does one that is not our CBOR (`DecodeError`). The error names
    the row of the batch and the part, not the content. Raises `EncodeError` for a schema that CBOR has no form for.
    """
    wanted = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    arrow = arrow_type(wanted)
    check_type(arrow)

    def from_cbor(raw: pa.Array) -> pa.Array:
        return decoded(raw, arrow)

    # Spark does not check NOT NULL.
    nullable = wanted.toNullable() if isinstance(wanted, (StructType, ArrayType, MapType)) else wanted
    read: Callable[[Column | str], Column] = arrow_udf(from_cbor, returnType=nullable)
    return read(column)


def decoded(raw: pa.Array, arrow: pa.DataType) -> pa.Array:
    """Decode an array of CBOR items, null being null, into an array of the type. Raises `DecodeError`."""
    items = raw.to_pylist()
    try:
        return _read(items, arrow)
    except (DecodeError, _Unfit):
        # Only now row by row: by column it is several times as fast, but does not know whose part it holds.
        row, fault = next((row, fault) for row, item in enumerate(items, 1) if (fault := _fault(item, arrow)))
        raise DecodeError(f"Row {row:,} of a batch of {len(items):,} cannot be read. {fault}") from None


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
    """Return an integer as a float of so many binary digits. Raises `OverflowError` if it has more."""
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
