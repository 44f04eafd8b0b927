"""Columns of Spark as CBOR: what `mailroom.values.codec` writes for one value, for a whole Arrow array at once."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from mailroom.errors import DecodeError
from mailroom.values.codec import MAX_ITEMS, decode
from mailroom.values.names import MAX_VALUE_BYTES
from spark_jobs.arrow import cbor_leaves as leaves
from spark_jobs.arrow.byte_arrays import constant, cut, data, joined, offsets, starts
from spark_jobs.arrow.cbor_types import check_type, refused

NULL, TRUE, FALSE = b"\xf6", b"\xf5", b"\xf4"


def encoded(array: pa.Array, path: str = "value", *, nan_as_null: bool = False) -> pa.LargeBinaryArray:
    """Encode each element of an Arrow array, as Spark hands it over, as one CBOR item; null as CBOR's null.

    `mailroom.values.codec.decode` gives back an equal value: a struct or map as dict, a timestamp as datetime in UTC.
    The limits are the codec's: 16 MiB and 250,000 items each, nested 32 deep. Raises `EncodeError`, which names the
    part by its `path` and never shows content: for a type that cannot be sent, before any row is read; else for the
    first fault: NaN unless it is to be null, a time outside of the years 1 to 9999, text that is not UTF-8, a
    map with the same key twice.
    """
    check_type(array.type, path)
    items = _without_nulls(_items(array, path, nan_as_null))
    _check_sizes(items, path)
    return items


def _items(array: pa.Array, path: str, nan_as_null: bool) -> pa.LargeBinaryArray:
    """Encode each element; null stays null."""
    kind = array.type
    if types.is_struct(kind):
        return _structs(array, path, nan_as_null)
    if types.is_list(kind) or types.is_map(kind):
        return _lists(array, path, nan_as_null)
    if types.is_null(kind):
        return pa.nulls(len(array), pa.large_binary())
    if types.is_boolean(kind):
        return pc.if_else(array, constant(TRUE), constant(FALSE))
    if types.is_string(kind) or types.is_large_string(kind):
        return _texts(array, path)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _with_lengths(leaves.BYTES, array.cast(pa.large_binary()))
    if types.is_decimal128(kind):
        return _decimals(array)
    if types.is_date32(kind):
        days = _numbers(array.view(pa.int32()), np.int64)
        _check_years(days, 1, path)
        return leaves.dates(days, _validity(array))
    if types.is_timestamp(kind):
        microseconds = _numbers(array.view(pa.int64()), np.int64)
        _check_years(microseconds, leaves.DAY_US, path)
        return leaves.timestamps(microseconds, _validity(array))
    if types.is_floating(kind):
        if nan_as_null:
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
        numbers = _numbers(array, np.float64)
        if np.isnan(numbers).any():
            raise refused(
                path, "is NaN, which equals nothing, not even itself: send null, with onNaN=null or nanvl(x, null)"
            )
        return leaves.floats(numbers, _validity(array))
    return leaves.integers(_numbers(array, np.int64), _validity(array))


def _structs(array: pa.Array, path: str, nan_as_null: bool) -> pa.LargeBinaryArray:
    fields = list(array.type)
    head = leaves.head(leaves.MAP, len(fields))
    if not fields:
        return pc.if_else(array.is_valid(), constant(head), pa.scalar(None, pa.large_binary()))
    pieces = []
    # flatten() makes the fields of a null struct null: the bytes under them are not values, and not checked.
    for field, column in zip(fields, array.flatten(), strict=True):
        name = field.name.encode()
        named = head + leaves.head(leaves.TEXT, len(name)) + name
        pieces += [named, _items(column, f"{path}.{field.name}", nan_as_null)]
        head = b""
    return _masked(joined(*pieces, null=NULL), array)


def _lists(array: pa.Array, path: str, nan_as_null: bool) -> pa.LargeBinaryArray:
    # Not array.flatten() and list_value_length(), which maps do not have.
    of_items = array.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(of_items)
    window = slice(int(of_items[0]), int(of_items[-1]))
    behind_null = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        # A null may have items under it, which are not values.
        if lengths[~valid].any():
            behind_null = pa.array(np.repeat(valid, lengths))
        lengths = np.where(valid, lengths, 0)

    def flat(column: pa.Array) -> pa.Array:
        column = column[window]
        return column if behind_null is None else column.filter(behind_null)

    if types.is_map(array.type):
        keys = flat(array.keys)
        _check_keys(keys, lengths, path)
        major = leaves.MAP
        values = _items(flat(array.items), f"{path}[]", nan_as_null)
        items = joined(_items(keys, f"a key of {path}", nan_as_null), values, null=NULL)
    else:
        major = leaves.LIST
        items = _without_nulls(_items(flat(array.values), f"{path}[]", nan_as_null))
    # The items of a list stand one after the other already: only the offsets are new.
    lists = cut(data(items), offsets(items)[starts(lengths)])
    return _masked(joined(leaves.heads(major, lengths.astype(np.uint64)), lists), array)


def _texts(array: pa.Array, path: str) -> pa.LargeBinaryArray:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise refused(
            path, "is text that is not UTF-8: cast it to binary, or mend it with make_valid_utf8(x)"
        ) from None
    return _with_lengths(leaves.TEXT, array.cast(pa.large_binary()))


def _with_lengths(major: int, texts: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return joined(leaves.heads(major, _numbers(pc.binary_length(texts), np.uint64)), texts)


def _decimals(array: pa.Array) -> pa.LargeBinaryArray:
    filled = array.fill_null(0)
    halves = np.frombuffer(filled.buffers()[1] or b"", np.int64).reshape(-1, 2)
    low, high = halves[filled.offset : filled.offset + len(filled)].T
    negative, validity = high < 0, _validity(array)
    # Of a negative number CBOR has -1 minus the number, which is its complement.
    low, high = (np.where(negative, ~half, half).astype(np.uint64) for half in (low, high))
    encoded = leaves.decimals(low, negative, array.type.scale, validity)
    if not high.any():
        return encoded
    return pc.if_else(high != 0, leaves.long_decimals(high, low, negative, array.type.scale, validity), encoded)


def _check_years(numbers: npt.NDArray[np.int64], day: int, path: str) -> None:
    if not leaves.in_years(numbers, day):
        raise refused(path, "is outside of the years 1 to 9999: send null, or cast it to string")


def _check_keys(keys: pa.Array, lengths: npt.NDArray[np.int64], path: str) -> None:
    """Refuse a map with a key twice, as a reader would. Spark's functions make none, but Parquet may hold some."""
    if lengths.max(initial=0) < 2:
        return
    encoding = keys.dictionary_encode()
    rows = np.repeat(np.arange(len(lengths)), lengths)
    pairs = rows * len(encoding.dictionary) + _numbers(encoding.indices, np.int64)
    if pc.count_distinct(pa.array(pairs)).as_py() < len(pairs):
        raise refused(
            path,
            "is a map with the same key twice: send map_from_entries(map_entries(x)) and set "
            "spark.sql.mapKeyDedupPolicy to LAST_WIN",
        )


def _check_sizes(items: pa.LargeBinaryArray, path: str) -> None:
    sizes = np.diff(offsets(items))
    largest = int(sizes.max(initial=0))
    if largest > MAX_VALUE_BYTES:
        raise refused(
            path,
            f"takes {largest:,} bytes as CBOR, the limit being {MAX_VALUE_BYTES:,}: "
            "store it elsewhere and send where it is",
        )
    for row in np.flatnonzero(sizes > MAX_ITEMS):  # an item takes a byte at least
        try:
            decode(items[int(row)].as_py())
        except DecodeError:
            raise refused(
                path, f"has more than {MAX_ITEMS:,} items: send it in parts, or pack numbers into binary"
            ) from None


# --- Arrow ----------------------------------------------------------------------------------------------------------


def _numbers(array: pa.Array, dtype: type[Any]) -> npt.NDArray[Any]:
    """The numbers of an array, with 0 where there is null."""
    # Not to_numpy() with nulls in it, which makes floats of integers.
    numbers: npt.NDArray[Any] = array.fill_null(0).to_numpy()
    return numbers.astype(dtype)


def _validity(array: pa.Array) -> pa.Buffer | None:
    return array.is_valid().buffers()[1] if array.null_count else None


def _masked(items: pa.LargeBinaryArray, array: pa.Array) -> pa.LargeBinaryArray:
    """Make null what is null in `array`."""
    return cut(data(items), offsets(items), _validity(array)) if array.null_count else items


def _without_nulls(items: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return items.fill_null(constant(NULL)) if items.null_count else items
