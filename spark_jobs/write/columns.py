"""The columns of a DataFrame that is to be sent, and what each row of them becomes: checked, and as the outbox has it.

Everything is done for whole Arrow arrays. The limits are those of `outbox.Outgoing`; an error names the column and the
limit, and never what a row holds.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from mailroom.errors import InvalidMessage
from mailroom.names import MAX_AFTER_CLOCK, MAX_KEY_BYTES, TOPIC, shown, topic_name
from outbox.outgoing import EARLIEST, LATEST, headers_json
from spark_jobs.write import binary_copy
from spark_jobs.write.business import BusinessColumn
from spark_jobs.write.byte_arrays import of_rows
from spark_jobs.write.cbor import encoded
from spark_jobs.write.cbor_types import check_spark_type
from spark_jobs.write.checks import demand, without_nul
from spark_jobs.write.content import Content

INTEGERS = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a message can have: which Spark types it takes, its type in staging, and how it gets there."""

    name: str
    takes: tuple[type[spark.DataType], ...]
    wanted: str
    staged: str
    prepared: Callable[[pa.Array], pa.Array]


def _message_ids(ids: pa.Array) -> pa.Array:
    """Text of UUIDs as their 16 bytes; a null gets a fresh one when it is sent."""
    try:
        return pa.array([None if text is None else UUID(text).bytes for text in ids.to_pylist()], pa.large_binary())
    except ValueError:
        raise InvalidMessage("Column message_id has a row that is no UUID: make one with Spark's uuid().") from None


def _topics(topics: pa.Array) -> pa.Array:
    matches = pc.match_substring_regex(without_nul(topics, "topic"), "^" + TOPIC.pattern.replace(r"\Z", "$"))
    demand(
        matches, "topic", "is null or no topic: a letter, then up to 199 letters, digits, dots, hyphens, underscores"
    )
    demand(pc.equal(pc.count_substring(topics, "\n"), 0), "topic", "holds a line break")
    return topics


def _keys(keys: pa.Array) -> pa.Array:
    text = pc.cast(keys, pa.large_string())
    size = pc.binary_length(text)
    fits = pc.and_(pc.greater_equal(size, 1), pc.less_equal(size, MAX_KEY_BYTES))
    demand(
        pc.fill_null(fits, True),
        "key",
        f"has not 1 to {MAX_KEY_BYTES} bytes: use a digest of it, or null for a message without order",
    )
    return without_nul(text, "key")


def _codes(name: str, allowed: str) -> Callable[[pa.Array], pa.Array]:
    def prepared(codes: pa.Array) -> pa.Array:
        known = pc.is_in(codes, value_set=pa.array([*allowed, None], codes.type))
        demand(known, name, f"is none of {', '.join(allowed)}")
        return codes

    return prepared


def _headers(headers: pa.Array) -> pa.Array:
    # A row at a time: few DataFrames have the column, and so the rules of headers stand in one place.
    try:
        rows = headers.to_pylist()
    except UnicodeDecodeError:
        raise InvalidMessage("Column headers has a row with text that is not UTF-8.") from None
    return pa.array([None if row is None else headers_json(dict(row)) for row in rows], pa.large_string())


def _moments(name: str) -> Callable[[pa.Array], pa.Array]:
    def prepared(moments: pa.Array) -> pa.Array:
        # Not when this module is imported: it makes pyarrow import pandas, in each process that plans a write.
        low, high = (pa.scalar(moment, pa.timestamp("us", "UTC")) for moment in (EARLIEST, LATEST))
        at = pc.cast(moments, pa.timestamp("us", "UTC"))
        fits = pc.and_(pc.greater_equal(at, low), pc.less(at, high))
        demand(pc.fill_null(fits, True), name, "lies outside the years 1 to 9998 of UTC")
        return at

    return prepared


def _clocks(clocks: pa.Array) -> pa.Array:
    numbers = pc.cast(clocks, pa.int64())
    fits = pc.and_(pc.greater_equal(numbers, 0), pc.less_equal(numbers, MAX_AFTER_CLOCK))
    demand(pc.fill_null(fits, True), "after_clock", "is no clock: from 0 to 2**62")
    return numbers


TEXT = (spark.StringType,)
TIME = (spark.TimestampType,)
COLUMNS = {
    column.name: column
    for column in (
        Column("message_id", TEXT, "string", "uuid", _message_ids),
        Column("topic", TEXT, "string", "text", _topics),
        Column("key", (*TEXT, *INTEGERS), "string or an integer", "text", _keys),
        Column("kind", TEXT, "string", "text", _codes("kind", "MECR")),
        Column("message_type", TEXT, "string", "text", _codes("message_type", "ODCU")),
        Column("event_type", TEXT, "string", "text", _codes("event_type", "CUD")),
        Column("value", (spark.DataType,), "anything", "bytea", encoded),
        Column("headers", (spark.MapType,), "map<string,string>", "jsonb", _headers),
        Column("deliver_at", TIME, "timestamp", "timestamptz", _moments("deliver_at")),
        Column("expires_at", TIME, "timestamp", "timestamptz", _moments("expires_at")),
        Column("after_clock", INTEGERS, "an integer", "bigint", _clocks),
    )
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Which columns rows have, what is the same for all of them, which columns are no message's, and what NaN is."""

    names: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    business: tuple[BusinessColumn, ...] = ()
    nan_as_null: bool = False

    @classmethod
    def of(
        cls, schema: spark.StructType, constants: Mapping[str, str], *, business: bool = False,
        nan_as_null: bool = False,
    ) -> "Shape":  # fmt: skip
        """Check a DataFrame's schema; `business` lets columns be that no message has. Case does not tell names apart.

        Raises `InvalidMessage` for columns that are missing, unknown, of a wrong name or type, and says what to do.
        """
        names = [name.lower() for name in schema.fieldNames()]
        unknown = [field for field in schema.fields if field.name.lower() not in COLUMNS]
        if unknown and not business:
            raise InvalidMessage(
                f"A message has no column {unknown[0].name!r}; the columns are {', '.join(COLUMNS)}. "
                f"Put data into the value: df.select(..., struct({unknown[0].name!r}, ...).alias('value'))."
            )
        if "value" not in names:
            raise InvalidMessage("There is no column value: df.select(..., struct('a', 'b').alias('value')).")
        twice = [name for name in constants if name in names]
        if twice:
            raise InvalidMessage(f"{twice[0]} is given twice: as a column, or for all rows, but not both.")
        twice = [name for name in schema.fieldNames() if names.count(name.lower()) > 1]
        if twice:
            raise InvalidMessage(
                f"Columns {', '.join(map(shown, twice))} are one (case is no difference): rename them."
            )
        if "topic" not in (*names, *constants):
            raise InvalidMessage("There is no topic: give one for all rows, or a column topic.")
        for field in schema.fields:
            if field.name.lower() in COLUMNS:
                _check_field(COLUMNS[field.name.lower()], field.dataType)
        return cls(
            tuple(name for name in COLUMNS if name in names),
            tuple(sorted((name, _constant(name, text)) for name, text in constants.items())),
            tuple(map(BusinessColumn.of, unknown)),
            nan_as_null,
        )

    def messages(self) -> list[str]:
        """Return the columns of staging that a message has, its id first, which every row has."""
        return ["message_id", *(name for name in self.names if name != "message_id")]

    def staged(self) -> list[tuple[str, str]]:
        """Return the columns of staging, as SQL has them, with their types in PostgreSQL; the message's id first."""
        messages = [(name, COLUMNS[name].staged) for name in self.messages()]
        return [*messages, *((column.quoted, column.staged) for column in self.business)]

    def prepared(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the arrays of `staged` for a batch of rows, checked. Raises `InvalidMessage`."""
        columns = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        prepared = {name: COLUMNS[name].prepared for name in self.names}
        prepared["value"] = partial(encoded, nan_as_null=self.nan_as_null)
        given = {name: prepared[name](columns[name]) for name in self.names}
        fresh = _fresh_ids(batch.num_rows)
        given["message_id"] = pc.coalesce(given["message_id"], fresh) if "message_id" in given else fresh
        business = (column.prepared(batch.column(column.name)) for column in self.business)
        return [*(given[name] for name in self.messages()), *business]

    def content(self, arrays: Sequence[pa.Array]) -> Content:
        """Return what the arrays of `prepared` hold. Ids are no content: those made here, or by uuid(), are new."""
        columns = list(zip(self.staged(), arrays, strict=True))
        given = {name: array for (name, _), array in columns}
        topic, key = given.get("topic", dict(self.constants).get("topic")), given.get("key", "")
        if "key" in given:
            key = pc.fill_null(key, "")
            if "message_id" in self.names:
                own = [str(UUID(bytes=id)) for id in given["message_id"].to_pylist()]
                key = pc.if_else(pc.equal(key, pa.array(own, key.type)), "", key)
        rest = [(array, kind) for (name, kind), array in columns if name not in ("message_id", "topic", "key", "value")]
        return Content.of(topic, key, given["value"], binary_copy.fields(*zip(*rest, strict=True)) if rest else None)


def _fresh_ids(count: int) -> pa.Array:
    """Return random UUIDs (RFC 9562, version 4). Made here and not by the database, they cost a tenth."""
    ids = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    ids[:, 6] = ids[:, 6] & 0x0F | 0x40
    ids[:, 8] = ids[:, 8] & 0x3F | 0x80
    return of_rows(ids)


def _check_field(column: Column, kind: spark.DataType) -> None:
    fits = isinstance(kind, column.takes)
    if fits and isinstance(kind, spark.MapType) and column.name == "headers":
        fits = isinstance(kind.keyType, spark.StringType) and isinstance(kind.valueType, spark.StringType)
    if not fits:
        raise InvalidMessage(f"Column {column.name} is {kind.simpleString()}; it has to be {column.wanted}: cast it.")
    if column.name == "value":
        check_spark_type(kind, "value")


def _constant(name: str, text: str) -> str:
    if name == "topic":
        return topic_name(text)
    COLUMNS[name].prepared(pa.array([text], pa.large_string()))
    return text
