"""INSERT of one row, of those columns that have a value."""

from collections.abc import Sequence
from functools import lru_cache

from mailroom.sql.operation import Execute, Row, Sql, Statement

# What a parameter is given as, where drivers cannot bind the column's own type.
CAST = {'"char"': 'text::"char"', "jsonb": "text::jsonb", "smallint": "bigint"}


class Insert(Sql):
    """The statements that insert a row into a table. `columns` are their names and types, in the order of a row.

    A null is left out, since its column has a default, and each value sent takes time. So each set of columns that have
    a value is a statement of its own.
    """

    def __init__(self, table: str, columns: Sequence[tuple[str, str]]) -> None:
        super().__init__("INSERT INTO {schema}.{table} ({given}) VALUES ({values})", table=table)
        self.values = {name: f"%({name})s::{CAST.get(kind, kind)}" for name, kind in columns}

    def of(self, schema: str, row: Row) -> Execute:
        """Return the step that inserts the row."""
        given = {name: value for name, value in zip(self.values, row, strict=True) if value is not None}
        return Execute(_inserting(self, schema, tuple(given)), given)


@lru_cache(maxsize=4096)
def _inserting(insert: Insert, schema: str, names: tuple[str, ...]) -> Statement:
    values = ", ".join(insert.values[name] for name in names)
    return insert.at(schema=schema, given=", ".join(names), values=values)
