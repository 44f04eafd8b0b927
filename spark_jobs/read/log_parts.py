"""The parts of a log that tasks of Spark read: lanes, segment by segment."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from mailroom.errors import ConfigurationError
from mailroom.order.clock import MAX_CLOCK
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from spark_jobs.node import Node
from spark_jobs.read.inbox_rows import ALL, Chosen, PagePlace, Planned, Range, Read, demand_all, pages, reporting
from spark_jobs.read.numbers import taking_number
from spark_jobs.seen import Seen


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a log, and the clocks of what was delivered into it. `is_empty`: its messages are gone."""

    number: int
    first: int
    is_empty: bool
    opened_at: datetime
    last: int = MAX_CLOCK


@dataclass(frozen=True, slots=True)
class Part:
    """Messages of one lane in one segment: those above `above`, up to `upto`."""

    segment: int
    lane: int
    above: int
    upto: int


@dataclass(frozen=True)
class LaneRange(InputPartition):
    """What one task reads of a log: some parts, one after the other.

    `low` and `high`: in a stream, they are all that the batch has of the lanes from `low` on, and before `high`. `seen`
    and `planned` as for `Range`.
    """

    log: str
    parts: tuple[Part, ...] = ()
    low: int = 0
    high: int = 0
    seen: Seen | None = None
    planned: Planned | None = None


SEGMENTS = Sql(
    """
SELECT segment, first_clock, emptied_at IS NOT NULL, opened_at FROM {schema}.log_segment
WHERE log = '{log}' ORDER BY segment
""",
    columns=("bigint", "bigint", "boolean", "timestamptz"),
)


def finding_segments(schema: str, log: str) -> Operation[list[Segment]]:
    """Return the segments of a log, the oldest first; none if there is no such log."""
    rows = yield SEGMENTS.at(schema=schema, log=log)()
    firsts = [first for _, first, _, _ in rows[1:]]
    return [
        Segment(number, first, is_empty, opened_at, after - 1)
        for (number, first, is_empty, opened_at), after in zip(rows, [*firsts, MAX_CLOCK + 1], strict=True)
    ]


def gone_upto(segments: Iterable[Segment]) -> int:
    """Return up to which clock a log has lost messages that were old."""
    first = next(one for one in segments if not one.is_empty).first
    return max([first - 1, *(one.last for one in segments if one.is_empty)])


def parts_of(segments: Sequence[Segment], lanes: Iterable[tuple[int, int]], upto: int) -> list[Part]:
    """Return the parts with the messages of some lanes, each above a clock, up to another; lane by lane, in order."""
    return [
        Part(one.number, lane, max(above, one.first - 1), min(upto, one.last))
        for lane, above in lanes
        for one in segments
        if not one.is_empty and one.first <= upto and one.last > above
    ]


THERE = Sql(
    """
SELECT count(*) FROM {schema}.log_segment WHERE segment = ANY (%(segments)s::bigint[]) AND emptied_at IS NULL
""",
    columns=("bigint",),
)


def demanding_there(schema: str, log: str, segments: set[int]) -> Operation[None]:
    """Raise `ConfigurationError` unless all of these segments, which were read, have what they had."""
    [(there,)] = yield THERE.at(schema=schema)(segments=sorted(segments))
    if there < len(segments):
        raise gone(
            f"Messages of log {log!r} went while they were read, since they are older than it keeps them.",
            f"Read what is newer, or have the log keep more days: mailroom log set {log} --keep-days DAYS.",
        )


def gone(what: str, way_on: str) -> ConfigurationError:
    """Return the error for messages that a log does not have any more."""
    return ConfigurationError(f"{what} {way_on}", code="MR-log-messages-gone")


def lane_batches(
    node: Node, reader: str, wanted: LaneRange, chosen: Chosen = ALL, number: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Read a task's parts over a connection of its own, as `batches` does; `reader` is the inbox, or the log itself.

    Raises `ConfigurationError` if messages went meanwhile, and in a stream as `batches` does.
    """
    with replace(node, seen=wanted.seen or node.seen).connect(f"read {reader}", autocommit=True) as connection:
        planned, read = wanted.planned, Read()
        if planned is not None and number is not None:
            with connection.transaction():
                run(connection, taking_number(node.schema, reader, planned.checkpoint, planned.batch, number))
        connection.read_only = True
        for part in wanted.parts:
            place = PagePlace({"log": wanted.log, "segment": str(part.segment)}, part.lane)
            yield from pages(connection, node.schema, place, part, chosen, read, digested=planned is not None)
        # After all was read: what is there now was there before.
        with connection.transaction():
            run(connection, demanding_there(node.schema, wanted.log, {part.segment for part in wanted.parts}))
        if planned is not None:
            demand_all(reader, planned, read)
            connection.read_only = False
            with connection.transaction():
                run(connection, reporting(node.schema, reader, Range(wanted.low - 1, wanted.high - 1), planned))
