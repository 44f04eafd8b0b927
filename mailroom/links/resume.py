"""What an operator does if a link does not go on by itself: resume, report, moved and cut."""

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from mailroom.errors import MailroomError, UnknownLink
from mailroom.links.handshake.diverged import BY_HAND, Ending, cutting_receipts, finding_unknown, holding, reading_ends
from mailroom.links.readers import MAX_ROWS
from mailroom.links.unknown import unknown_link
from mailroom.order.clock import DURABLE
from mailroom.order.total import resuming_order
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.numbers import whole

LOST_AT_MOST = 1_000  # ids that a report lists unless it is told otherwise

ORIGIN = Sql(
    "SELECT number, state, why FROM {schema}.origin WHERE name = %(name)s::text", columns=("bigint", "text", "text")
)


def _origin(schema: str, name: str) -> Operation[tuple[int, str, str | None]]:
    rows = yield ORIGIN.at(schema=schema)(name=name)
    if not rows:
        raise (yield from unknown_link(schema, name, f"This node reads no source {name!r}.", ["source"]))
    [(number, state, why)] = rows
    return number, state, why


# -- At the target ----------------------------------------------------------------------------------------------------

OPEN = Sql(
    "UPDATE {schema}.origin SET state = 'open', trouble = NULL, why = NULL, since = NULL "
    "WHERE number = %(origin)s::bigint"
)
UNPIN = Sql("UPDATE {schema}.origin SET incarnation = NULL WHERE number = %(origin)s::bigint")
ABOVE = Sql(
    """
SELECT coalesce(sum((
    SELECT count(*) FROM generate_series(1, pg_catalog.cardinality(ids)) AS nth
    WHERE first + nth - 1 > %(last)s::bigint)), 0)::bigint
FROM {schema}.receipt WHERE origin = %(origin)s::bigint AND last > %(last)s::bigint
""",
    columns=("bigint",),
)
# Rows that never come count as a receipt without ids.
SKIP = Sql(
    """
INSERT INTO {schema}.receipt (origin, last, first, last_id, stamped_at, sent_clock, ids)
VALUES (%(origin)s::bigint, %(last)s::bigint, %(first)s::bigint, %(id)s::uuid, %(stamped_at)s::timestamptz,
        %(sent_clock)s::bigint, '{}'::uuid[])
"""
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `resume` did, or would do. `was` is the reason for which the link stood, if any.

    With `at`: `known` messages above it are left out when they come again; those of the seqs `unknown` may come twice,
    since their ids are not kept; those of the seqs `skipped` are never read.
    """

    was: str | None
    at: int | None = None
    known: int = 0
    unknown: range = range(0)
    skipped: range = range(0)


def resuming(
    schema: str, name: str, at: int | None = None, *, actor: str, why: str | None = None, dry_run: bool = False
) -> Operation[Resumed]:
    """Read a stopped source again; with `at`, go on after that seq of its link, whatever was received.

    If this node has lost history, its total inboxes go on too, as by `resuming_order`. In a READ COMMITTED transaction,
    durable once that commits. Raises `UnknownLink`, and `MailroomError` for a source that is excluded.
    """
    check_actor(actor, why)
    yield IN_TRANSACTION
    number, state, was = yield from _origin(schema, name)
    if state == "excluded":
        raise MailroomError(
            f"{name} was excluded by hand. Read it again with: mailroom link include {name}", code="MR-link-excluded"
        )
    resumed = Resumed(was)
    if at is not None:
        resumed = yield from _placing(schema, number, at, was, dry_run)
    if not dry_run:
        yield DURABLE.at()()
        yield OPEN.at(schema=schema)(origin=number)
        yield from resuming_order(schema)
        yield from auditing(schema, acts.LINK_RESUME, [(None, name, resumed.known)], actor, why, _told(resumed) or None)
    return resumed


def _told(resumed: Resumed) -> str:
    told = f"at {resumed.at}" if resumed.at is not None else ""
    for what, seqs in (("never read", resumed.skipped), ("may come twice", resumed.unknown)):
        if seqs:
            told += f", {what}: rows {seqs[0]} to {seqs[-1]}"
    return told


def _placing(schema: str, number: int, at: int, was: str | None, dry_run: bool) -> Operation[Resumed]:
    at = whole(at, "at", 0, MAX_ROWS, MailroomError)
    held = yield from holding(schema, number)
    if held is None:
        raise UnknownLink("The source was just removed.")
    unknown = yield from finding_unknown(schema, number, at)
    skipped = range(held.last + 1, at + 1)
    if dry_run:
        [(known,)] = yield ABOVE.at(schema=schema)(origin=number, last=at)
        return Resumed(was, at, known, unknown, skipped)
    # Nobody's witness: whatever the source has in this row is taken for the same.
    vouched = Ending(at, BY_HAND, datetime(1970, 1, 1, tzinfo=UTC), held.sent_clock)
    known = yield from cutting_receipts(schema, number, vouched if at else None)
    newest = yield from reading_ends(schema, number, at + 1, 1)
    if at and (not newest or newest[0][0] != at):
        # Of a seq whose receipt is not kept any more, nothing is skipped.
        first = held.last + 1 if skipped else at + 1
        yield SKIP.at(schema=schema)(
            origin=number, last=at, first=first, id=vouched.id, stamped_at=vouched.stamped_at,
            sent_clock=held.sent_clock,
        )  # fmt: skip
    yield UNPIN.at(schema=schema)(origin=number)
    return Resumed(was, at, known, unknown, skipped)


# What came again stands in a later receipt. So a message is lost as long as only the target has it. Of what came by
# a link before this one it is not known whether the source has lost it.
LOST = Sql(
    """
SELECT message_id, count(*) OVER () FROM (
    SELECT message_id FROM {schema}.known WHERE origin = %(origin)s::bigint AND link IS NULL
    EXCEPT SELECT i.id FROM {schema}.receipt AS r, LATERAL pg_catalog.unnest(r.ids) AS i (id)
           WHERE r.origin = %(origin)s::bigint) AS lost
ORDER BY message_id LIMIT %(limit)s::bigint
""",
    columns=("uuid", "bigint"),
)
EARLIER = Sql(
    "SELECT count(*) FROM {schema}.known WHERE origin = %(origin)s::bigint AND link IS NOT NULL", columns=("bigint",)
)
SKIPPED = Sql(
    """
SELECT first, last FROM {schema}.receipt WHERE origin = %(origin)s::bigint AND last_id = %(by_hand)s::uuid
  AND pg_catalog.cardinality(ids) = 0 AND first <= last
UNION ALL
SELECT last_before + 1, first - 1 FROM (
    SELECT first, pg_catalog.lag(last) OVER (ORDER BY last) AS last_before FROM {schema}.receipt
    WHERE origin = %(origin)s::bigint) AS r WHERE first > last_before + 1
ORDER BY 1
""",
    columns=("bigint", "bigint"),
)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The messages of a source that are only here (`lost`, ids), and the seqs that never came (`skipped`, from and to).

    `more_lost` messages are only here too, beyond the limit of the report. `earlier` messages came by a link before
    this one: whether the source still has them is unknown, and they are left out if they come again. `state` and `why`
    say whether it is read.
    """

    name: str
    state: str
    why: str | None
    lost: tuple[UUID, ...]
    skipped: tuple[tuple[int, int], ...]
    earlier: int = 0
    more_lost: int = 0


def reporting(schema: str, name: str, limit: int | None = LOST_AT_MOST) -> Operation[LinkReport]:
    """Return what the source has lost and this node has received, and what never came. Raises `UnknownLink`.

    As far back as receipts are kept; the ids of lost messages stay. At most `limit` of them are listed, None for all.
    """
    number, state, why = yield from _origin(schema, name)
    lost = yield LOST.at(schema=schema)(origin=number, limit=limit)
    skipped = yield SKIPPED.at(schema=schema)(origin=number, by_hand=BY_HAND)
    [(earlier,)] = yield EARLIER.at(schema=schema)(origin=number)
    return LinkReport(
        name,
        state,
        why,
        tuple(id for id, _ in lost),
        tuple((first, last) for first, last in skipped),
        earlier,
        lost[0][1] - len(lost) if lost else 0,
    )


# -- At either end ----------------------------------------------------------------------------------------------------

# The id of a bridge's link keeps nodes out.
FORGET_READER = Sql(
    """
UPDATE {schema}.link SET reader_id = NULL, reader_system_id = NULL, reader_database_oid = NULL, by_role = NULL
WHERE name = %(name)s::text AND NOT EXISTS (SELECT FROM {schema}.bridge_out WHERE link = number) RETURNING true
""",
    columns=("boolean",),
)
FORGET_SOURCE = Sql(
    "UPDATE {schema}.origin SET system_id = NULL, timeline = NULL WHERE name = %(name)s::text RETURNING true",
    columns=("boolean",),
)


@dataclass(frozen=True, slots=True)
class LinkMoved:
    """Whether the node of that name is a reader of this one, and whether it is a source; perhaps both."""

    reader: bool
    source: bool


def moving(schema: str, name: str, *, actor: str, why: str | None = None) -> Operation[LinkMoved]:
    """Forget where the node of this name was; its next hello records where it is. Raises `UnknownLink`.

    For a reader that another node takes the place of, and for a source whose old primary is to be the source again.
    """
    check_actor(actor, why)
    yield IN_TRANSACTION
    reader = yield FORGET_READER.at(schema=schema)(name=name)
    source = yield FORGET_SOURCE.at(schema=schema)(name=name)
    if not reader and not source:
        raise (yield from unknown_link(schema, name, f"No node {name!r} reads this one, or is read by it."))
    yield from auditing(schema, acts.LINK_MOVED, [(None, name, 0)], actor, why)
    return LinkMoved(bool(reader), bool(source))


# -- At the source ----------------------------------------------------------------------------------------------------

CUTTING = Sql(
    """
SELECT l.number, coalesce(t.seq, 0) - l.acked, l.state FROM {schema}.link AS l LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit WHERE link = l.number ORDER BY seq DESC LIMIT 1) AS t ON true
WHERE l.name = %(name)s::text FOR NO KEY UPDATE OF l
""",
    columns=("bigint", "bigint", "text"),
)
CUT = Sql("UPDATE {schema}.link SET state = 'cut' WHERE number = %(link)s::bigint")


def cutting(
    schema: str, name: str, *, actor: str, why: str | None = None, dry_run: bool = False, act: acts.Act = acts.LINK_CUT
) -> Operation[int]:
    """Stamp nothing more for this reader, and give up what waits for it; return how many rows that are.

    Only `mailroom link remove` and `mailroom link allow` let it in again, with what is stamped from then on. The rows
    go in the dispatcher's housekeeping. Raises `UnknownLink`.
    """
    check_actor(actor, why)
    yield IN_TRANSACTION
    rows = yield CUTTING.at(schema=schema)(name=name)
    if not rows:
        raise (yield from unknown_link(schema, name, f"No node {name!r} reads this one.", ["reader"]))
    [(link, waiting, state)] = rows
    if not dry_run and state != "cut":
        yield CUT.at(schema=schema)(link=link)
        yield from auditing(schema, act, [(None, name, waiting)], actor, why)
    return max(0, int(waiting))
