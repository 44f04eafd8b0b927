"""The columns of a DataFrame that is to be sent, and what each row of them becomes: checked, and as it is staged.

Everything is done for whole Arrow arrays. The limits are those of `outbox.Outgoing`. An error names the column and the
fault, and never what a row holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from mailroom.errors import InvalidMessage
from mailroom.message.columns import CHAR, MESSAGE_ROW, written
from mailroom.message.headers import as_json, checked
from mailroom.message.outgoing import EARLIEST, LATEST
from mailroom.values.names import MAX_AFTER_CLOCK, MAX_KEY_BYTES, TOPIC, shown
from outbox.bulk import NTH
from spark_jobs.arrow.cbor import encoded

INTEGERS = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)


@dataclass(frozen=True, slots=True)
class SentColumn:
    """A column of messages: the Spark types it takes, how its rows are prepared, and its type in staging."""

    name: str
    takes: tuple[type[spark.DataType], ...]
    wanted: str
    prepared: Callable[[pa.Array], pa.Array]
    staged: str


def _message_ids(ids: pa.Array) -> pa.Array:
    """Return texts of UUIDs as their 16 bytes; a null gets a fresh one when it is sent."""
    try:
        return pa.array([None if text is None else UUID(text).bytes for text in ids.to_pylist()], pa.large_binary())
    except ValueError:
        raise InvalidMessage(
            "Column message_id has a row that is not a UUID: make one with Spark's uuid().", code="MR-spark-row-invalid"
        ) from None


def _topics(topics: pa.Array) -> pa.Array:
    matches = pc.match_substring_regex(_without_nul(topics, "topic"), "^" + TOPIC.pattern.replace(r"\Z", "$"))
    _demand(
        matches, "topic", "is null or no topic: a letter, then up to 199 letters, digits, dots, hyphens, underscores"
    )
    _demand(pc.equal(pc.count_substring(topics, "\n"), 0), "topic", "holds a line break")
    return topics


def _keys(keys: pa.Array) -> pa.Array:
    text = pc.cast(keys, pa.large_string())
    size = pc.binary_length(text)
    fits = pc.and_(pc.greater_equal(size, 1), pc.less_equal(size, MAX_KEY_BYTES))
    _demand(
        pc.fill_null(fits, True),
        "key",
        f"has not 1 to {MAX_KEY_BYTES} bytes: use a digest of it, or null for a message without order",
    )
    return _without_nul(text, "key")


def _codes(name: str, allowed: str) -> Callable[[pa.Array], pa.Array]:
    def prepared(codes: pa.Array) -> pa.Array:
        known = pc.is_in(codes, value_set=pa.array([*allowed, None], codes.type))
        _demand(known, name, f"is none of {', '.join(allowed)}")
        return codes

    return prepared


def _headers(headers: pa.Array) -> pa.Array:
    # Row by row: few DataFrames have the column, and this keeps the rules of headers in one place.
    try:
        rows = headers.to_pylist()
    except UnicodeDecodeError:
        raise InvalidMessage(
            "Column headers has a row with text that is not UTF-8.", code="MR-spark-row-invalid"
        ) from None
    return pa.array([None if row is None else as_json(checked(dict(row))) for row in rows], pa.large_string())


def _moments(name: str) -> Callable[[pa.Array], pa.Array]:
    def prepared(moments: pa.Array) -> pa.Array:
        # Not at import: it makes pyarrow import pandas, in each process that plans a write.
        low, high = (pa.scalar(moment, pa.timestamp("us", "UTC")) for moment in (EARLIEST, LATEST))
        at = pc.cast(moments, pa.timestamp("us", "UTC"))
        fits = pc.and_(pc.greater_equal(at, low), pc.less(at, high))
        _demand(pc.fill_null(fits, True), name, "lies outside the years 1 to 9998 of UTC")
        return at

    return prepared


def _clocks(clocks: pa.Array) -> pa.Array:
    numbers = pc.cast(clocks, pa.int64())
    fits = pc.and_(pc.greater_equal(numbers, 0), pc.less_equal(numbers, MAX_AFTER_CLOCK))
    _demand(pc.fill_null(fits, True), "after_clock", "is not a clock: from 0 to 2**62")
    return numbers


# With spark.sql.preserveCharVarcharTypeInfo, columns of tables are of the other two.
TEXT = (spark.StringType, spark.VarcharType, spark.CharType)
TIME = (spark.TimestampType,)
Prepared: TypeAlias = Callable[[pa.Array], pa.Array]
# What a column takes, what to say of that, and how it is prepared: by its name, or else by its type.
BY_NAME: dict[str, tuple[tuple[type[spark.DataType], ...], str, Prepared]] = {
    "message_id": (TEXT, "string", _message_ids),
    "topic": (TEXT, "string", _topics),
    "key": ((*TEXT, *INTEGERS), "string or an integer", _keys),
    "kind": (TEXT, "string", _codes("kind", "MECR")),
    "message_type": (TEXT, "string", _codes("message_type", "ODCU")),
    "event_type": (TEXT, "string", _codes("event_type", "CUD")),
    "value": ((spark.DataType,), "anything", encoded),
    "headers": ((spark.MapType,), "map<string,string>", _headers),
    "after_clock": (INTEGERS, "an integer", _clocks),
}
BY_TYPE: dict[str, tuple[tuple[type[spark.DataType], ...], str, Callable[[str], Prepared]]] = {
    "text": (TEXT, "string", lambda name: lambda texts: _without_nul(texts, name)),
    "timestamptz": (TIME, "timestamp_ltz", _moments),
}


def _sent(name: str, kind: str) -> SentColumn:
    if name in BY_NAME:
        return SentColumn(name, *BY_NAME[name], "text" if kind == CHAR else kind)
    takes, wanted, prepared = BY_TYPE[kind]
    return SentColumn(name, takes, wanted, prepared(name), kind)


WRITTEN_COLUMNS = {name: _sent(name, kind) for name, kind in written(MESSAGE_ROW)}


# -- columns that no message has: rows of the user's own, beside the messages for the user's SQL ----------------------

PARTITION = "mailroom_partition"
OURS = (PARTITION, NTH)
MAX_NAME_BYTES = 63
SYSTEM_COLUMNS = ("tableoid", "ctid", "xmin", "xmax", "cmin", "cmax")
TYPES: dict[type[spark.DataType], str] = {
    spark.BooleanType: "boolean",
    spark.ByteType: "smallint",
    spark.ShortType: "smallint",
    spark.IntegerType: "integer",
    spark.LongType: "bigint",
    spark.FloatType: "real",
    spark.DoubleType: "double precision",
    **dict.fromkeys(TEXT, "text"),
    spark.BinaryType: "bytea",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
}


@dataclass(frozen=True, slots=True)
class BusinessColumn:
    """A column of the user's own: its name, its type in staging, and the type that the user's SQL finds."""

    name: str
    staged: str
    shown: str

    @classmethod
    def of(cls, field: spark.StructField) -> "BusinessColumn":
        """Check a field that no message has. Raises `InvalidMessage`."""
        name = field.name
        if name.lower() in OURS:
            raise InvalidMessage(f"Mailroom keeps the name {name}: rename the column.", code="MR-spark-column-invalid")
        if name.lower() in SYSTEM_COLUMNS:
            raise InvalidMessage(
                f"PostgreSQL keeps the name {name.lower()} in every table: rename the column.",
                code="MR-spark-column-invalid",
            )
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES or set(name) & set('"%{}.`\0'):
            raise InvalidMessage(
                f"Column {shown(name)} cannot be staged: rename it to 1 to {MAX_NAME_BYTES} bytes without dots, quotes "
                '" and `, %, { and }.',
                code="MR-spark-column-invalid",
            )
        return cls(name, *_types(name, field.dataType))

    @property
    def quoted(self) -> str:
        """The name as SQL has it."""
        return f'"{self.name}"'

    def prepared(self, column: pa.Array) -> pa.Array:
        """Return the rows as they are staged. Raises `InvalidMessage` for text that PostgreSQL cannot hold."""
        if self.shown == "text":
            return _without_nul(column, self.name)
        if self.shown == "text[]":
            _without_nul(column.flatten(), self.name)
        if self.staged == "text":
            return pc.cast(column, pa.large_string())
        if self.staged == "text[]" != self.shown:
            return pc.cast(column, pa.list_(pa.large_string()))
        return column


def _types(name: str, kind: spark.DataType) -> tuple[str, str]:
    # A decimal is staged as text: PostgreSQL reads it faster than we could write its binary digits.
    if isinstance(kind, spark.DecimalType):
        return "text", f"numeric({kind.precision},{kind.scale})"
    if isinstance(kind, spark.ArrayType) and not isinstance(kind.elementType, spark.ArrayType):
        staged, found = _types(name, kind.elementType)
        return f"{staged}[]", f"{found}[]"
    for spark_type, staged in TYPES.items():
        if isinstance(kind, spark_type):
            return staged, staged
    raise InvalidMessage(
        f"Column {shown(name)} is {kind.simpleString()}, which no column of a table is: use to_json(column).",
        code="MR-spark-column-invalid",
    )


# -- what rows must be -------------------------------------------------------------------------------------------------


def _demand(holds: pa.Array, name: str, fault: str) -> None:
    """Raise `InvalidMessage`, with the fault, unless it holds for every row."""
    if not pc.all(pc.fill_null(holds, False), min_count=0).as_py():
        raise InvalidMessage(
            f"Column {name} has a row that {fault}. Nothing of this batch was sent.", code="MR-spark-row-invalid"
        )


def _without_nul(text: pa.Array, name: str) -> pa.Array:
    """Return the text of a column, or raise `InvalidMessage`: PostgreSQL's is UTF-8 without NUL."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidMessage(
            f"Column {name} has a row that is not UTF-8: send it as binary, or in the value.",
            code="MR-spark-row-invalid",
        ) from None
    clean = pc.equal(pc.count_substring(pc.cast(text, pa.large_binary()), b"\0"), 0)
    _demand(pc.fill_null(clean, True), name, "holds a NUL character, which PostgreSQL's text cannot")
    return text
