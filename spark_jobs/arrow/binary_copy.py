"""PostgreSQL's binary COPY format, for whole Arrow arrays at once (PostgreSQL manual, COPY, "Binary Format")."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.arrow.byte_arrays import constant, cut, data, joined, of_numbers, offsets, starts

HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
TRAILER = struct.pack("!h", -1)
# PostgreSQL's days and timestamps count from 2000-01-01, Arrow's from 1970-01-01.
YEAR_2000_DAYS = 10_957
YEAR_2000_US = YEAR_2000_DAYS * 86_400_000_000
# Types of fixed width: the Arrow type they are read as, their wire format, and their epoch.
NUMBERS = {
    "boolean": (pa.int8(), ">i1", 0),
    "smallint": (pa.int16(), ">i2", 0),
    "integer": (pa.int32(), ">i4", 0),
    "bigint": (pa.int64(), ">i8", 0),
    "real": (pa.float32(), ">f4", 0),
    "double precision": (pa.float64(), ">f8", 0),
    "date": (pa.int32(), ">i4", YEAR_2000_DAYS),
    "timestamp": (pa.int64(), ">i8", YEAR_2000_US),
    "timestamptz": (pa.int64(), ">i8", YEAR_2000_US),
}
JSONB_VERSION = b"\x01"
# An array names the type of its elements (pg_type.oid).
OIDS = {
    "boolean": 16, "bytea": 17, "bigint": 20, "smallint": 21, "integer": 23, "text": 25, "real": 700,
    "double precision": 701, "date": 1082, "timestamp": 1114, "timestamptz": 1184,
}  # fmt: skip


def fields(arrays: Sequence[pa.Array], kinds: Sequence[str]) -> pa.LargeBinaryArray:
    """Return, for each row of arrays of one length, its fields as COPY wants them: columns of the types `kinds`."""
    pieces: list[Any] = []
    for array, kind in zip(arrays, kinds, strict=True):
        pieces += _field(array, kind)
    return joined(*pieces)


def rows(columns: int, *parts: pa.LargeBinaryArray) -> memoryview:
    """Return rows of this many columns as COPY wants them: each is its `fields`, part by part."""
    found = joined(struct.pack("!h", columns), *parts)
    return data(found)[: int(offsets(found)[-1])].data


def _field(array: pa.Array, kind: str) -> list[pa.Array]:
    """Return for each row the length of its field, -1 for a null, and then the field's bytes."""
    if kind.endswith("[]"):
        raw = _arrays(array, kind.removesuffix("[]"))
    elif kind in NUMBERS:
        raw = _numbers(array, kind)
    elif kind == "jsonb":
        raw = joined(JSONB_VERSION, pc.fill_null(pc.cast(array, pa.large_binary()), b""))
    else:
        raw = pc.fill_null(pc.cast(array, pa.large_binary()), b"")
    if array.null_count:
        valid = array.is_valid()
        lengths = pc.if_else(valid, pc.binary_length(raw), -1)
        return [_lengths(lengths), pc.if_else(valid, raw, constant(b""))]
    return [_lengths(pc.binary_length(raw)), raw]


def _numbers(array: pa.Array, kind: str) -> pa.Array:
    arrow, wire, epoch = NUMBERS[kind]
    numbers = pc.fill_null(pc.cast(array, arrow), pa.scalar(0).cast(arrow)).to_numpy(zero_copy_only=False)
    if epoch:
        # So far back it would overflow into the future; PostgreSQL refuses the value it is set to here.
        numbers = np.maximum(numbers, np.iinfo(numbers.dtype).min + epoch + 1) - epoch
    return of_numbers(numbers.astype(wire))


def _arrays(array: pa.Array, kind: str) -> pa.Array:
    """Return for each list, a null as an empty one, PostgreSQL's array: dimensions, type, length, and its elements."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    heads = np.zeros(len(array), [(name, ">i4") for name in ("dimensions", "nulls", "type", "length", "from")])
    heads["dimensions"], heads["nulls"], heads["type"], heads["length"], heads["from"] = 1, 1, OIDS[kind], lengths, 1
    # The elements of a list stand one after the other already: only the offsets are new.
    elements = joined(*_field(array.flatten(), kind))
    return joined(of_numbers(heads), cut(data(elements), offsets(elements)[starts(lengths)]))


def _lengths(lengths: pa.Array) -> pa.Array:
    return of_numbers(lengths.to_numpy().astype(">i4"))
