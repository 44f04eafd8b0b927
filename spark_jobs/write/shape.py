"""The shape of a DataFrame that is to be sent: which columns its rows have, and what is the same for all of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark

from mailroom.errors import InvalidMessage
from mailroom.values.names import shown, topic_name
from spark_jobs.arrow import binary_copy
from spark_jobs.arrow.byte_arrays import of_rows
from spark_jobs.arrow.cbor import encoded
from spark_jobs.arrow.cbor_types import check_spark_type
from spark_jobs.arrow.content import BatchContent
from spark_jobs.write.columns import TEXT, WRITTEN_COLUMNS, BusinessColumn, SentColumn


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of rows, what is the same for all rows, the user's own columns, and whether NaN is sent as null."""

    names: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    business: tuple[BusinessColumn, ...] = ()
    nan_as_null: bool = False

    @classmethod
    def of(
        cls, schema: spark.StructType, constants: Mapping[str, str], *, business: bool = False,
        nan_as_null: bool = False,
    ) -> "Shape":  # fmt: skip
        """Check a DataFrame's schema; `business` allows columns that no message has. Names differ by more than case.

        Raises `InvalidMessage` for columns that are missing, unknown, of a wrong name or type, and says what to do.
        """
        names = [name.lower() for name in schema.fieldNames()]
        unknown = [field for field in schema.fields if field.name.lower() not in WRITTEN_COLUMNS]
        if unknown and not business:
            raise InvalidMessage(
                f"A message has no column {unknown[0].name!r}; the columns are {', '.join(WRITTEN_COLUMNS)}. "
                f"Put data into the value: df.select(..., struct({unknown[0].name!r}, ...).alias('value')).",
                code="MR-spark-column-invalid",
            )
        if "value" not in names:
            raise InvalidMessage(
                "There is no column value: df.select(..., struct('a', 'b').alias('value')).",
                code="MR-spark-column-invalid",
            )
        twice = [name for name in constants if name in names]
        if twice:
            raise InvalidMessage(
                f"{twice[0]} is given twice: as a column, or for all rows, but not both.",
                code="MR-spark-column-invalid",
            )
        twice = [name for name in schema.fieldNames() if names.count(name.lower()) > 1]
        if twice:
            raise InvalidMessage(
                f"Columns {', '.join(map(shown, twice))} are one (case makes no difference): rename them.",
                code="MR-spark-column-invalid",
            )
        if "topic" not in (*names, *constants):
            raise InvalidMessage(
                "There is no topic: give one for all rows, or a column topic.", code="MR-spark-column-invalid"
            )
        for field in schema.fields:
            if field.name.lower() in WRITTEN_COLUMNS:
                _check_field(WRITTEN_COLUMNS[field.name.lower()], field.dataType)
        return cls(
            tuple(name for name in WRITTEN_COLUMNS if name in names),
            tuple(sorted((name, _constant(name, text)) for name, text in constants.items())),
            tuple(map(BusinessColumn.of, unknown)),
            nan_as_null,
        )

    def messages(self) -> list[str]:
        """Return the message columns of staging: the id first, which every row has."""
        return ["message_id", *(name for name in self.names if name != "message_id")]

    def staged(self) -> list[tuple[str, str]]:
        """Return the columns of staging, as SQL has them, with their types in PostgreSQL; the message's id first."""
        messages = [(name, WRITTEN_COLUMNS[name].staged) for name in self.messages()]
        return [*messages, *((column.quoted, column.staged) for column in self.business)]

    def prepared(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the arrays of `staged` for a batch of rows, checked. Raises `InvalidMessage`."""
        columns = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        prepared = {name: WRITTEN_COLUMNS[name].prepared for name in self.names}
        prepared["value"] = partial(encoded, nan_as_null=self.nan_as_null)
        given = {name: prepared[name](columns[name]) for name in self.names}
        fresh = _fresh_ids(batch.num_rows)
        given["message_id"] = pc.coalesce(given["message_id"], fresh) if "message_id" in given else fresh
        business = (column.prepared(batch.column(column.name)) for column in self.business)
        return [*(given[name] for name in self.messages()), *business]

    def content(self, arrays: Sequence[pa.Array]) -> BatchContent:
        """Return the content of the arrays of `prepared`, without ids: each run may make new ones."""
        columns = list(zip(self.staged(), arrays, strict=True))
        given = {name: array for (name, _), array in columns}
        topic, key = given.get("topic", dict(self.constants).get("topic")), given.get("key", "")
        if "key" in given:
            key = pc.fill_null(key, "")
            if "message_id" in self.names:
                own = [str(UUID(bytes=id)) for id in given["message_id"].to_pylist()]
                key = pc.if_else(pc.equal(key, pa.array(own, key.type)), "", key)
        rest = [(array, kind) for (name, kind), array in columns if name not in ("message_id", "topic", "key", "value")]
        return BatchContent.of(
            topic, key, given["value"], binary_copy.fields(*zip(*rest, strict=True)) if rest else None
        )


def _fresh_ids(count: int) -> pa.Array:
    """Return random UUIDs (RFC 9562, version 4); made by the database, they would take ten times as long."""
    ids = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(count, 16).copy()
    ids[:, 6] = ids[:, 6] & 0x0F | 0x40
    ids[:, 8] = ids[:, 8] & 0x3F | 0x80
    return of_rows(ids)


def _check_field(column: SentColumn, kind: spark.DataType) -> None:
    fits = isinstance(kind, column.takes)
    if fits and isinstance(kind, spark.MapType) and column.name == "headers":
        fits = isinstance(kind.keyType, TEXT) and isinstance(kind.valueType, TEXT)
    if not fits:
        raise InvalidMessage(
            f"Column {column.name} is {kind.simpleString()}; it has to be {column.wanted}: cast it.",
            code="MR-spark-column-invalid",
        )
    if column.name == "value":
        check_spark_type(kind, "value")


def _constant(name: str, text: str) -> str:
    if name == "topic":
        return topic_name(text)
    WRITTEN_COLUMNS[name].prepared(pa.array([text], pa.large_string()))
    return text
