"""The start of a node: it finds out what a crash or a restore may have taken away, before it gives out the first clock.

What others have received may be missing here, and so may the clocks that were given out for it. The node's place tells:
if it is not where and when it was noted, the clock jumps beyond all that a lost tail of history can have used, and each
link is in doubt until its reader has found its own position here. That holds for a node without links too, since it may
have had some in the lost time. No other node is asked, so a node starts while its readers are away.

Rows may have been copied there without their sequences (`mailroom.order.sequences`), so these are looked at, too; and
without the row of `node`, which says how far the clock was: then the rows say it.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from mailroom.links.handshake.identity import Place, jumped, start
from mailroom.links.handshake.place import finding_place, reading_place
from mailroom.order.clock import DISPATCH_LOCK, DURABLE, recovering_clock
from mailroom.order.sequences import Numbers, raising_sequences
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

# The lost time may have had starts of its own, with a jump each from where this start jumps too: so it is with a backup
# from before the last restart. So the clock also goes to a number that grows by more clocks per second than a node
# gives out. Where the server's time is wrong, this does nothing, or nothing that harms.
# D-links-7: A jump also goes to at least 2^24 per second since 2026.
PER_SECOND = 2**24
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
LAST = timedelta(days=500 * 365)

NOTED = Sql(
    """
SELECT n.system_id, n.database_oid, n.timeline, n.started_at, n.life, n.clock_ceiling, c.last_value,
       EXISTS (SELECT FROM {schema}.link) OR EXISTS (SELECT FROM {schema}.origin)
FROM {schema}.node AS n, {schema}.clock AS c
""",
    columns=("bigint", "bigint", "bigint", "timestamptz", "uuid", "bigint", "bigint", "boolean"),
)
# What a node without its row was brought with, which knew how far its clock was. It is looked for once in a life.
BROUGHT = Sql("SELECT {schema}.clock_of_rows()", columns=("bigint",))
JUMP = Sql(
    """
WITH noted AS (
    UPDATE {schema}.node
    SET clock_ceiling = %(clock)s::bigint, life = gen_random_uuid(), system_id = %(system_id)s::bigint,
        database_oid = %(database_oid)s::bigint, timeline = %(timeline)s::bigint,
        started_at = %(started_at)s::timestamptz
    RETURNING clock_ceiling)
SELECT setval('{schema}.clock'::regclass, clock_ceiling) FROM noted
""",
    columns=("bigint",),
)


@dataclass(frozen=True, slots=True)
class NodeHome:
    """A node's place as it was `noted` (None if never) and as it is `found`, and its `life`."""

    noted: Place | None
    found: Place
    life: UUID

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is in another database or server than noted: no reader is let in before an operator says why."""
        return self.noted is not None and not self.found.is_where(self.noted)


@dataclass(frozen=True, slots=True)
class Started:
    """The clock after a start, whether it jumped, whether the node was moved or is a copy, and what was `raised`."""

    clock: int
    jumped: bool = False
    moved: bool = False
    raised: tuple[Numbers, ...] = ()


@dataclass(frozen=True, slots=True)
class _Noted:
    place: Place | None
    life: UUID
    ceiling: int
    clock: int
    is_linked: bool

    @property
    def is_unused(self) -> bool:
        """Whether it has never given out a clock."""
        return not self.ceiling and not self.clock

    def finding(self) -> Operation[Place]:
        """Return where it is."""
        return (yield from (reading_place() if self.is_linked else finding_place()))


def _reading(schema: str) -> Operation[_Noted]:
    *place, life, ceiling, clock, is_linked = the_one((yield NOTED.at(schema=schema)()), NODE_ROW, schema)
    return _Noted(Place(*place) if None not in place else None, life, ceiling, clock, is_linked)


def reading_home(schema: str) -> Operation[NodeHome]:
    """Return where the node was noted, and where it is, as links need it (see `reading_place`)."""
    noted = yield from _reading(schema)
    return NodeHome(noted.place, (yield from reading_place()), noted.life)


def starting(schema: str) -> Operation[Started]:
    """Prepare the node's clock, in a READ COMMITTED transaction of its own, before a session gives out its first one.

    At the place noted, the clock becomes the largest that may have been given out. Else it jumps, as it does beyond
    rows that were there before its first clock, and the node gets a new life; that is durable once the transaction
    commits. While a node with links is in another database or server than noted, it jumps at each start: of two
    databases of one server, nothing else tells the starts apart. Sequences that are behind their rows are raised, at
    whatever place. Raises `ClockOverflow` if there are no clocks left.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    noted = yield from _reading(schema)
    started = yield from _starting(schema, noted, (yield from noted.finding()))
    return replace(started, raised=tuple((yield from raising_sequences(schema))))


def _starting(schema: str, noted: _Noted, found: Place) -> Operation[Started]:
    decided = start(noted.place, found, is_linked=noted.is_linked)
    brought = 0
    if noted.is_unused:
        [(brought,)] = yield BROUGHT.at(schema=schema)()
        noted = replace(noted, clock=brought)
    if not (decided.jumps or decided.moved or brought):
        return Started((yield from recovering_clock(schema)))
    if noted.place is None and noted.is_unused:  # it is unknown where it has been, but nothing can be lost
        yield from _noting(schema, decided.note)
        return Started((yield from recovering_clock(schema)))
    clock = yield from _jumping(schema, noted, decided.note)
    return Started(clock, jumped=True, moved=decided.moved)


def jumping(schema: str, *, is_here: bool) -> Operation[int]:
    """Let the clock jump and give the node a new life, whatever is noted; return the clock.

    `is_here` notes the database and server too, so that readers are let in; otherwise they stay as noted.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    noted = yield from _reading(schema)
    found = yield from noted.finding()
    return (yield from _jumping(schema, noted, found if is_here else start(noted.place, found).note))


def by_time(started_at: datetime) -> int:
    """Return the lowest clock of a node whose server was started then and may have lost history."""
    since = min(max(started_at - EPOCH, timedelta(0)), LAST)
    return since // timedelta(microseconds=1) * PER_SECOND // 1_000_000


def _jumping(schema: str, noted: _Noted, note: Place) -> Operation[int]:
    yield DURABLE.at()()
    [(clock,)] = yield JUMP.at(schema=schema)(
        clock=max(jumped(noted.clock, noted.ceiling), by_time(note.started_at)),
        system_id=note.system_id,
        database_oid=note.database_oid,
        timeline=note.timeline,
        started_at=note.started_at,
    )
    return int(clock)


NOTE = Sql(
    """
UPDATE {schema}.node
SET system_id = %(system_id)s::bigint, database_oid = %(database_oid)s::bigint, timeline = %(timeline)s::bigint,
    started_at = %(started_at)s::timestamptz
"""
)


def _noting(schema: str, place: Place) -> Operation[None]:
    yield NOTE.at(schema=schema)(
        system_id=place.system_id,
        database_oid=place.database_oid,
        timeline=place.timeline,
        started_at=place.started_at,
    )


def noting_place(schema: str) -> Operation[None]:
    """Before the first link or origin is inserted, note where the node is; if it has one, do nothing.

    What the node has lost before then is unknown to the link. So if it is not where it was noted, its clock jumps now,
    as at the next start.
    """
    noted = yield from _reading(schema)
    found = yield from reading_place()
    if not noted.is_linked and noted.place != found:
        yield DISPATCH_LOCK.at(schema=schema)()  # deliveries wait for it, so only then
        yield from _starting(schema, (yield from _reading(schema)), found)
