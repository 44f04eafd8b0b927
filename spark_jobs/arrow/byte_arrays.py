"""Arrow arrays of bytes, made by numpy and joined by Arrow's kernels: no Python runs per row."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


def constant(raw: bytes) -> pa.Scalar:
    """Return the scalar of an array of bytes."""
    return pa.scalar(raw, pa.large_binary())


def joined(*pieces: "pa.Array | bytes", null: bytes | None = None) -> pa.LargeBinaryArray:
    """Return for each row its pieces, one after the other; `null` stands for a null, else it makes the row null."""
    scalars = [constant(piece) if isinstance(piece, bytes) else piece for piece in (*pieces, b"")]
    if null is None:
        return pc.binary_join_element_wise(*scalars)
    return pc.binary_join_element_wise(*scalars, null_handling="replace", null_replacement=null)


def cut(data: Bytes, offsets: Offsets, validity: pa.Buffer | None = None) -> pa.LargeBinaryArray:
    """Return the array whose rows are the pieces of `data` between the offsets."""
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def of_rows(rows: Bytes, lengths: Offsets | None = None, validity: pa.Buffer | None = None) -> pa.LargeBinaryArray:
    """Return the rows of a matrix as bytes, or of each row the first few."""
    count, width = rows.shape
    if lengths is None or (lengths == width).all():
        return cut(rows.reshape(-1), np.arange(count + 1, dtype=np.int64) * width, validity)
    return cut(rows[np.arange(width) < lengths[:, None]], starts(lengths), validity)


def texts_of_rows(rows: Bytes) -> pa.StringArray:
    """Return the rows of a matrix of ASCII as texts."""
    count, width = rows.shape
    ends = np.arange(count + 1, dtype=np.int32) * width
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(rows)))


def of_numbers(numbers: npt.NDArray[Any]) -> pa.LargeBinaryArray:
    """Return the bytes of each number."""
    return of_rows(np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), numbers.itemsize))


def starts(lengths: npt.NDArray[Any]) -> Offsets:
    """Return where pieces of these lengths begin that stand one after the other, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def offsets(array: pa.LargeBinaryArray) -> Offsets:
    """Return where the rows of an array begin in its `data`, and where the last one ends."""
    found: Offsets = np.frombuffer(array.buffers()[1], np.int64)
    return found[array.offset : array.offset + len(array) + 1]


def data(array: pa.LargeBinaryArray) -> Bytes:
    """Return the bytes of an array, without a copy."""
    return np.frombuffer(array.buffers()[2] or b"", np.uint8)
