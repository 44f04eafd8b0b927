"""The table `accounting`: reads and writes the books that account operations add to."""

from collections.abc import Collection
from datetime import datetime

from dispatcher.executor.batch.fold import Book, Books, Sums
from mailroom.sql.operation import Operation, Sql

FIND = Sql(
    """
SELECT a.key, a.minute, a.count, a.bytes
FROM unnest(%(keys)s::text[], %(minutes)s::timestamptz[]) AS g (key, minute),
     LATERAL (SELECT * FROM {schema}.accounting AS a WHERE a.key = g.key AND a.minute = g.minute OFFSET 0) AS a
""",
    columns=("text", "timestamptz", "bigint", "bigint"),
)


def finding_books(schema: str, wanted: Collection[Book]) -> Operation[Books]:
    """Return the books that exist; a missing one has no entry."""
    if not wanted:
        return {}
    keys, minutes = _columns(wanted)
    rows = yield FIND.at(schema=schema)(keys=keys, minutes=minutes)
    return {Book(key, minute): Sums(entries, size) for key, minute, entries, size in rows}


# In key order, so that the index is walked once.
WRITE = Sql(
    """
INSERT INTO {schema}.accounting (key, minute, count, bytes)
SELECT * FROM unnest(%(keys)s::text[], %(minutes)s::timestamptz[], %(counts)s::bigint[], %(sizes)s::bigint[])
              AS g (key, minute, count, bytes)
ORDER BY key, minute
ON CONFLICT (key, minute) DO UPDATE SET count = excluded.count, bytes = excluded.bytes
"""
)


def writing_books(schema: str, books: Books) -> Operation[None]:
    """Write the new sums. Only the executor writes this table."""
    if not books:
        return
    keys, minutes = _columns(books)
    counts, sizes = [each.entries for each in books.values()], [each.bytes for each in books.values()]
    yield WRITE.at(schema=schema)(keys=keys, minutes=minutes, counts=counts, sizes=sizes)


def _columns(books: Collection[Book]) -> tuple[list[str], list[datetime]]:
    return [book.key for book in books], [book.minute for book in books]
