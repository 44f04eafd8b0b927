"""Columns that no message has: rows of the user's own, which are staged beside the messages for the user's SQL."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from mailroom.errors import InvalidMessage
from mailroom.names import shown
from spark_jobs.write.checks import without_nul

PARTITION, NTH = OURS = ("mailroom_partition", "mailroom_nth")
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
    spark.StringType: "text",
    spark.BinaryType: "bytea",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
}


@dataclass(frozen=True, slots=True)
class BusinessColumn:
    """A column by its name, the type it is staged as, and the type that the user's SQL finds."""

    name: str
    staged: str
    shown: str

    @classmethod
    def of(cls, field: spark.StructField) -> "BusinessColumn":
        """Check a field that no message has. Raises `InvalidMessage`."""
        name = field.name
        if name.lower() in OURS:
            raise InvalidMessage(f"Mailroom keeps the name {name}: rename the column.")
        if name.lower() in SYSTEM_COLUMNS:
            raise InvalidMessage(f"PostgreSQL keeps the name {name.lower()} in every table: rename the column.")
        if not 1 <= len(name.encode()) <= MAX_NAME_BYTES or set(name) & set('"%{}.`\0'):
            raise InvalidMessage(
                f"Column {shown(name)} cannot be staged: rename it to 1 to {MAX_NAME_BYTES} bytes without dots, quotes "
                '" and `, %, { and }.'
            )
        return cls(name, *_types(name, field.dataType))

    @property
    def quoted(self) -> str:
        """The name as SQL has it."""
        return f'"{self.name}"'

    def prepared(self, column: pa.Array) -> pa.Array:
        """Return the rows as they are staged. Raises `InvalidMessage` for text that PostgreSQL cannot hold."""
        if self.shown == "text":
            return without_nul(column, self.name)
        if self.shown == "text[]":
            without_nul(column.flatten(), self.name)
        if self.staged == "text":
            return pc.cast(column, pa.large_string())
        if self.staged == "text[]" != self.shown:
            return pc.cast(column, pa.list_(pa.large_string()))
        return column


def _types(name: str, kind: spark.DataType) -> tuple[str, str]:
    # A decimal travels as text, which PostgreSQL reads faster than we could make its digits.
    if isinstance(kind, spark.DecimalType):
        return "text", f"numeric({kind.precision},{kind.scale})"
    if isinstance(kind, spark.ArrayType) and not isinstance(kind.elementType, spark.ArrayType):
        staged, found = _types(name, kind.elementType)
        return f"{staged}[]", f"{found}[]"
    for spark_type, staged in TYPES.items():
        if isinstance(kind, spark_type):
            return staged, staged
    raise InvalidMessage(
        f"Column {shown(name)} is {kind.simpleString()}, which no column of a table is: use to_json(column)."
    )
