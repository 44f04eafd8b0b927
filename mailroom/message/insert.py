"""INSERT of one row, of those columns that have a value; and of many, by COPY or by arrays."""

from collections.abc import Sequence
from functools import lru_cache

from mailroom.message.columns import Column, listed, written
from mailroom.sql.operation import BOUND, IN_TRANSACTION, Execute, Fill, Operation, Row, Sql, Statement


class Insert(Sql):
    """The statements that insert rows into a table: of those `columns` that a writer sets, in their order.

    Of one row, a null is left out, since its column has a default, and each value sent takes time. So each set of
    columns that have a value is a statement of its own. Of many rows all columns are given, by `copy`, or by `unnest`
    if that cannot be; both keep their order, and assign positions row by row.
    """

    def __init__(self, table: str, columns: Sequence[Column]) -> None:
        super().__init__("INSERT INTO {schema}.{table} ({given}) VALUES ({values})", table=table)
        given = [column for column in columns if column.by == "writer"]
        self.values = {column.name: column.taken(f"%({column.name})s::{column.plain}") for column in given}
        self._written = written(given)
        names = listed(given)
        self.copy = Sql("COPY {schema}.{table} ({names}) FROM STDIN (FORMAT binary)", table=table, names=names)
        self.unnest = Sql(
            "INSERT INTO {schema}.{table} ({names}) SELECT {read} FROM unnest({arrays}) "
            "WITH ORDINALITY AS rows ({names}, nth) ORDER BY nth",
            table=table,
            names=names,
            read=", ".join(column.taken() for column in given),
            arrays=", ".join(f"%({column.name})s::{column.plain}[]" for column in given),
        )
        self._bound = Sql(BOUND.template, BOUND.columns, table=table)

    def of(self, schema: str, row: Row) -> Execute:
        """Return the step that inserts the row."""
        given = {name: value for name, value in zip(self.values, row, strict=True) if value is not None}
        return Execute(_inserting(self, schema, tuple(given)), given)

    def many(self, schema: str, rows: Sequence[Row]) -> Fill:
        """Return the step that inserts the rows."""
        bound, copy, unnest = (each.at(schema=schema) for each in (self._bound, self.copy, self.unnest))
        return Fill(bound, copy, unnest, self._written, rows)

    def one(self, schema: str, row: Row) -> Operation[None]:
        """Insert the row."""
        yield IN_TRANSACTION
        yield self.of(schema, row)

    def all(self, schema: str, rows: list[Row]) -> Operation[int]:
        """Insert the rows in order; return how many."""
        yield IN_TRANSACTION
        if rows:
            yield self.many(schema, rows)
        return len(rows)


# D-statements-8: A user's pipeline cannot run COPY.
@lru_cache(maxsize=4096)
def _inserting(insert: Insert, schema: str, names: tuple[str, ...]) -> Statement:
    values = ", ".join(insert.values[name] for name in names)
    return insert.at(schema=schema, given=", ".join(names), values=values)
