"""Deletes ranges of keys in steps, one transaction each. The table `executable_cursor` holds the progress."""

from dataclasses import dataclass

from dispatcher.executor.batch.fold import Taken
from dispatcher.executor.targets.target import Target
from mailroom.sql.operation import Operation, Sql

# D-execute-8: A range has transactions of its own.
RANGE_ROWS = 10_000  # keys that one transaction deletes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a range: the last key reached, and how many were deleted."""

    reached: str | None = None
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one step: the progress, and whether the range is done."""

    progress: Progress
    is_done: bool


# The array matters: with a join the planner may scan the whole table. ORDER BY ... DESC gives the highest key, since
# not every key type has a max().
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
    """Delete the next keys of the range. Raises `OperationRefused` if a bound is not a valid key of the target."""
    limit = RANGE_ROWS if taken.row_limit is None else min(RANGE_ROWS, taken.row_limit - progress.deleted)
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
    [(deleted, found, reached)] = yield statement(**given, rows=limit)
    total = progress.deleted + deleted
    # Not by the number deleted: a trigger may keep some rows, and others may follow them.
    return Step(Progress(reached, total), found < limit or total == taken.row_limit)


FIND = Sql(
    "SELECT reached, deleted FROM {schema}.executable_cursor WHERE position = %(position)s::bigint",
    columns=("text", "bigint"),
)
SAVE = Sql(
    """
INSERT INTO {schema}.executable_cursor (position, reached, deleted)
VALUES (%(position)s::bigint, %(reached)s::text, %(deleted)s::bigint)
ON CONFLICT (position) DO UPDATE SET reached = excluded.reached, deleted = excluded.deleted
"""
)
DELETE_CURSOR = Sql("DELETE FROM {schema}.executable_cursor WHERE position = %(position)s::bigint")


def finding_progress(schema: str, position: int) -> Operation[Progress]:
    """Return the progress of the range at this position of the outbox."""
    rows = yield FIND.at(schema=schema)(position=position)
    return Progress(*rows[0]) if rows else Progress()


def saving_progress(schema: str, position: int, progress: Progress) -> Operation[None]:
    """Save the progress of the range, in the transaction of the step."""
    yield SAVE.at(schema=schema)(position=position, reached=progress.reached, deleted=progress.deleted)


def deleting_progress(schema: str, position: int) -> Operation[None]:
    """Delete the progress of a range that is done."""
    yield DELETE_CURSOR.at(schema=schema)(position=position)
