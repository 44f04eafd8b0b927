"""Bridges into a node: origins of which a broker is the source."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID, uuid5

from mailroom.bridges.settings import InSettings, with_given
from mailroom.bridges.source import BrokerPosition
from mailroom.errors import ConfigurationError, MailroomError, UnknownBridge
from mailroom.links.start import noting_place
from mailroom.order import clock
from mailroom.order.clock import DURABLE
from mailroom.order.total import R_IS_BOUNDED
from mailroom.schema import acts
from mailroom.schema.audit import auditing, differences
from mailroom.schema.node import beginning_act
from mailroom.schema.otherwise import check_same
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import node_name

TAKEN = Sql(
    """
SELECT b.settings::text FROM {schema}.origin AS o LEFT JOIN {schema}.bridge_in AS b ON b.origin = o.number
WHERE o.name = %(name)s::text
UNION ALL SELECT NULL FROM {schema}.link AS l JOIN {schema}.bridge_out AS b ON b.link = l.number
WHERE l.name = %(name)s::text
""",
    columns=("text",),
)
# An inbox in total order waits until each origin has shown a clock, and a broker shows none.
WAITS_FOR_EVER = Sql(
    """
SELECT s.inbox FROM {schema}.subscription AS s JOIN {schema}.inbox_registry AS r ON r.name = s.inbox
WHERE {is_bounded} AND s.origin IN (%(name)s::text, '*') ORDER BY s.inbox LIMIT 1
""",
    columns=("text",),
    is_bounded=R_IS_BOUNDED,
)
ADD = Sql(
    """
WITH made AS (
    INSERT INTO {schema}.origin (name, id, keep_s) VALUES (%(name)s::text, gen_random_uuid(), 0) RETURNING number)
INSERT INTO {schema}.bridge_in (origin, settings) SELECT number, %(settings)s::text::jsonb FROM made
"""
)
HOLD = Sql(
    """
SELECT b.settings::text FROM {schema}.bridge_in AS b JOIN {schema}.origin AS o ON o.number = b.origin
WHERE o.name = %(name)s::text FOR NO KEY UPDATE OF b
""",
    columns=("text",),
)
CHANGE = Sql(
    """
UPDATE {schema}.bridge_in AS b SET settings = %(settings)s::text::jsonb FROM {schema}.origin AS o
WHERE o.number = b.origin AND o.name = %(name)s::text
"""
)


def bridging_in(schema: str, name: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[bool]:
    """`Bridges.into` as an operation, with what is given of the settings."""
    node_name(name)
    yield from beginning_act(schema, actor, why)
    yield from noting_place(schema)
    # An inbox in total order subscribes under this lock, so it is seen here, or sees the bridge.
    yield clock.DISPATCH_LOCK.at(schema=schema)()
    if rows := (yield TAKEN.at(schema=schema)(name=name)):
        [(kept,)] = rows
        if kept is None:
            raise ConfigurationError(
                f"This node reads the node {name}, or has a bridge of this name: this one needs another name.",
                code="MR-bridge-name-taken",
            )
        before, settings = _changed(name, kept, given)
        changed_by = f"mailroom bridge set {name}, or Bridges.set"
        check_same(f"Bridge {name}", before, settings.flat(), changed_by, "MR-bridge-set-otherwise")
        return False
    settings = _made({}, given)
    if found := (yield WAITS_FOR_EVER.at(schema=schema)(name=name)):
        raise ConfigurationError(
            f"Inbox {found[0][0]} is in total order and subscribes to this origin. A broker shows no clocks, so such "
            f"an inbox would wait for ever. Subscribe it to nodes by their names: mailroom inbox unsubscribe",
            code="MR-bridge-total-order",
        )
    yield ADD.at(schema=schema)(name=name, settings=settings.text())
    yield from auditing(schema, acts.BRIDGE_IN, [(None, name, 0)], actor, why, differences(None, settings.flat()))
    return True


def setting_in(schema: str, name: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[str]:
    """`Bridges.set` as an operation, for a bridge into this node. A dispatcher begins anew with it."""
    rows = yield HOLD.at(schema=schema)(name=name)
    if not rows:
        raise UnknownBridge(f"There is no bridge {name} into this node. See: mailroom bridge status")
    before, settings = _changed(name, rows[0][0], given)
    yield CHANGE.at(schema=schema)(name=name, settings=settings.text())
    if change := differences(before, settings.flat()):
        yield from auditing(schema, acts.BRIDGE_SET, [(None, name, 0)], actor, why, change)
    return change


def _made(before: Mapping[str, Any], given: Mapping[str, Any]) -> InSettings:
    """Return the settings that a bridge would have; an empty template of topics ends the one that it has."""
    settings = with_given(before, given)
    topics = settings["topics"]
    settings |= {
        "as_topic": settings.get("as_topic") or None,
        "topics": [topics] if isinstance(topics, str) else topics,
    }
    return InSettings.made(settings)


def _changed(name: str, kept: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], InSettings]:
    """Return the settings of a bridge and those it would have. Raises `ConfigurationError` for another broker."""
    before = InSettings.of(kept).flat()
    settings = _made(before, given)
    if before["broker"] != settings.broker:
        raise ConfigurationError(
            f"Bridge {name} is at another broker, of whose log it knows its position. Make a bridge of another "
            f"name, and then: mailroom bridge remove {name}",
            code="MR-bridge-settings",
        )
    return before, settings


@dataclass(frozen=True, slots=True)
class InRow:
    """A bridge into this node, as its dispatcher reads it. If `is_well`, no trouble is recorded.

    `moves` counts how often somebody has set its position.
    """

    origin: int
    name: str
    settings: InSettings
    node_id: UUID
    is_well: bool
    moves: int


INS = Sql(
    """
SELECT o.number, o.name, b.settings::text, n.id, o.why IS NULL, b.moves
FROM {schema}.bridge_in AS b JOIN {schema}.origin AS o ON o.number = b.origin CROSS JOIN {schema}.node AS n
WHERE (o.state <> 'excluded' OR %(name)s::text IS NOT NULL) AND (%(name)s::text IS NULL OR o.name = %(name)s::text)
ORDER BY o.number
""",
    columns=("bigint", "text", "text", "uuid", "boolean", "bigint"),
)


def reading_ins(schema: str, name: str | None = None) -> Operation[list[InRow]]:
    """Return the bridges into a node that are not excluded; with `name` only that one, whatever its state."""
    return [
        InRow(origin, name, InSettings.of(settings), *others)
        for origin, name, settings, *others in (yield INS.at(schema=schema)(name=name))
    ]


# -- Where it is ------------------------------------------------------------------------------------------------------

# Per partition, and per link of a node that writes there.
Mark: TypeAlias = tuple[str, int, UUID, int]
# A topic at the broker, and a partition of it.
Place: TypeAlias = tuple[str, int]
# The offset of the last record that was taken in there, and its hash.
Last: TypeAlias = tuple[int, str]

POSITIONS = Sql(
    "SELECT topic, part, next, leader_epoch, log FROM {schema}.bridge_position WHERE origin = %(origin)s::bigint "
    "ORDER BY topic, part",
    columns=("text", "bigint", "bigint", "bigint", "text"),
)
MARKS = Sql(
    "SELECT topic, part, sender, link, clock FROM {schema}.bridge_mark WHERE origin = %(origin)s::bigint",
    columns=("text", "bigint", "uuid", "bigint", "bigint"),
)
LASTS = Sql(
    "SELECT topic, part, last, digest FROM {schema}.bridge_position WHERE origin = %(origin)s::bigint "
    "AND last IS NOT NULL",
    columns=("text", "bigint", "bigint", "text"),
)
BEGIN = Sql(
    """
INSERT INTO {schema}.bridge_position (origin, topic, part, next, leader_epoch, log)
SELECT %(origin)s::bigint, t.topic, t.part, t.next, t.epoch, t.log
FROM ROWS FROM (pg_catalog.unnest(%(topics)s::text[]), pg_catalog.unnest(%(parts)s::bigint[]),
                pg_catalog.unnest(%(nexts)s::bigint[]), pg_catalog.unnest(%(epochs)s::bigint[]),
                pg_catalog.unnest(%(logs)s::text[])) AS t (topic, part, next, epoch, log)
ON CONFLICT DO NOTHING
"""
)
# Compare and set: a run that has read from another place than the database says has been overtaken. A broker that did
# not tell in time which log it is has not made another one of it.
MOVE = Sql(
    """
WITH moved AS (
    UPDATE {schema}.bridge_position AS p SET next = t.next, leader_epoch = t.epoch, log = coalesce(t.log, p.log),
        last = coalesce(t.last, p.last), digest = coalesce(t.digest, p.digest)
    FROM ROWS FROM (pg_catalog.unnest(%(topics)s::text[]), pg_catalog.unnest(%(parts)s::bigint[]),
                    pg_catalog.unnest(%(befores)s::bigint[]), pg_catalog.unnest(%(nexts)s::bigint[]),
                    pg_catalog.unnest(%(epochs)s::bigint[]), pg_catalog.unnest(%(logs)s::text[]),
                    pg_catalog.unnest(%(lasts)s::bigint[]), pg_catalog.unnest(%(digests)s::text[]))
         AS t (topic, part, before, next, epoch, log, last, digest)
    WHERE p.origin = %(origin)s::bigint AND p.topic = t.topic AND p.part = t.part AND p.next = t.before
    RETURNING 1)
SELECT count(*) FROM moved
""",
    columns=("bigint",),
)
NOTE = Sql(
    """
INSERT INTO {schema}.bridge_mark AS m (origin, topic, part, sender, link, clock)
SELECT %(origin)s::bigint, t.topic, t.part, t.sender, t.link, t.clock
FROM ROWS FROM (pg_catalog.unnest(%(topics)s::text[]), pg_catalog.unnest(%(parts)s::bigint[]),
                pg_catalog.unnest(%(senders)s::uuid[]), pg_catalog.unnest(%(links)s::bigint[]),
                pg_catalog.unnest(%(clocks)s::bigint[])) AS t (topic, part, sender, link, clock)
ON CONFLICT (origin, topic, part, sender, link) DO UPDATE SET clock = excluded.clock
"""
)


# Which history of the node this is: another server or database, or timeline, or what somebody or a reader has said.
HISTORY = "pg_catalog.format('%%s/%%s/%%s/%%s', n.system_id, n.database_oid, n.timeline, n.incarnation)"
# A queue has deleted what was taken in the history that is lost, and nothing says what that was.
LACK = Sql(
    """
UPDATE {schema}.bridge_in AS b
SET history = {history}, lacks_to = clock_timestamp(), lacks_from = coalesce(b.lacks_from,
    (SELECT r.received_at FROM {schema}.receipt AS r WHERE r.origin = b.origin ORDER BY r.last DESC LIMIT 1))
FROM {schema}.node AS n WHERE b.origin = %(origin)s::bigint AND b.history <> {history}
RETURNING true
""",
    columns=("boolean",),
    history=HISTORY,
)
QUEUED = Sql(
    """
UPDATE {schema}.bridge_in AS b SET history = {history} FROM {schema}.node AS n
WHERE b.origin = %(origin)s::bigint AND b.history IS NULL
""",
    history=HISTORY,
)


def lacking(schema: str, origin: int) -> Operation[bool]:
    """Note it if this node may lack what was taken from a queue in a history that it has lost; return whether."""
    return bool((yield LACK.at(schema=schema)(origin=origin)))


def taking_from_queue(schema: str, origin: int) -> Operation[None]:
    """Note that what this bridge takes is deleted at the broker."""
    yield QUEUED.at(schema=schema)(origin=origin)


# By origin: the same id may have come by another bridge, or may have been sent here.
KNOWN = Sql("SELECT id FROM {schema}.outbox_jdbc_id WHERE id = ANY (%(ids)s::uuid[])", columns=("uuid",))
REMEMBER = Sql(
    """
WITH new AS (
    INSERT INTO {schema}.outbox_jdbc_id (id) SELECT pg_catalog.unnest(%(ids)s::uuid[]) ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT count(*) FROM new
""",
    columns=("bigint",),
)
# This must never change: with another one, what was taken in would be taken in again.
TAKEN_IN = UUID("0b6b1c2c-3b0e-5f0e-8f5e-6a3c9d0f4e51")


class Overtaken(MailroomError):
    """Another dispatcher has taken in since, or somebody has set the position: read again where the database says."""

    code = "MR-bridge-overtaken"


def reading_positions(schema: str, origin: int) -> Operation[list[BrokerPosition]]:
    """Return the positions of a bridge into this node."""
    return [BrokerPosition(*row) for row in (yield POSITIONS.at(schema=schema)(origin=origin))]


def reading_lasts(schema: str, origin: int) -> Operation[dict[Place, Last]]:
    """Return the last record that was taken in of each partition."""
    return {
        (topic, part): (last, digest) for topic, part, last, digest in (yield LASTS.at(schema=schema)(origin=origin))
    }


def reading_marks(schema: str, origin: int) -> Operation[dict[Mark, int]]:
    """Return up to which clock each link of a node was taken in, per partition."""
    rows = yield MARKS.at(schema=schema)(origin=origin)
    return {(topic, part, sender, link): at for topic, part, sender, link, at in rows}


def beginning(schema: str, origin: int, positions: Collection[BrokerPosition]) -> Operation[None]:
    """Note where a bridge begins in partitions that it has read nothing of yet."""
    yield BEGIN.at(schema=schema)(
        origin=origin, topics=[each.topic for each in positions], parts=[each.part for each in positions],
        nexts=[each.next for each in positions], epochs=[each.leader_epoch for each in positions],
        logs=[each.log for each in positions],
    )  # fmt: skip


def moving_position(
    schema: str,
    origin: int,
    moves: Sequence[tuple[BrokerPosition, BrokerPosition]],
    lasts: Mapping[Place, Last],
    marks: Mapping[Mark, int],
    ids: Sequence[UUID] = (),
    *,
    is_queue: bool = False,
) -> Operation[None]:
    """Move positions, each from one to the other, and set marks, with what is received. Raises `Overtaken`.

    `lasts` are the last records of them, where there are any. `ids` are those of `id_taken_in` that come with it, and
    are known from then on. What comes from a queue is durable with the commit, since the queue deletes it then.
    """
    if is_queue:
        yield DURABLE.at()()
    known_by = [lasts.get((after.topic, after.part), (None, None)) for _, after in moves]
    [(moved,)] = yield MOVE.at(schema=schema)(
        origin=origin,
        topics=[before.topic for before, _ in moves],
        parts=[before.part for before, _ in moves],
        befores=[before.next for before, _ in moves],
        nexts=[after.next for _, after in moves],
        epochs=[after.leader_epoch for _, after in moves],
        logs=[after.log for _, after in moves],
        lasts=[last for last, _ in known_by],
        digests=[digest for _, digest in known_by],
    )
    if moved != len(moves):
        raise Overtaken("the position at the broker is another one by now")
    if marks:
        yield NOTE.at(schema=schema)(
            origin=origin,
            topics=[topic for topic, _, _, _ in marks],
            parts=[part for _, part, _, _ in marks],
            senders=[sender for _, _, sender, _ in marks],
            links=[link for _, _, _, link in marks],
            clocks=list(marks.values()),
        )
    if ids:
        [(new,)] = yield REMEMBER.at(schema=schema)(ids=list(ids))
        if new != len(ids):
            raise Overtaken("some of it has come already")


def id_taken_in(origin: int, message_id: UUID) -> UUID:
    """Return the id under which it is remembered, for seven days, that a message came from a queue by this origin."""
    return uuid5(TAKEN_IN, f"{origin}:{message_id}")


def knowing_taken(schema: str, ids: Collection[UUID]) -> Operation[set[UUID]]:
    """Return those of these ids, of `id_taken_in`, that are known."""
    return {id for (id,) in (yield KNOWN.at(schema=schema)(ids=list(ids)))}


# -- What is lost at the broker ---------------------------------------------------------------------------------------

# D-bridges-16: That records are lost is a column of its own.
LOST = Sql("SELECT lost FROM {schema}.bridge_in WHERE origin = %(origin)s::bigint", columns=("text",))
# Not over what somebody has done about it since.
LOSE = Sql(
    "UPDATE {schema}.bridge_in SET lost = %(why)s::text WHERE origin = %(origin)s::bigint AND moves = %(moves)s::bigint"
)
READ = Sql(
    """
UPDATE {schema}.origin AS o SET state = 'open', trouble = NULL, why = NULL, since = NULL
WHERE o.number = %(origin)s::bigint AND o.state <> 'excluded' AND (o.state <> 'open' OR o.why IS NOT NULL)
  AND NOT EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number AND b.lost IS NOT NULL)
"""
)


def reading_loss(schema: str, origin: int) -> Operation[str | None]:
    """Return why nothing may be taken in before somebody says so: records are lost at the broker. None if none are."""
    rows = yield LOST.at(schema=schema)(origin=origin)
    return rows[0][0] if rows else None


def noting_loss(schema: str, row: InRow, why: str) -> Operation[None]:
    """Let nothing be taken in before somebody has said what to do about records that are lost at the broker."""
    yield DURABLE.at()()
    yield LOSE.at(schema=schema)(origin=row.origin, moves=row.moves, why=why)


def noting_read(schema: str, origin: int) -> Operation[None]:
    """Record that the broker is read, unless records are lost there."""
    yield READ.at(schema=schema)(origin=origin)


# -- What an operator does --------------------------------------------------------------------------------------------

SET = Sql(
    """
WITH moved AS (
    UPDATE {schema}.bridge_position
    SET next = %(next)s::bigint, leader_epoch = NULL, log = NULL, last = NULL, digest = NULL
    WHERE origin = %(origin)s::bigint AND topic = %(topic)s::text AND part = %(part)s::bigint RETURNING origin)
UPDATE {schema}.bridge_in AS b SET moves = moves + 1 FROM moved AS m WHERE b.origin = m.origin RETURNING true
""",
    columns=("boolean",),
)
SEEN = Sql(
    """
UPDATE {schema}.bridge_in SET lacks_from = NULL, lacks_to = NULL
WHERE origin = %(origin)s::bigint AND lacks_to IS NOT NULL RETURNING true
""",
    columns=("boolean",),
)
OPEN = Sql(
    """
WITH lost AS (
    UPDATE {schema}.bridge_in SET lost = NULL, moves = moves + 1
    WHERE origin = %(origin)s::bigint AND lost IS NOT NULL RETURNING true),
was AS (
    UPDATE {schema}.origin SET state = 'open', trouble = NULL, why = NULL, since = NULL
    WHERE number = %(origin)s::bigint AND state <> 'excluded' AND why IS NOT NULL RETURNING true)
SELECT true FROM lost UNION SELECT true FROM was
""",
    columns=("boolean",),
)


def resuming_in(schema: str, row: InRow, at: BrokerPosition | None, *, actor: str, why: str | None) -> Operation[bool]:
    """`Bridges.resume` for a bridge into this node; with `at` it goes on there in that partition."""
    yield clock.DISPATCH_LOCK.at(schema=schema)()  # nothing is taken in meanwhile
    if at is not None:
        found = yield SET.at(schema=schema)(origin=row.origin, topic=at.topic, part=at.part, next=at.next)
        if not found:
            raise ConfigurationError(
                f"Bridge {row.name} has no position in partition {at.part} of {at.topic}. See: mailroom bridge status",
                code="MR-bridge-settings",
            )
    was = (yield OPEN.at(schema=schema)(origin=row.origin)) + (yield SEEN.at(schema=schema)(origin=row.origin))
    if was or at is not None:
        told = None if at is None else f"at {at.topic}/{at.part}={at.next}"
        yield from auditing(schema, acts.BRIDGE_RESUME, [(None, row.name, 0)], actor, why, told)
    return bool(was)
