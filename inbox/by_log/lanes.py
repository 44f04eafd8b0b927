"""Which lanes a claim takes: those with news that nobody reads, by locks on their rows; and which segments it reads."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from inbox.by_key.claim import DUE_IN_S, UNPINNED
from mailroom.registry.log_topics import HAS_TOPICS
from mailroom.sql.operation import Operation, Sql

log = logging.getLogger("mailroom.inbox")

TICKS = 1_000  # deliveries that a claim looks through; after more of them every lane may have news
SEGMENTS = 8  # that one claim reads, and so locks
DEEP = 1_000  # messages of one lane
SPARSE = 100  # messages that a claim looks through for each that it may take

# The lanes are tried from `first` on, so that workers begin with different ones. A lane that another transaction has
# locked is left out. `was_lost`: the last transaction that had one of these lanes was not committed, so its worker may
# have died (`inbox.by_key.claim`). `level`: a claim that could not see what the last holder of a lane has done would
# hand out messages twice.
# D-logs-3: Lanes are locked in one statement, and read in the next.
LOCK = Sql(
    """
WITH bound AS MATERIALIZED (
    SELECT paused_at IS NULL AS is_open, log, epoch, s.segment, s.first_clock
    FROM {schema}.inbox_registry LEFT JOIN LATERAL (
        SELECT segment, first_clock FROM {schema}.log_segment
        WHERE log = '{log}' ORDER BY segment DESC LIMIT 1) AS s ON true
    WHERE name = '{inbox}'),
tick AS MATERIALIZED (
    SELECT clock, lanes FROM {schema}.log_tick
    WHERE log = '{log}' AND clock > %(seen)s::bigint ORDER BY clock LIMIT {ticks}),
news AS MATERIALIZED (
    SELECT DISTINCT lane FROM tick, LATERAL pg_catalog.unnest(lanes) AS lane),
mine AS MATERIALIZED (
    SELECT l.lane, l.holder FROM (
        SELECT lane FROM (SELECT lane FROM pg_catalog.unnest(%(lanes)s::bigint[]) AS lane
                          UNION SELECT lane FROM news) AS either
        WHERE (SELECT is_open AND log = '{log}' FROM bound) AND lane <> ALL (%(but)s::bigint[])
          AND current_setting('transaction_isolation') = 'read committed'
        ORDER BY (lane < %(first)s::bigint), lane OFFSET 0) AS wanted, LATERAL (
        SELECT lane, xmax::text::bigint AS holder FROM {schema}.lanes_{inbox} AS l
        WHERE l.lane = wanted.lane::smallint FOR UPDATE SKIP LOCKED) AS l
    LIMIT %(most)s::bigint)
SELECT ARRAY(SELECT lane::bigint FROM mine), ARRAY(SELECT lane::bigint FROM news),
       coalesce((SELECT max(clock) FROM tick), %(seen)s::bigint), (SELECT count(*) = {ticks} FROM tick),
       (SELECT max(clock) FROM {schema}.log_tick WHERE log = '{log}'),
       EXISTS (SELECT FROM mine, LATERAL (SELECT pg_current_xact_id()::text::bigint) AS x (now)
               WHERE holder <> 0 AND pg_xact_status(({full_xact})::text::xid8) IS DISTINCT FROM 'committed'
                 AND {full_xact} <> now),
       CASE WHEN EXISTS (SELECT FROM mine) THEN pg_current_xact_id()::text::bigint END,
       current_setting('transaction_isolation'), log = '{log}', epoch, segment, first_clock,
       CASE WHEN is_open THEN {due_in_s} END,
       CASE WHEN NOT EXISTS (SELECT FROM mine) THEN {unpinned} END, {has_topics}
FROM bound
""",
    columns={
        "mine": "bigint[]", "news": "bigint[]", "seen": "bigint", "is_full": "boolean", "last": "bigint",
        "was_lost": "boolean", "xact": "bigint", "level": "text", "is_same": "boolean",
        "epoch": "bigint", "newest": "bigint",
        "newest_first": "bigint", "due_in_s": "float8", "is_unpinned": "boolean", "has_topics": "boolean",
    },
    ticks=TICKS,
    # The newest or next one around this transaction whose lower half is the holder: it may have begun later than this.
    full_xact="now + 2147483648::bigint - ((now + 2147483648::bigint - holder) & 4294967295)",
    due_in_s=DUE_IN_S,
    unpinned=UNPINNED,
    has_topics=HAS_TOPICS,
)  # fmt: skip
# From the one in which this clock lies; the clock of the first after them is where they end. The oldest one begins at
# 0: what was before it is gone.
# D-logs-6: The segments that a claim reads stand in its text.
COVERING = Sql(
    """
SELECT segment, CASE WHEN NOT EXISTS (
           SELECT FROM {schema}.log_segment AS o
           WHERE o.log = '{log}' AND o.emptied_at IS NULL AND o.segment < s.segment)
       THEN 0 ELSE first_clock END
FROM {schema}.log_segment AS s
WHERE log = '{log}' AND emptied_at IS NULL AND segment >= coalesce((
    SELECT segment FROM {schema}.log_segment
    WHERE log = '{log}' AND first_clock <= %(clock)s::bigint + 1 ORDER BY segment DESC LIMIT 1), 0)
ORDER BY segment LIMIT {segments}
""",
    columns=("bigint", "bigint"),
    segments=SEGMENTS + 1,
)


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Segments, one after the other, with all messages from the clock `first` on, and before `end` if there is one."""

    segments: tuple[int, ...] = ()
    first: int = 0
    end: int | None = None


def covering(schema: str, log: str, clock: int) -> Operation[SegmentRange]:
    """Return the segments in which the messages after this clock are, up to so many; the first are the oldest there."""
    found = yield COVERING.at(schema=schema, log=log)(clock=clock)
    if not found:
        return SegmentRange()
    end = found[SEGMENTS][1] if len(found) > SEGMENTS else None
    return SegmentRange(tuple(segment for segment, _ in found[:SEGMENTS]), found[0][1], end)


LOST = Sql(
    """
SELECT lost, lost_since, lost_to FROM {schema}.inbox_registry
WHERE name = '{inbox}' AND lost_to > greatest(%(clock)s::bigint, %(told)s::bigint)
  AND lost_at > now() - interval '7 days'
""",
    columns=("bigint", "timestamptz", "bigint"),
)


def telling_lost(names: dict[str, str], clock: int, known: "Lanes") -> Operation["Lanes"]:
    """Log that messages after `clock` were dropped before this inbox had read them; return that it is known."""
    rows = yield LOST.at(schema=names["schema"], inbox=names["inbox"])(clock=clock, told=known.told_to)
    for lost, since, told in rows:
        log.warning(
            "inbox %s: log %s has dropped %d messages that were not read, since %s; it goes on with the oldest that "
            "is there", names["inbox"], names["log"], lost, since.isoformat(" ", "seconds"),
            extra={"inbox": names["inbox"]},
        )  # fmt: skip
        known = replace(known, told_to=told)
    return known


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a program knows of the lanes of its inbox: which may have messages, and where.

    `dirty` are the lanes that may have messages. `given` are those of which the transaction `xact` took messages: it
    may have been rolled back, so they count as dirty until a later one has read them. `is_counted`: they are among the
    dirty ones already, since this is not the first step of a claim. `seen` is the last tick, and
    `depth` how many messages a lane seems to have. `sparse`: one in so many messages seems to be wanted.
    """

    seen: int = -1
    epoch: int = -1
    newest: int = -1
    dirty: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    xact: int | None = None
    is_counted: bool = False
    first: int = 0
    depth: float = 1.0
    sparse: float = 1.0
    range: SegmentRange = field(default_factory=SegmentRange)
    has_apart: bool = True  # the inbox's own table may have messages, or keys may fail
    avoided: frozenset[int] = frozenset()  # until the death of the worker that had them is counted
    aside: frozenset[int] = frozenset()  # read to the end of `range`, which other lanes are not
    told_to: int = 0  # up to this clock it was logged that messages were dropped unread

    def wanted(self) -> list[int]:
        """The lanes to try.

        Where many days are unread, few lanes may have most of it. The others wait at the end of the range for them, and
        take no part of the batches. Once all are there, or nobody else can be locked, all are tried.
        """
        dirty = self._dirty()
        return sorted(dirty - self.aside or dirty)

    def within(self, segments: SegmentRange) -> "Lanes":
        """Return what is known when other segments are read."""
        return replace(self, range=segments, aside=frozenset())

    def _dirty(self) -> frozenset[int]:
        return self.dirty if self.is_counted else self.dirty | self.given

    # D-logs-7: How many lanes a claim locks follows from how deep they are.
    def most(self, lanes: int, rows: int) -> int:
        """How many of the lanes are read in one claim of so many messages."""
        return max(1, min(lanes, rows, round(rows / self.depth)))

    def told(self, news: Iterable[int], seen: int) -> "Lanes":
        """Return what is known after ticks up to `seen` that named these lanes."""
        return replace(self, dirty=self.dirty | frozenset(news), seen=seen)

    def read(self, lock: Any, end: Any, per_lane: int, wanted: int) -> "Lanes":
        """Return what is known after a claim that took up to `per_lane` messages of each lane that it had locked.

        `wanted` are those of the messages that it read which its inbox wants.
        """
        mine, left = frozenset(lock.mine), frozenset(end.left)
        if self.range.end is not None or end.elsewhere is not None:
            left = mine
        depth = 2 * max(self.depth, per_lane) if 2 * len(end.left) > len(mine) else wanted / len(mine)
        sparse = end.rows / wanted if wanted else 4 * self.sparse if end.rows else self.sparse
        return replace(
            self,
            dirty=(self._dirty() - mine) | left,
            is_counted=True,
            given=frozenset(end.taken) | (self.given if lock.xact == self.xact else frozenset()),
            xact=lock.xact,
            first=lock.mine[-1] + 1,
            depth=max(1.0, min(depth, DEEP)),
            sparse=min(sparse, SPARSE),
            has_apart=end.has_apart,
            aside=frozenset() if self.range.end is None else self.aside | (mine - frozenset(end.left)),
        )
