"""That the server's clock was set back: noted in the lease of those who find a time too far ahead, told by status."""

from dataclasses import dataclass
from datetime import datetime

from mailroom.sql.operation import Operation, Sql

TOLD_S = 3600.0  # for how long it is told
# From this on it is noted. Those who noted it within a minute found the same one.
LEAST = "interval '1 s'"
NOTED = """set_back_at = clock_timestamp(),
    set_back_by = greatest({by}, CASE WHEN {recent} THEN l.set_back_by END),
    brought_back = {keys} + CASE WHEN {recent} THEN l.brought_back ELSE 0 END"""
RECENT = "l.set_back_at BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp()"
# A time of its own that lies ahead tells of a clock that was set back once more, and which another process notes.
FOUND = """(
    SELECT max(set_back_at) AS at, max(set_back_by) AS by, pg_catalog.sum(brought_back)::bigint AS keys
    FROM {schema}.lease
    WHERE set_back_at BETWEEN clock_timestamp() - %(set_back_s)s::float8 * interval '1 s' AND clock_timestamp()
    HAVING count(*) > 0)"""
SET_BACK = Sql(
    "SELECT s.at, extract(epoch FROM s.by)::float8, s.keys FROM {found} AS s",
    columns=("timestamptz", "float8", "bigint"),
    found=FOUND,
)


def noting(by: str, keys: str) -> str:
    """Return what an UPDATE of a lease `l` sets, to note a clock that was set back by `by`, and keys brought back."""
    return NOTED.format(by=by, keys=keys, recent=RECENT)


@dataclass(frozen=True, slots=True)
class ClockSetBack:
    """The server's clock was set back by about `by_s` seconds, which was noticed at `at`.

    `keys` counts the keys that would have waited for as long, and were brought back to their backoff.
    """

    at: datetime
    by_s: float
    keys: int


def reading_set_back(schema: str) -> Operation[ClockSetBack | None]:
    """Return by how much the clock was set back within the last hour, None if it was not."""
    rows = yield SET_BACK.at(schema=schema)(set_back_s=TOLD_S)
    return ClockSetBack(*rows[0]) if rows else None
