"""PostgreSQL's binary COPY format, for whole Arrow arrays at once (PostgreSQL manual, COPY, "Binary Format")."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
TRAILER = struct.pack("!h", -1)
EPOCH_US = 946_684_800_000_000  # 2000-01-01 in microseconds of Unix: PostgreSQL's timestamps count from there
JSONB_VERSION = b"\x01"


def rows(arrays: Sequence[pa.Array], kinds: Sequence[str]) -> memoryview:
    """Return the rows of arrays of one length as COPY wants them, for columns of PostgreSQL's types `kinds`."""
    pieces: list[Any] = [struct.pack("!h", len(arrays))]
    for array, kind in zip(arrays, kinds, strict=True):
        pieces += _field(array, kind)
    joined = _joined(*pieces)
    _, offsets, data = joined.buffers()
    return memoryview(data)[: int(np.frombuffer(offsets, np.int64)[len(joined)])]


def _field(array: pa.Array, kind: str) -> list[pa.Array]:
    """Return for each row the length of its field, -1 for a null, and then the field's bytes."""
    match kind:
        case "bigint":
            data = _of_one_width(_numbers(array, 0).astype(">i8"))
        case "timestamptz":
            data = _of_one_width((_numbers(array, EPOCH_US) - EPOCH_US).astype(">i8"))
        case "jsonb":
            data = _joined(JSONB_VERSION, pc.fill_null(pc.cast(array, pa.large_binary()), b""))
        case _:
            data = pc.fill_null(pc.cast(array, pa.large_binary()), b"")
    if array.null_count:
        valid = array.is_valid()
        lengths = pc.if_else(valid, pc.binary_length(data), -1)
        return [_lengths(lengths), pc.if_else(valid, data, pa.scalar(b"", pa.large_binary()))]
    return [_lengths(pc.binary_length(data)), data]


def _numbers(array: pa.Array, instead_of_null: int) -> Any:
    return pc.fill_null(pc.cast(array, pa.int64()), instead_of_null).to_numpy()


def _lengths(lengths: pa.Array) -> pa.Array:
    return _of_one_width(lengths.to_numpy().astype(">i4"))


def _of_one_width(numbers: Any) -> pa.Array:
    """Return the bytes of each number."""
    offsets = np.arange(len(numbers) + 1, dtype=np.int64) * numbers.itemsize
    return pa.Array.from_buffers(
        pa.large_binary(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(numbers.tobytes())]
    )


def _joined(*pieces: Any) -> pa.Array:
    scalars = [pa.scalar(piece, pa.large_binary()) if isinstance(piece, bytes) else piece for piece in pieces]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.large_binary()))
