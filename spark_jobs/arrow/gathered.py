"""Columns of many messages that the server gathers into one row, as Arrow arrays: no Python runs per message.

Of a column one value comes behind the other, in the binary form of its type, and where these differ in length, their
lengths too. So a page of a read costs half of what it costs row by row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mailroom.message.columns import CHAR
from mailroom.message.message import EXPRESSIONS, READ
from spark_jobs.arrow import message_rows
from spark_jobs.arrow.binary_copy import YEAR_2000_US
from spark_jobs.arrow.byte_arrays import starts
from spark_jobs.arrow.message_rows import BYTES, LONG, MOMENT, TEXT

BEHIND = ("string_agg({name}, ''::bytea)", "bytea")
LENGTHS = ("string_agg(int4send(coalesce(octet_length({name}), -1)), ''::bytea)", "bytea")
# What stands for no time: a microsecond before infinity, long after the last time that PostgreSQL has.
NO_TIME = np.iinfo(np.int64).max - 1
NO_CHAR = " "


@dataclass(frozen=True, slots=True)
class Gathered:
    """How a type is gathered: one value as it is `sent`, what the server makes of all (`pieces`, with their types), and
    the `array` that we make of those.

    Text is sent in the client's encoding, so its length is that of what is sent.
    """

    sent: str
    pieces: tuple[tuple[str, str], ...]
    array: Callable[..., pa.Array]


def _of_lengths(kind: pa.DataType) -> Callable[..., pa.Array]:
    def array(count: int, values: bytes | None, lengths: bytes) -> pa.Array:
        sizes = np.frombuffer(lengths, ">i4")
        return _array(kind, count, sizes >= 0, starts(np.maximum(sizes, 0)).astype(np.int32), values or b"")

    return array


def _chars(count: int, values: str) -> pa.Array:
    raw = values.encode()
    return _array(TEXT, count, np.frombuffer(raw, np.uint8) != ord(NO_CHAR), np.arange(count + 1, dtype=np.int32), raw)


def _longs(_: int, values: bytes) -> pa.Array:
    return pa.array(np.frombuffer(values, ">i8").astype(np.int64), LONG)


def _moments(count: int, values: bytes) -> pa.Array:
    micros = np.frombuffer(values, ">i8").astype(np.int64)
    return _array(MOMENT, count, micros != NO_TIME, micros + YEAR_2000_US)


def _array(kind: pa.DataType, count: int, is_there: npt.NDArray[np.bool_], *buffers: Any) -> pa.Array:
    """Return the array that has these buffers, with a null where nothing is there."""
    validity = None if is_there.all() else pa.py_buffer(np.packbits(is_there, bitorder="little"))
    return pa.Array.from_buffers(kind, count, [validity, *map(pa.py_buffer, buffers)])


_OF_TYPE = {
    "text": Gathered("textsend({value})", (BEHIND, LENGTHS), _of_lengths(TEXT)),
    "jsonb": Gathered("textsend({value})", (BEHIND, LENGTHS), _of_lengths(TEXT)),
    "bytea": Gathered("{value}", (BEHIND, LENGTHS), _of_lengths(BYTES)),
    "bigint": Gathered("int8send({value})", (BEHIND,), _longs),
    "uuid": Gathered("uuid_send({value})", (BEHIND,), lambda _, values: message_rows.ids(values)),
    "timestamptz": Gathered(f"coalesce(timestamp_send({{value}}), '\\x{NO_TIME:x}'::bytea)", (BEHIND,), _moments),
    CHAR: Gathered(f"coalesce({{value}}, '{NO_CHAR}'::text)", (("string_agg({name}, ''::text)", "text"),), _chars),
}
_HEADERS = Gathered(
    "coalesce({value}, 'null'::text)", (("string_agg({name}, ','::text)", "text"),),
    lambda _, values: message_rows.headers(values),
)  # fmt: skip
_COLUMNS = {column.name: _HEADERS if column.name == "headers" else _OF_TYPE[column.type] for column in READ}


def sent(name: str, value: str = "") -> str:
    """Return in SQL what is sent of a column, or of an expression that has its value, and is named like it."""
    return f"{_COLUMNS[name].sent.format(value=value or EXPRESSIONS[name])} AS {name}"


def gathered(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return in SQL what the server makes of these columns, as `sent`, and the types of that."""
    return [(piece.format(name=name), kind) for name in names for piece, kind in _COLUMNS[name].pieces]


def arrays(names: Iterable[str], count: int, pieces: Iterable[Any]) -> Iterator[pa.Array]:
    """Give the arrays of these columns of so many messages, at least one, of what the server has made of them."""
    found = iter(pieces)
    for name in names:
        yield _COLUMNS[name].array(count, *islice(found, len(_COLUMNS[name].pieces)))
