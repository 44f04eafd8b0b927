"""Delivered messages as Arrow: their columns, here and in Spark, and how rows of the database become arrays."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.adapt import AdaptersMap
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

from mailroom.message.message import READ
from mailroom.sql.operation import Row
from mailroom.sql.runner import PlainCursor
from spark_jobs.arrow.binary_copy import YEAR_2000_US
from spark_jobs.arrow.byte_arrays import texts_of_rows

TEXT, LONG, BYTES, MOMENT = pa.string(), pa.int64(), pa.binary(), pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(TEXT, TEXT)
IN_ARROW = {"text": TEXT, "bigint": LONG, "bytea": BYTES, "uuid": TEXT, "timestamptz": MOMENT}
# As `mailroom.message.message.EXPRESSIONS` selects them, in their order.
# D-spark-9: The tasks make message ids.
ROW_COLUMNS = pa.schema(
    {column.name: HEADERS if column.name == "headers" else IN_ARROW[column.plain] for column in READ}
)
# What "timestamp" is depends on the session: spark.sql.timestampType.
IN_SPARK = {
    TEXT: "string", LONG: "bigint", pa.int32(): "int", BYTES: "binary", MOMENT: "timestamp_ltz",
    HEADERS: "map<string,string>",
}  # fmt: skip


def ddl(columns: pa.Schema) -> str:
    """Return the columns as Spark's DDL has them."""
    return ", ".join(f"{column.name} {IN_SPARK[column.type]}" for column in columns)


class RawCursor(PlainCursor):
    """A cursor that gives ids as 16 bytes and times as PostgreSQL's microseconds: objects would double the time."""

    adapters = AdaptersMap(PlainCursor.adapters)


RawCursor.adapters.register_loader("uuid", ByteaBinaryLoader)
RawCursor.adapters.register_loader("timestamp", Int8BinaryLoader)


def arrays(rows: Sequence[Row], columns: pa.Schema = ROW_COLUMNS) -> list[pa.Array]:
    """Return the arrays of these columns for rows of them, and of anything after, as a `RawCursor` gives them."""
    found = zip(columns, zip(*rows, strict=True), strict=False)
    return [CONVERTERS.get(column.name, pa.array)(cells, column.type) for column, cells in found]


def ids(raw: bytes) -> pa.Array:
    """Return ids, one behind the other, as UUID writes them; Arrow's slices and joins take five times as long."""
    digits = np.frombuffer(raw.hex().encode(), np.uint8).reshape(-1, 32)
    return texts_of_rows(np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1))


def headers(texts: str) -> pa.Array:
    """Return maps of headers. `texts` has objects of JSON or nulls, with commas between; one by one takes 8 times."""
    names: list[str] = []
    values: list[str] = []
    starts: list[int | None] = []
    for each in json.loads(f"[{texts}]"):
        starts.append(None if each is None else len(names))
        if each:
            names += each
            values += each.values()
    found = pa.MapArray.from_arrays(
        pa.array([*starts, len(names)], pa.int32()), pa.array(names, TEXT), pa.array(values, TEXT)
    )
    return found.cast(HEADERS)


def _ids(of_rows: Sequence[bytes], _: pa.DataType) -> pa.Array:
    return ids(b"".join(of_rows))


def _headers(texts: Sequence[str | None], _: pa.DataType) -> pa.Array:
    return headers(",".join("null" if text is None else text for text in texts))


def _moments(moments: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    return pc.add(pa.array(moments, pa.int64()), YEAR_2000_US).cast(kind)


Converter: TypeAlias = Callable[[Any, pa.DataType], pa.Array]
OF_TYPE: dict[str, Converter] = {"uuid": _ids, "timestamptz": _moments}
CONVERTERS = {column.name: OF_TYPE[column.type] for column in READ if column.type in OF_TYPE} | {"headers": _headers}
