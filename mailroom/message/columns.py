"""The rows of messages and of executables: each of their columns once, from which every list of them is made.

A new column of messages is added here and, by a migration, to the tables; to `Outgoing` if writers set it, and to
`Message` if consumers see it. All code that moves messages then includes it: deliveries, parked keys, dead letters,
scheduled messages and the staged tables of Spark; and links from the next version of the wire on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CHAR = '"char"'
# What crosses drivers and links in the place of types that are text in their binary form too, or that few drivers know.
PLAIN = {CHAR: "text", "jsonb": "text", "smallint": "bigint"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of one of our tables: its type there, and who sets it.

    `by` a writer, which is code that sends by Mailroom, in Python or Spark; by SQL, which is how others send; or by the
    database, by a default or a trigger. `default` is the table's, in SQL. `moves` from table to table with its message,
    or is only for the first one. `wire` is the first version of the wire that has it.
    """

    name: str
    type: str
    by: Literal["writer", "SQL", "database"] = "writer"
    default: str = ""
    moves: bool = True
    wire: int = 1

    @property
    def plain(self) -> str:
        """The type in which it crosses drivers and links."""
        return PLAIN.get(self.type, self.type)

    def given(self, expression: str = "") -> str:
        """Return the column, or an expression of it, in its plain type."""
        return self._cast(expression or self.name, self.plain)

    def taken(self, expression: str = "") -> str:
        """Return the column, or an expression of it that has its plain type, in the type of the table."""
        return self._cast(expression or self.name, self.type)

    def _cast(self, expression: str, kind: str) -> str:
        return expression if self.type == self.plain else f"{expression}::{kind}"


MESSAGE_ROW = (
    Column("message_id", "uuid"),
    Column("topic", "text"),
    Column("key", "text"),
    Column("kind", CHAR, default="'M'"),
    Column("message_type", CHAR, default="'U'"),
    Column("event_type", CHAR),
    Column("value", "bytea"),
    Column("value_json", "jsonb", by="SQL"),
    Column("headers", "jsonb"),
    Column("deliver_at", "timestamptz", moves=False),
    Column("expires_at", "timestamptz"),
    Column("after_clock", "bigint"),
    Column("source", "text", by="database"),
    Column("sent_at", "timestamptz", by="database"),
)
# What a delivery adds to a message.
DELIVERY_ROW = (
    Column("inbox", "text", by="database"),
    Column("clock", "bigint", by="database"),
    Column("sent_clock", "bigint", by="database"),
    Column("origin", "uuid", by="database"),
    Column("delivered_at", "timestamptz", by="database"),
)
# What says what an executable does. A dead letter keeps these as its value.
PARTS = (
    Column("version", "smallint"),
    Column("operation", "text"),
    Column("target", "text"),
    Column("key", "text"),
    Column("end_key", "text"),
    Column("value", "bytea"),
    Column("amount", "bigint"),
    Column("bytes", "bigint"),
    Column("expected", "bytea"),
    Column("arguments", "jsonb"),
    Column("at", "timestamptz"),
    Column("row_limit", "bigint"),
    Column("notify", "text"),
)
# What it is as a message. It is kept with the dead letter.
MESSAGE_PARTS = (
    Column("headers", "jsonb"),
    Column("after_clock", "bigint"),
    Column("source", "text", by="database"),
    Column("sent_at", "timestamptz", by="database"),
)
EXECUTABLE_ROW = (Column("message_id", "uuid"), *PARTS, *MESSAGE_PARTS)


def listed(columns: Iterable[Column], of: str = "", **instead: str) -> str:
    """Return a list of columns for SQL, `of` a table or record if it is named; `instead` of a column its expression."""
    prefix = f"{of}." if of else ""
    return ", ".join(instead.get(column.name, f"{prefix}{column.name}") for column in columns)


def written(row: Iterable[Column]) -> tuple[tuple[str, str], ...]:
    """Return the columns that a writer sets, each with its type."""
    return tuple((column.name, column.type) for column in row if column.by == "writer")


# The columns that every table of messages has, so that moving one is a plain INSERT .. SELECT.
MOVING = tuple(column for column in MESSAGE_ROW if column.moves)
MESSAGE = listed(MOVING)
# The columns of a delivered message.
DELIVERED = listed((*DELIVERY_ROW, *MOVING))
