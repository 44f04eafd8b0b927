"""What a reader has recorded about its sources (the table `origin`), and which topics it wants from each."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias
from uuid import UUID

from mailroom.links.handshake.diverged import DISPATCHER
from mailroom.links.handshake.hello import Greeting
from mailroom.links.handshake.identity import Party, Pinned
from mailroom.links.handshake.place import reading_place
from mailroom.order import clock
from mailroom.order.total import HAS_JOINED
from mailroom.schema import acts
from mailroom.schema.audit import auditing
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one


@dataclass(frozen=True, slots=True)
class Origin:
    """A source of this node: a row of `origin`. `state` is open, stopped (for the reason `why`) or excluded.

    An open one with a `why` is not read either, and is tried again and again. What was acknowledged is kept there for
    `keep_s` seconds.
    """

    number: int
    name: str
    service: str | None
    schema: str
    reader: str | None
    id: UUID | None
    incarnation: int | None
    system_id: int | None
    timeline: int | None
    link: int | None
    shown: int
    keep_s: float
    state: str
    why: str | None

    @property
    def pinned(self) -> Pinned:
        """What a hello compares."""
        return Pinned(self.id, self.incarnation, self.system_id, self.timeline, self.link, self.number)


ORIGINS = Sql(
    """
SELECT number, name, service, schema, reader, id, incarnation, system_id, timeline, link, shown, keep_s,
       state, why
FROM {schema}.origin WHERE (%(number)s::bigint IS NULL OR number = %(number)s::bigint)
  AND NOT EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = number)
ORDER BY name
""",
    columns=(
        *("bigint", "text", "text", "text", "text", "uuid", "bigint", "bigint", "bigint", "bigint", "bigint"),
        *("float8", "text", "text"),
    ),
)


def reading_origins(schema: str, number: int | None = None) -> Operation[list[Origin]]:
    """Return the nodes that this one reads, by name, also those that are not read now; with `number` only that one."""
    return [Origin(*row) for row in (yield ORIGINS.at(schema=schema)(number=number))]


WANTED = Sql(
    """
SELECT s.id, s.topic FROM {schema}.subscription AS s JOIN {schema}.origin AS o ON s.origin IN (o.name, '*')
WHERE o.name = %(origin)s::text AND {has_joined}
""",
    columns=("uuid", "text"),
    has_joined=HAS_JOINED,
)


def wanted_subscriptions(schema: str, origin: str) -> Operation[dict[UUID, str]]:
    """Return the subscriptions of this node to messages of the source of that name, by id, with their topics.

    Those of a total inbox only once the source has shown a clock as high as that of the inbox's subscription.
    """
    return dict((yield WANTED.at(schema=schema)(origin=origin)))


TELL = Sql(
    """
UPDATE {schema}.origin SET told = %(told)s::uuid[], refused = %(refused)s::uuid[]
WHERE number = %(number)s::bigint AND (told, refused) IS DISTINCT FROM (%(told)s::uuid[], %(refused)s::uuid[])
"""
)


def telling(schema: str, number: int, told: Collection[UUID], refused: Collection[UUID] = ()) -> Operation[None]:
    """Record which subscriptions the source has now, and which ones it was told of and refuses."""
    yield TELL.at(schema=schema)(number=number, told=sorted(told), refused=sorted(refused))


SELF = Sql(
    "SELECT id, name, pg_catalog.current_setting('server_encoding') FROM {schema}.node",
    columns=("uuid", "text", "text"),
)


def introducing(schema: str, origin: Origin) -> Operation[Party]:
    """Return what this node says about itself when it says hello to the source."""
    id, name, encoding = the_one((yield SELF.at(schema=schema)()), NODE_ROW, schema)
    place = yield from reading_place()
    return Party(origin.reader or name, id, place, encoding=encoding)


HELD = Sql("SELECT link FROM {schema}.origin WHERE number = %(number)s::bigint FOR UPDATE", columns=("bigint",))
# What was received stays known: the source may have been put back to before it allowed this node, and then sends it all
# again by a link of another number. The clock up to which everything has come (`shown`) stays too.
FORGET = Sql(
    """
WITH held AS MATERIALIZED (
    SELECT number, link FROM {schema}.origin
    WHERE number = %(number)s::bigint AND link <> %(link)s::bigint FOR UPDATE),
portion AS MATERIALIZED (
    SELECT r.origin, r.last FROM {schema}.receipt AS r JOIN held AS h ON r.origin = h.number
    ORDER BY r.last LIMIT %(receipts)s::bigint),
gone AS (
    DELETE FROM {schema}.receipt AS r USING portion AS p WHERE (r.origin, r.last) = (p.origin, p.last)
    RETURNING r.sent_clock, r.ids),
known AS (
    INSERT INTO {schema}.known (origin, message_id, link)
    SELECT h.number, i.id, h.link FROM held AS h, gone, LATERAL pg_catalog.unnest(gone.ids) AS i (id)
    ON CONFLICT DO NOTHING),
shown AS (
    UPDATE {schema}.origin AS o SET shown = greatest(o.shown, (SELECT max(sent_clock) FROM gone))
    FROM held AS h WHERE o.number = h.number)
SELECT count(*) FROM gone
""",
    columns=("bigint",),
)
BY_LINK = Sql(
    "SELECT count(*) FROM {schema}.known WHERE origin = %(number)s::bigint AND link = %(link)s::bigint",
    columns=("bigint",),
)
RECEIPTS = 20  # at once; each may have thousands of ids
PIN = Sql(
    """
UPDATE {schema}.origin
SET id = %(id)s::uuid, incarnation = %(incarnation)s::bigint,
    system_id = %(system_id)s::bigint, timeline = %(timeline)s::bigint, link = %(link)s::bigint,
    told = CASE WHEN link = %(link)s::bigint THEN told ELSE '{}'::uuid[] END,
    refused = CASE WHEN link = %(link)s::bigint THEN refused ELSE '{}'::uuid[] END,
    keep_s = %(keep_s)s::float8
WHERE number = %(number)s::bigint
"""
)


def forgetting(schema: str, origin: Origin, link: int, receipts: int | None = RECEIPTS) -> Operation[bool]:
    """Note what has come by another link than `link` as known, and forget those rows; return whether more may be left.

    In transactions of their own, before `pinning` does the rest under the dispatch lock: there may be many messages.
    """
    [(gone,)] = yield FORGET.at(schema=schema)(number=origin.number, link=link, receipts=receipts)
    return bool(gone)


def pinning(schema: str, origin: Origin, greeting: Greeting) -> Operation[Origin]:
    """Record who the source is, in a transaction that is durable when it commits; return the origin as it is now.

    Nothing is written if nothing is new. With a new link the source counts from 1 again (the old one was removed there
    and another one allowed, or is unknown after a restore), so the position starts over: the receipts of the old link
    go, and the messages in them are known.
    """
    # It says which history the receipts belong to. So as long as there are receipts, whatever moves them to a newer
    # history records it.
    is_first = origin.incarnation is None or origin.link != greeting.link
    new = replace(
        origin,
        id=greeting.id,
        incarnation=greeting.incarnation if is_first else origin.incarnation,
        system_id=greeting.place.system_id,
        timeline=greeting.place.timeline,
        link=greeting.link,
        keep_s=greeting.keep_s,
    )
    if new == origin:
        return origin
    # No batch is received meanwhile, whose receipt would be left over.
    yield clock.DISPATCH_LOCK.at(schema=schema)()
    yield clock.DURABLE.at()()
    held = yield HELD.at(schema=schema)(number=origin.number)
    before = held[0][0] if held else None
    if before not in (None, greeting.link):
        yield from forgetting(schema, origin, greeting.link, receipts=None)
        [(known,)] = yield BY_LINK.at(schema=schema)(number=origin.number, link=before)
        why = "what came by the link before is left out if it comes again"
        told = f"link {before} -> {greeting.link}"
        yield from auditing(schema, acts.NEW_LINK, [(None, origin.name, known)], DISPATCHER, why, told)
    yield PIN.at(schema=schema)(
        number=origin.number, id=new.id, incarnation=new.incarnation, system_id=new.system_id,
        timeline=new.timeline, link=new.link, keep_s=new.keep_s,
    )  # fmt: skip
    found = yield from reading_origins(schema, origin.number)
    return found[0] if found else new


# Whatever else goes wrong meanwhile, `since` is the time of the first trouble.
SINCE = "since = coalesce(since, clock_timestamp() - %(for_s)s::float8 * interval '1 second')"
STOP = Sql(
    """
UPDATE {schema}.origin SET state = 'stopped', trouble = NULL, why = %(why)s::text, {since}
WHERE number = %(number)s::bigint AND state <> 'excluded'
  AND (state <> 'stopped' OR trouble IS NOT NULL OR why IS DISTINCT FROM %(why)s::text)
RETURNING true
""",
    columns=("boolean",),
    since=SINCE,
)
FAIL = Sql(
    """
UPDATE {schema}.origin SET trouble = %(trouble)s::text, why = %(why)s::text, {since}
WHERE number = %(number)s::bigint AND state <> 'excluded'
  AND (trouble, why) IS DISTINCT FROM (%(trouble)s::text, %(why)s::text)
RETURNING true
""",
    columns=("boolean",),
    since=SINCE,
)
Trouble: TypeAlias = Literal["unreachable", "failing"]


def stopping(schema: str, number: int, why: str, for_s: float = 0.0) -> Operation[bool]:
    """Record that nothing may be received from the source before an operator acts, and why; return whether that is new.

    `for_s`: for how many seconds it has not been read. An excluded source stays excluded.
    """
    return bool((yield STOP.at(schema=schema)(number=number, why=why, for_s=for_s)))


def failing(schema: str, number: int, trouble: Trouble, why: str, for_s: float = 0.0) -> Operation[bool]:
    """Record that the source is not read now, and why, though it is tried again; return whether that is new.

    From a stopped source nothing may be received before both sides have found a common history, whatever happens
    meanwhile. An excluded source stays excluded.
    """
    return bool((yield FAIL.at(schema=schema)(number=number, trouble=trouble, why=why, for_s=for_s)))


ADMIT = Sql(
    "UPDATE {schema}.origin SET state = 'open', trouble = coalesce(trouble, 'failing') "
    "WHERE number = %(number)s::bigint AND state = 'stopped'"
)
OPEN = Sql(
    """
UPDATE {schema}.origin SET state = 'open', trouble = NULL, why = NULL, since = NULL
WHERE number = %(number)s::bigint AND state <> 'excluded' AND (state <> 'open' OR why IS NOT NULL)
RETURNING true
""",
    columns=("boolean",),
)


def admitting(schema: str, number: int) -> Operation[None]:
    """Let a stopped source be received again. The reason stays recorded until something was read: see `opening`."""
    yield ADMIT.at(schema=schema)(number=number)


def opening(schema: str, number: int) -> Operation[bool]:
    """Record that the source is read; return whether that is new. An excluded source stays excluded."""
    return bool((yield OPEN.at(schema=schema)(number=number)))
