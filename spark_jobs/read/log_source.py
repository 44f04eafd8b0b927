"""`spark.read` of a log: all that it has of a range of times or clocks, whatever its inboxes have read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from inbox.by_key.claim import PIN
from mailroom.errors import ConfigurationError
from mailroom.logs.readers import placing
from mailroom.order.clock import MAX_CLOCK
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from spark_jobs.node import Node
from spark_jobs.read.deliveries import awaiting_delivery
from spark_jobs.read.inbox_rows import IN_ONE, Chosen
from spark_jobs.read.log_parts import LaneRange, Part, finding_segments, gone, gone_upto, lane_batches, parts_of

TASKS = 8  # where their number is not given
LOG = Sql(
    """
SELECT lanes::bigint, {schema}.lane_of(%(key)s::text, lanes)::bigint,
       created_at, (SELECT clock FROM {schema}.log_tick WHERE log = '{log}' ORDER BY clock DESC LIMIT 1)
FROM {schema}.log_registry WHERE name = '{log}'
""",
    columns=("bigint", "bigint", "timestamptz", "bigint"),
)
ROWS = Sql(
    """
SELECT s.segment, (SELECT coalesce(sum(t.rows), 0::numeric)::bigint FROM {schema}.log_tick AS t
                   WHERE t.log = '{log}' AND t.clock > s.above AND t.clock <= s.upto)
FROM ROWS FROM (pg_catalog.unnest(%(segments)s::bigint[]), pg_catalog.unnest(%(above)s::bigint[]),
                pg_catalog.unnest(%(upto)s::bigint[])) AS s (segment, above, upto)
""",
    columns=("bigint", "bigint"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """Which messages of a log are wanted: delivered at `since` or later, before `until`, and between clocks.

    What was delivered together belongs to one time, so that spans that follow one another have each message once.
    """

    since: datetime | None = None
    until: datetime | None = None
    above: int = 0
    upto: int = MAX_CLOCK


def spanning(schema: str, log: str, span: Span, key: str | None) -> Operation[tuple[list[Part], int]]:
    """Return the parts of a log that have what is wanted, and about how many messages that are.

    Raises `ConfigurationError` if there is no such log, or it does not have all of what is wanted any more.
    """
    if span.since is not None or span.until is not None:
        # A delivery under way may have a time that is over.
        yield from awaiting_delivery(schema)
    found = yield LOG.at(schema=schema, log=log)(key=key or "")
    if not found:
        raise ConfigurationError(
            f"There is no log {log!r}. `mailroom log list` shows those that there are.", code="MR-unknown-log"
        )
    [(lanes, lane, created_at, last)] = found
    above, upto = span.above, min(span.upto, last or 0)
    is_short = False
    if span.since is not None:
        place = yield from placing(schema, log, span.since)
        above, is_short = max(above, place.clock), place.is_short
    if span.until is not None:
        upto = min(upto, (yield from placing(schema, log, span.until)).clock)
    yield PIN.at()()
    segments = yield from finding_segments(schema, log)
    oldest = next(one for one in segments if not one.is_empty)
    # A log has a new segment a day: one that is not so much younger than the log was made with it.
    is_whole = oldest is segments[0] and oldest.opened_at < created_at + timedelta(days=1)
    begin = 0 if is_whole else gone_upto(segments)
    if not is_whole and (is_short or 0 < span.above < begin or (span.since is not None and above < begin)):
        raise gone(
            f"Log {log!r} has everything since {oldest.opened_at.isoformat(timespec='seconds')}, and has dropped "
            "messages of what is to be read, which is older.",
            "Read from there on, or without since and clockAbove all that it has. To keep more from now on: mailroom "
            f"log set {log} --keep-days DAYS.",
        )
    wanted = range(int(lanes)) if key is None else [int(lane)]
    parts = parts_of(segments, [(one, max(above, begin)) for one in wanted], upto)
    first = [part for part in parts if part.lane == wanted[0]]
    rows = yield ROWS.at(schema=schema, log=log)(
        segments=[part.segment for part in first], above=[part.above for part in first],
        upto=[part.upto for part in first],
    )  # fmt: skip
    return parts, sum(int(count) for _, count in rows)


def shared(parts: Sequence[Part], tasks: int) -> list[tuple[Part, ...]]:
    """Share parts out, which follow one another, among at most so many tasks."""
    numbered = ((nth * tasks // len(parts), part) for nth, part in enumerate(parts))
    return [tuple(part for _, part in group) for _, group in groupby(numbered, key=lambda each: each[0])]


class LogReader(DataSourceReader):
    """Reads a log without locks. It reads nothing twice, and nothing that was delivered after the plan."""

    def __init__(self, node: Node, log: str, partitions: int | None, span: Span, chosen: Chosen) -> None:
        self._node = node
        self._log = log
        self._number = partitions
        self._span = span
        self._chosen = chosen

    def partitions(self) -> list[LaneRange]:
        """Find the clocks of the times, and cut the log by lanes and segments. Raises `ConfigurationError`."""
        with self._node.connect(f"read {self._log}") as connection:
            parts, messages = run(connection, spanning(self._node.schema, self._log, self._span, self._chosen.key))
            connection.rollback()
            seen = self._node.pinned(connection).seen
        tasks = self._number or max(1, min(TASKS, round(messages / IN_ONE)))
        return [LaneRange(self._log, some, seen=seen) for some in shared(parts, tasks)] or [LaneRange(self._log)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of some parts."""
        wanted = cast(LaneRange, partition)
        return lane_batches(self._node, self._log, wanted, self._chosen) if wanted.parts else iter(())
