"""Bounds: how far the next batch goes, and whether the source still has the history that was received from it.

The position is the newest receipt. The source keeps the row of the position, since it only trims rows below what was
acknowledged: so one look at that row tells whether both sides have had one past.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from mailroom.links.handshake.diverged import BY_HAND
from mailroom.sql.operation import Operation, Sql

FETCHED_ROWS = 10_000
MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Position:
    """The last row received from an origin; `seq` is 0 before the first one."""

    seq: int
    last_id: UUID | None
    stamped_at: datetime | None
    sent_clock: int


START = Position(0, None, None, 0)

POSITION = Sql(
    """
SELECT last, last_id, stamped_at, sent_clock FROM {schema}.receipt WHERE origin = %(origin)s::bigint
ORDER BY last DESC LIMIT 1
""",
    columns=("bigint", "uuid", "timestamptz", "bigint"),
)


def reading_position(schema: str, origin: int) -> Operation[Position]:
    """Return where an origin's newest receipt stands, at the target."""
    rows = yield POSITION.at(schema=schema)(origin=origin)
    return Position(*rows[0]) if rows else START


@dataclass(frozen=True, slots=True)
class Bounds:
    """The next batch ends at `last`; None if there is none. `more`: there are rows after it.

    `verdict`: the source `agrees` with the position; it has `diverged`, having other rows at or below it, or none; or
    there is a `gap`, `missing` rows after the position that the source has trimmed. Only then is `last` not None. A
    link that was removed looks as if it had diverged. `newest` is the last seq that the source has stamped, 0 for none.
    `size` is about how many bytes the batch has.
    """

    last: int | None
    more: bool
    verdict: Literal["agrees", "diverged", "gap"]
    missing: int
    newest: int
    size: int = field(default=0, compare=False)


# The position's row and the rows after it in one snapshot. It starts at the position, so it meets nothing of what was
# trimmed below, which a held snapshot may keep in the index. The text of JSON is measured, since it crosses as text and
# its stored form may be much smaller; that of headers only if they are compressed.
# D-links-5: Equal last rows mean equal histories before them.
BOUNDS = Sql(
    """
WITH ahead AS MATERIALIZED (
    SELECT seq, size, nth = 1 OR %(bytes)s::bigint >= size AS fits FROM (
        SELECT seq, row_number() OVER next AS nth, sum(
            coalesce(octet_length(value), octet_length(value_json::text), 0) + octet_length(topic) + octet_length(key) +
            CASE WHEN pg_catalog.pg_column_compression(headers) IS NULL
                 THEN coalesce(pg_catalog.pg_column_size(headers), 0)
                 ELSE octet_length(headers::text) END + 100) OVER next AS size
        FROM {schema}.transit WHERE link = %(link)s::bigint AND seq > %(seq)s::bigint
        WINDOW next AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)
        ORDER BY seq LIMIT %(rows)s::bigint) AS next)
SELECT max(seq) FILTER (WHERE fits), count(*) = %(rows)s::bigint OR NOT bool_and(fits), min(seq),
       EXISTS (SELECT FROM {schema}.transit WHERE link = %(link)s::bigint AND seq = %(seq)s::bigint),
       EXISTS (SELECT FROM {schema}.transit WHERE link = %(link)s::bigint AND seq = %(seq)s::bigint
               AND message_id = %(last_id)s::uuid AND stamped_at = %(stamped_at)s::timestamptz),
       (SELECT seq FROM {schema}.transit WHERE link = %(link)s::bigint ORDER BY seq DESC LIMIT 1),
       coalesce(max(size) FILTER (WHERE fits), 0)
FROM ahead
""",
    columns={
        "last": "bigint",
        "more": "boolean",
        "first": "bigint",
        "is_there": "boolean",
        "is_same": "boolean",
        "newest": "bigint",
        "size": "bigint",
    },
)


def bounding(
    schema: str, link: int, position: Position, *, rows: int = FETCHED_ROWS, max_bytes: int = MAX_BYTES
) -> Operation[Bounds]:
    """Find the end of the next batch at the source: up to `rows` rows and `max_bytes`, at least one row.

    With no rows it only holds the position against the source's history.
    """
    found = yield from _reading(schema, link, position, rows, max_bytes)
    newest = found.newest or 0
    missing = 0 if found.first is None else found.first - position.seq - 1
    # An operator vouches for a position by hand, whatever row is there.
    is_other = found.is_there and not found.is_same and position.last_id != BY_HAND
    if is_other or newest < position.seq:
        return Bounds(None, False, "diverged", 0, newest)
    if missing:
        return Bounds(None, False, "gap", missing, newest)
    return Bounds(found.last, bool(found.more), "agrees", 0, newest, found.size)


def bounding_ahead(schema: str, link: int, after: int, *, rows: int, max_bytes: int) -> Operation[Bounds | None]:
    """Find the end of the batch after row `after`, which the target is about to receive; None if there is none.

    Nothing is held against the position yet, which is not known: that is done before the batch is received.
    """
    found = yield from _reading(schema, link, Position(after, None, None, 0), rows, max_bytes)
    if found.first != after + 1:
        return None
    return Bounds(found.last, bool(found.more), "agrees", 0, found.newest or 0, found.size)


def _reading(schema: str, link: int, position: Position, rows: int, max_bytes: int) -> Operation[Any]:
    at = {"seq": position.seq, "last_id": position.last_id, "stamped_at": position.stamped_at}
    [found] = BOUNDS.named((yield BOUNDS.at(schema=schema)(link=link, rows=rows, bytes=max_bytes, **at)))
    return found
