"""Ranges of keys: deleted in steps, each a transaction; how far they are is kept in the database."""

from dataclasses import dataclass

from dispatcher.executor.fold import Taken
from dispatcher.executor.target import Target
from mailroom.sql.operation import Operation, Sql

ROWS = 10_000  # keys that one transaction deletes


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a range is: the last key deleted, and how many."""

    reached: str | None = None
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a range: where it got to, and whether that is the end."""

    progress: Progress
    is_done: bool


# By an array: with a join the planner may walk the whole table. The highest key is the last of the order, for not every
# type of key has a max().
DELETE = Sql(
    """
WITH doomed AS MATERIALIZED (
    SELECT t.{key} AS key FROM {target} AS t WHERE true {bounds} ORDER BY t.{key} LIMIT %(rows)s::bigint {locked}),
gone AS (
    DELETE FROM {target} WHERE {key} = ANY(ARRAY(SELECT key FROM doomed)) RETURNING 1)
SELECT count(*), (SELECT count(*) FROM doomed), (SELECT key::text FROM doomed ORDER BY doomed.key DESC LIMIT 1)
FROM gone
""",
    columns=("bigint", "bigint", "text"),
)


def deleting(schema: str, target: Target, taken: Taken, progress: Progress) -> Operation[Step]:
    """Delete the next keys of the range. Raises `Refused` for bounds that the target cannot have as keys."""
    limit = ROWS if taken.row_limit is None else min(ROWS, taken.row_limit - progress.deleted)
    bounds = {"start": target.key_of(taken.key) if taken.key else None, "reached": progress.reached}
    bounds["end"] = None if taken.end_key is None else target.key_of(taken.end_key)
    comparisons = {"start": ">=", "reached": ">", "end": "<"}
    conditions = "".join(
        f" AND t.{target.key} {comparisons[name]} %({name})s::text::{target.key_type}"
        for name, key in bounds.items()
        if key is not None
    )
    statement = DELETE.at(**target.names(schema), bounds=conditions)
    given = {name: key for name, key in bounds.items() if key is not None}
    [(deleted, looked_at, reached)] = yield statement(**given, rows=limit)
    total = progress.deleted + deleted
    # Not by what was deleted: a trigger of the table may keep some, and behind those there are others.
    return Step(Progress(reached, total), looked_at < limit or total == taken.row_limit)


FIND = Sql(
    "SELECT reached, deleted FROM {schema}.executable_cursor WHERE position = %(position)s::bigint",
    columns=("text", "bigint"),
)
NOTE = Sql(
    """
INSERT INTO {schema}.executable_cursor (position, reached, deleted)
VALUES (%(position)s::bigint, %(reached)s::text, %(deleted)s::bigint)
ON CONFLICT (position) DO UPDATE SET reached = excluded.reached, deleted = excluded.deleted
"""
)
FORGET = Sql("DELETE FROM {schema}.executable_cursor WHERE position = %(position)s::bigint")


def finding_progress(schema: str, position: int) -> Operation[Progress]:
    """Return how far the range is that stands at a position of the outbox."""
    rows = yield FIND.at(schema=schema)(position=position)
    return Progress(*rows[0]) if rows else Progress()


def noting_progress(schema: str, position: int, progress: Progress) -> Operation[None]:
    """Note how far the range is, in the transaction of the step."""
    yield NOTE.at(schema=schema)(position=position, reached=progress.reached, deleted=progress.deleted)


def forgetting_progress(schema: str, position: int) -> Operation[None]:
    """The range is done."""
    yield FORGET.at(schema=schema)(position=position)
