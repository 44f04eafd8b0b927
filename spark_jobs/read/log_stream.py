"""The stream of an inbox that reads a log: a batch is all of the log up to a clock, and its commit moves the positions.

A delivery holds the dispatch lock until it has committed, so a clock of a log is visible only after all smaller ones,
in whatever lanes. One clock therefore says how far all lanes were read, and a batch that is repeated has the same
messages. Lanes that the inbox's workers had read further than others when the stream began are `ahead` of that clock:
the offset names them until it has reached them.

Nothing is deleted. A commit writes receipts, as a worker does: they hold back the segments that the checkpoint needs,
and show how far the stream is. Where to go on is Spark's checkpoint, not they. Two things are noticed by them: a worker
that reads the inbox too, since its positions pass the stream's; and that the inbox was set back, by their epoch.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from pyspark.sql.datasource import InputPartition

from inbox.by_key.claim import PIN
from inbox.by_log.rewind import LANES
from mailroom.errors import ConfigurationError
from mailroom.order import clock
from mailroom.order.clock import MAX_CLOCK
from mailroom.sql.operation import Operation, Row, Sql
from spark_jobs.read.given_out import Given, RangeContent, finding_read, recording, total
from spark_jobs.read.inbox_rows import DIGESTED, IN_ONE, Planned
from spark_jobs.read.log_parts import LaneRange, Segment, finding_segments, gone, gone_upto, parts_of
from spark_jobs.read.offsets import HISTORY, LOGGED, PATIENCE_MS, STREAM_LOCK, BatchEnd, Ends, not_there

log = logging.getLogger("mailroom.spark")

TASKS = 8  # where their number is not given
READER = Sql(
    """
SELECT l.name, l.lanes::bigint, r.epoch, l.drop_unread
FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log WHERE r.name = '{inbox}'
""",
    columns=("text", "bigint", "bigint", "boolean"),
)
POSITIONS = """(
        SELECT l.lane, r.epoch, r.clock FROM {schema}.lanes_{inbox} AS l, LATERAL (
            SELECT r.epoch, r.clock FROM {schema}.receipts_{inbox} AS r
            WHERE r.lane = l.lane ORDER BY r.epoch DESC, r.clock DESC LIMIT 1) AS r) AS at"""
AT = Sql(
    "SELECT at.lane::bigint, at.clock, at.epoch FROM {positions} ORDER BY at.lane",
    columns=("bigint", "bigint", "bigint"),
    positions=POSITIONS,
)

# -- what is there ----------------------------------------------------------------------------------------------------

ENDS = Sql(
    """
SELECT first.clock, extract(epoch FROM clock_timestamp() - first.at)::float8, last.clock
FROM (SELECT clock, at FROM {schema}.log_tick
      WHERE log = '{log}' AND clock > %(above)s::bigint ORDER BY clock LIMIT 1) AS first,
     (SELECT clock FROM {schema}.log_tick
      WHERE log = '{log}' AND clock > %(above)s::bigint ORDER BY clock DESC LIMIT 1) AS last
""",
    columns=("bigint", "float8", "bigint"),
)
# A key that fails, waits or is held has messages of its own, which the log has had already; and nothing of it may be
# given out before them.
STATE = Sql(
    """
SELECT r.paused_at IS NULL, r.epoch, l.drop_unread,
       EXISTS (SELECT FROM {schema}.my_key_state WHERE inbox = '{inbox}')
       OR EXISTS (SELECT FROM {schema}.my_parked WHERE inbox = '{inbox}')
       OR EXISTS (SELECT FROM {schema}.inbox_{inbox}),
       EXISTS (SELECT FROM {positions} WHERE at.clock > greatest(%(start)s::bigint, (
           SELECT a.clock FROM ROWS FROM (pg_catalog.unnest(%(lanes)s::bigint[]),
                                          pg_catalog.unnest(%(clocks)s::bigint[])) AS a (lane, clock)
           WHERE a.lane = at.lane))),
       EXISTS (SELECT FROM {schema}.log_topic WHERE inbox = '{inbox}')
FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log WHERE r.name = '{inbox}'
""",
    columns=("boolean", "bigint", "boolean", "boolean", "boolean", "boolean"),
    positions=POSITIONS,
)
# D-logs-13: An offset of Spark's stream is one clock.
# The delivery with which a batch is full, else the last one. Each has a row that counts its messages, so that no others
# are looked at. `missing`: how many of its messages the batch takes.
STEP = Sql(
    """
SELECT clock, before, rows, %(number)s::bigint - (so_far - rows)
FROM (SELECT clock, rows, (sum(rows) OVER (ORDER BY clock))::bigint AS so_far,
             coalesce(lag(clock) OVER (ORDER BY clock), %(start)s::bigint) AS before
      FROM (SELECT clock, rows FROM {schema}.log_tick
            WHERE log = '{log}' AND clock > %(start)s::bigint AND clock <= %(target)s::bigint
            ORDER BY clock LIMIT %(number)s::bigint) AS t) AS t
WHERE %(number)s::bigint IS NULL OR so_far - rows < %(number)s::bigint
ORDER BY clock DESC LIMIT 1
""",
    columns=("bigint", "bigint", "bigint", "bigint"),
)
IN_LANE = """FROM {schema}.log_{log} AS o
    WHERE o.segment IN ({segments}) AND o.lane = l.lane::smallint"""
NTH = Sql(
    """
SELECT o.clock FROM pg_catalog.unnest(%(lanes)s::bigint[]) AS l (lane), LATERAL (
    SELECT o.clock {in_lane} AND o.clock > %(above)s::bigint AND o.clock <= %(upto)s::bigint) AS o
ORDER BY o.clock OFFSET %(nth)s::bigint - 1 LIMIT 1
""",
    columns=("bigint",),
    in_lane=IN_LANE,
)
MEASURE = Sql(
    """
SELECT l.lane, o.messages, o.digest, o.last
FROM ROWS FROM (pg_catalog.unnest(%(lanes)s::bigint[]),
                pg_catalog.unnest(%(above)s::bigint[])) AS l (lane, above), LATERAL (
    SELECT count(*) AS messages, bit_xor({digested}) AS digest, max(o.clock) AS last {in_lane}
    AND o.clock > l.above AND o.clock <= %(upto)s::bigint) AS o
WHERE o.messages > 0 ORDER BY l.lane
""",
    columns=("bigint", "bigint", "bigint", "bigint"),
    digested=DIGESTED,
    in_lane=IN_LANE,
)
ID = Sql(
    """
SELECT message_id::text FROM {schema}.log_{log}
WHERE segment IN ({segments}) AND lane = %(lane)s::bigint::smallint AND clock = %(clock)s::bigint
""",
    columns=("text",),
)
LAST = Sql("SELECT clock FROM {schema}.log_tick WHERE log = '{log}' ORDER BY clock DESC LIMIT 1", columns=("bigint",))

# -- the commit -------------------------------------------------------------------------------------------------------

# Under the locks of all lanes, in a statement that began after them, as a claim of the inbox does.
MOVE = Sql(
    """
WITH at AS MATERIALIZED (SELECT at.* FROM {positions}),
moved AS (
    INSERT INTO {schema}.receipts_{inbox} (inbox, lane, epoch, clock)
    SELECT '{inbox}', lane, epoch, %(upto)s::bigint FROM at
    WHERE clock < %(upto)s::bigint AND epoch = %(epoch)s::bigint)
SELECT count(*) FROM at WHERE epoch <> %(epoch)s::bigint
""",
    columns=("bigint",),
    positions=POSITIONS,
)


class LogStreamed:
    """An inbox that reads a log, as its stream sees it: see `spark_jobs.read.streamed.Streamed`."""

    def __init__(self, schema: str, inbox: str, name: str, lanes: int, epoch: int, drops: bool) -> None:
        self._names = {"schema": schema, "inbox": inbox}
        self._schema = schema
        self._inbox = inbox
        self._log = name
        self._lanes = lanes
        self._epoch = epoch
        self._drops = drops

    def entering(self, above: int, first: int | None) -> Operation[str]:
        """Nobody takes messages of a log, so none of the batch under way can be missing."""
        for statement in STREAM_LOCK:
            yield statement.at(**self._names, patience=str(PATIENCE_MS))()
        [(history,)] = yield HISTORY.at(schema=self._schema)()
        return f"{self._inbox}@{history}/{self._log}.{self._epoch}"

    def starting(self) -> Operation[BatchEnd]:
        """At the inbox's positions."""
        at = yield AT.at(**self._names)()
        start = min(int(reached) for _, reached, _ in at)
        segments = yield from finding_segments(self._schema, self._log)
        if self._drops and gone_upto(segments) > start:
            start = gone_upto(segments)
            log.warning("stream %s: it begins with the oldest message that log %s has", self._inbox, self._log)
        return BatchEnd(start, ahead=tuple((int(lane), int(reached)) for lane, reached, _ in at if reached > start))

    def demanding_start(self) -> Operation[None]:
        """Nothing is deleted, so the first message that is there says nothing."""
        yield from ()
        raise ConfigurationError(
            f"Spark 4.1 does not tell a source where a batch starts, and inbox {self._inbox!r} reads a log, which "
            "keeps what was read. Stream it with Spark 4.2 or later.",
            code="MR-spark-too-old",
        )

    def comparing(self, place: BatchEnd) -> Operation[None]:
        """Its last message has to be there for as long as its segment is."""
        if not place.batch:
            return  # where the inbox began, which may be a clock of no delivery into the log
        yield PIN.at()()
        segments = yield from finding_segments(self._schema, self._log)
        # What is visible up to there is all that there is: no delivery under way has smaller clocks.
        visible = yield LAST.at(schema=self._schema, log=self._log)()
        if max(segments[-1].first - 1, *(last for (last,) in visible), 0) < place.clock:
            raise not_there(self._inbox, place)
        if place.message_id:
            lane, at, message = place.message_id.split("/")
            there = [str(one.number) for one in segments if one.first <= int(at) <= one.last and not one.is_empty]
            for segment in there:
                found = yield ID.at(schema=self._schema, log=self._log, segments=segment)(lane=int(lane), clock=int(at))
                if found != [(message,)]:
                    raise not_there(self._inbox, place)

    def finding_ends(self, above: int = 0) -> Operation[Ends | None]:
        """By deliveries."""
        yield PIN.at()()
        segments = yield from finding_segments(self._schema, self._log)
        day = segments[-1].first - 1 if self._drops else 0  # see `planning`
        for first, waiting_s, last in (yield ENDS.at(schema=self._schema, log=self._log)(above=above)):
            return Ends(int(first), max(0.0, waiting_s), BatchEnd(max(int(last), day)))
        return Ends(day, 0.0, BatchEnd(day)) if day > above else None

    def finding_lowest(self, above: int) -> Operation[int | None]:
        """What comes after the position of the lane that was read least."""
        if above:
            return None
        at = yield AT.at(**self._names)()
        if any(epoch != self._epoch for _, _, epoch in at):
            raise set_back(self._inbox)
        return min(int(reached) for _, reached, _ in at) + 1

    def planning(self, reached: BatchEnd, number: int | None, target: BatchEnd | None) -> Operation[BatchEnd]:
        """By the deliveries after `reached`."""
        yield PIN.at()()
        [(is_open, epoch, drops, has_apart, is_passed, has_topics)] = yield STATE.at(**self._names)(
            start=reached.clock, lanes=[lane for lane, _ in reached.ahead], clocks=[at for _, at in reached.ahead]
        )
        if epoch != self._epoch:
            raise set_back(self._inbox)
        if has_topics:
            raise ConfigurationError(
                f"Inbox {self._inbox!r} reads some topics of its log only, and a stream reads all of the log. Have the "
                f"inbox read all (mailroom inbox set {self._inbox} --topics '#'), and filter the stream by its column "
                "topic.",
                code="MR-log-inbox-setting",
            )
        if has_apart:
            raise ConfigurationError(
                f"Keys of inbox {self._inbox!r} fail, are parked or paused, and a stream reads the log only, not what "
                "left it for them. Stop it. Replay, discard or resume them (mailroom parked list "
                f"{self._inbox}, mailroom inbox paused {self._inbox}), let a worker handle what waits, and start the "
                "stream again.",
                code="MR-spark-keys-parked",
            )
        if is_passed:
            raise ConfigurationError(
                f"A worker reads inbox {self._inbox!r}: it has read further than the stream, which must have the inbox "
                f"alone. Stop the worker, or make an inbox for the stream (mailroom inbox create NAME --log "
                f"{self._log}).",
                code="MR-spark-inbox-shared",
            )
        limit = MAX_CLOCK if target is None else target.clock
        steps = yield STEP.at(schema=self._schema, log=self._log)(start=reached.clock, number=number, target=limit)
        # After the deliveries, so that it has the segments of all of them.
        segments = yield from finding_segments(self._schema, self._log)
        end = yield from self._reaching(steps, segments)
        # Else a stream without news would seem to have missed what older segments had, once they are gone.
        day = segments[-1].first - 1
        if end is None and drops and reached.clock < day <= limit:
            end = day
        found = [] if end is None else (yield from self._measuring(segments, reached, end))
        # After all was looked at: what is there now was there before.
        if drops and gone_upto((yield from finding_segments(self._schema, self._log))) > reached.clock:
            raise self._gone(reached)
        if end is None or not is_open:
            return reached
        # As for an inbox by key: what a crash of the server undoes is delivered again, with other clocks.
        yield clock.DURABLE.at()()
        yield LOGGED.at()()
        content = total(one for _, one, _ in found)
        message = yield from self._last(segments, found)
        ahead = reached.ahead_of(end)
        return BatchEnd(end, message, reached.batch + 1, content.messages, content.digest, ahead)

    def giving(
        self, checkpoint: str, reached: BatchEnd, end: BatchEnd, lowest: int | None, number: int | None,
        continues: str | None,
    ) -> Operation[list[InputPartition]]:  # fmt: skip
        """By lanes, each in one task."""
        yield PIN.at()()
        segments = yield from finding_segments(self._schema, self._log)
        found = yield from self._measuring(segments, reached, end.clock)
        content = total(one for _, one, _ in found)
        if content.messages < end.messages and gone_upto(segments) > reached.clock:
            raise self._gone(reached)
        # A new checkpoint may begin after what the log has dropped.
        above = reached.clock if reached.batch else min(reached.clock, ((yield from self.finding_lowest(0)) or 1) - 1)
        yield from recording(self._schema, self._inbox, checkpoint, above, end, [content], continues)
        return [*self._ranges(segments, reached, end, checkpoint, found, number)]

    def finding_read(self, checkpoint: str, number: int) -> Operation[list[Given]]:
        """Tasks report the lanes that they have read."""
        return finding_read(self._schema, self._inbox, checkpoint, number, f"int8range(0, {self._lanes})")

    def reaping(self, above: int, upto: int) -> Operation[int | None]:
        """Write receipts. Raises `ConfigurationError` if the inbox was set back."""
        yield LANES.at(**self._names)()
        yield PIN.at()()
        [(others,)] = yield MOVE.at(**self._names)(upto=upto, epoch=self._epoch)
        if others:
            raise set_back(self._inbox)
        return None

    def _reaching(self, steps: Iterable[Row], segments: Sequence[Segment]) -> Operation[int | None]:
        """Return the clock of the last message of a batch; None if there is nothing."""
        for last, before, rows, missing in steps:
            if missing is None or missing >= rows:
                return int(last)
            # A delivery writes into one segment.
            [segment] = [str(one.number) for one in segments if one.first <= last <= one.last]
            nth = yield NTH.at(schema=self._schema, log=self._log, segments=segment)(
                lanes=[*range(self._lanes)], above=before, upto=last, nth=missing
            )
            # Of the first delivery the batch before may have taken some.
            return int(nth[0][0]) if nth else int(last)
        return None

    def _measuring(
        self, segments: Sequence[Segment], reached: BatchEnd, upto: int
    ) -> Operation[list[tuple[int, RangeContent, int]]]:
        """Return what each lane has for a batch, and its last clock; nothing of lanes that have nothing."""
        above = self._above(reached)
        within = {part.segment for part in parts_of(segments, [(0, reached.clock)], upto)}
        if not within:
            return []
        rows = yield MEASURE.at(schema=self._schema, log=self._log, segments=", ".join(map(str, sorted(within))))(
            lanes=[*above], above=[*above.values()], upto=upto
        )
        return [
            (int(lane), RangeContent(int(messages), int(digest)), int(last)) for lane, messages, digest, last in rows
        ]

    def _last(self, segments: Sequence[Segment], found: Iterable[tuple[int, RangeContent, int]]) -> Operation[str]:
        """Name the last message: its lane, clock and id."""
        last, lane = max(((last, lane) for lane, _, last in found), default=(0, 0))
        if not last:
            return ""
        [segment] = [str(one.number) for one in segments if one.first <= last <= one.last]
        [(message,)] = yield ID.at(schema=self._schema, log=self._log, segments=segment)(lane=lane, clock=last)
        return f"{lane}/{last}/{message}"

    def _above(self, reached: BatchEnd) -> dict[int, int]:
        return dict.fromkeys(range(self._lanes), reached.clock) | dict(reached.ahead)

    def _ranges(
        self, segments: Sequence[Segment], reached: BatchEnd, end: BatchEnd, checkpoint: str,
        found: Sequence[tuple[int, RangeContent, int]], number: int | None,
    ) -> Iterator[LaneRange]:  # fmt: skip
        """Cut the lanes into ranges of about as many messages each."""
        above = self._above(reached)
        tasks = number or max(1, min(TASKS, round(end.messages / IN_ONE)))
        before = 0
        shares: list[tuple[int, int, RangeContent]] = []  # the task of each lane
        for lane, content, _ in found:
            shares.append((before * tasks // end.messages, lane, content))
            before += content.messages
        groups = [[*group] for _, group in groupby(shares, key=lambda share: share[0])] or [[]]
        lows = [0, *(group[0][1] for group in groups[1:]), self._lanes]
        for group, (low, high) in zip(groups, pairwise(lows), strict=True):
            content = total(one for _, _, one in group)
            planned = Planned(checkpoint, end.batch, content.messages, content.digest)
            parts = parts_of(segments, [(lane, above[lane]) for _, lane, _ in group], end.clock)
            yield LaneRange(self._log, tuple(parts), low, high, planned=planned)

    def _gone(self, reached: BatchEnd) -> ConfigurationError:
        return gone(
            f"Log {self._log!r} drops what is unread, and has dropped messages after clock {reached.clock}, up to "
            f"which inbox {self._inbox!r} was read: the stream may lack some. To go on with the oldest message that is "
            "left,",
            "name another checkpointLocation and the checkpoint that it continues (option continuesCheckpoint). To "
            f"keep what is unread from now on: mailroom log set {self._log} --keep-unread.",
        )


def finding_log_streamed(schema: str, inbox: str) -> Operation[LogStreamed]:
    """Return an inbox that reads a log, as its stream sees it."""
    [(name, lanes, epoch, drops)] = yield READER.at(schema=schema, inbox=inbox)()
    return LogStreamed(schema, inbox, name, int(lanes), int(epoch), drops=bool(drops))


def is_set_back(before: str, now: str) -> bool:
    """Return whether an inbox has another epoch than a checkpoint, as `LogStreamed.entering` names both."""
    return before.rpartition(".")[0] == now.rpartition(".")[0] != ""


def set_back(inbox: str) -> ConfigurationError:
    """Return the error for an inbox that was set back while a stream reads it."""
    return ConfigurationError(
        f"Inbox {inbox!r} was set back in its log since its stream began, and the checkpoint is of before. To read "
        "from there, name another checkpointLocation and the checkpoint that it continues (option "
        "continuesCheckpoint), and give the sink another path or stream name, since it passes over the batch numbers "
        "that it has seen.",
        code="MR-spark-inbox-set-back",
    )
