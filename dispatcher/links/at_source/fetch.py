"""Fetch: read a batch at the source as one row of arrays, which Python passes on as they came."""

from dataclasses import dataclass

from mailroom.links.handshake.wire import GATHERED, NAMES, TYPES, WIRE_COLUMNS
from mailroom.sql.operation import Operation, Sql, Undecoded

# The subquery's order is that of the arrays. The target holds against it that seq runs on without a gap.
# D-links-4: A batch is one row of binary arrays.
SELECT = """
SELECT count(*), {gathered}
FROM (SELECT {names} FROM {schema}.transit
      WHERE link = %(link)s::bigint AND seq > %(after)s::bigint AND seq <= %(to)s::bigint ORDER BY seq) AS t
"""
FETCH = Sql(SELECT, columns=("bigint", *TYPES), gathered=GATHERED, names=NAMES)
FETCH_UNDECODED = Sql(SELECT, columns=("bigint", *TYPES), undecoded=True, gathered=GATHERED, names=NAMES)


@dataclass(frozen=True, slots=True, repr=False)
class FetchedBatch:
    """Rows of one link, by seq: an array per column of the wire."""

    rows: int
    columns: dict[str, object]

    @property
    def size(self) -> int:
        """How many bytes it holds; 0 if it was decoded."""
        return sum(len(each.data) for each in self.columns.values() if isinstance(each, Undecoded))


def fetching(schema: str, link: int, *, after: int, to: int, decoded: bool = False) -> Operation[FetchedBatch]:
    """Read the rows of a link after `after` up to `to`.

    On psycopg nothing is decoded but with `decoded`, for a target that is reached by another driver.
    """
    statement = FETCH if decoded else FETCH_UNDECODED
    [(rows, *columns)] = yield statement.at(schema=schema)(link=link, after=after, to=to)
    # A count, also undecoded: a bigint in eight bytes.
    count = int.from_bytes(rows.data, "big") if isinstance(rows, Undecoded) else rows
    return FetchedBatch(count, dict(zip(WIRE_COLUMNS, columns, strict=True)))
