"""Histories that have parted: the source lost rows that the target has received.

The target finds that its position is not among the source's rows, and claims it there (`claiming`). If the link is in
doubt, the source's own dispatcher answers with a new incarnation (`renewing`). So a reader's login needs no right on
the node's clock. A target that is told a newer incarnation finds out what both have: the last receipt that the source
has the same row for (`reading_ends`, `finding_anchor`), and from there on the messages one by one (`reading_received`,
`reading_sent`). What only the target has becomes known, and its receipts end where the common history ends
(`rewinding`).

Each operation runs in one database; plain data goes between them. `dispatcher.links.reconcile` runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from mailroom.errors import LinkRefused
from mailroom.links.handshake.hello import check_held
from mailroom.links.handshake.history import Claim, is_in_doubt, renewed
from mailroom.order.clock import DISPATCH_LOCK, DURABLE
from mailroom.schema import acts
from mailroom.schema.audit import auditing
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

# Who acts, in the audit, if no person does.
DISPATCHER = "dispatcher"
# The witness of a position that an operator gave: nobody's message.
BY_HAND = UUID(int=0)

# -- At the source, by the target -------------------------------------------------------------------------------------

REACH = Sql("SELECT {schema}.clock_reach()", columns=("bigint",))


def checking_claim(schema: str, source: str, clock: int) -> Operation[None]:
    """Raise `LinkRefused` if the source's clock would not go beyond `clock`, which was received from it."""
    [(reach,)] = yield REACH.at(schema=schema)()
    if clock > reach:
        raise LinkRefused(
            f"{source} has lost rows that were received from it, with clocks up to {clock}, and no reader raises its "
            f"clock so far. If it is to go on after that",
            source,
            f"mailroom node advance {clock}",
            code="MR-link-clock-lost",
        )


# It returns whether that is new, and null if another daemon has the link.
# D-links-22: The source's dispatcher answers claims.
CLAIM = Sql(
    "SELECT {schema}.link_claim(%(link)s::bigint, %(run)s::uuid, %(seq)s::bigint, %(clock)s::bigint)",
    columns=("boolean",),
)


def claiming(schema: str, link: int, run: UUID, seq: int, clock: int) -> Operation[bool]:
    """Write at the source what the target has received from it: the last seq, and the largest clock. Is that new?

    Nothing is written if it stands there already. The answer is a newer incarnation, at a later hello. Raises
    `LinkTaken` if another daemon has the link.
    """
    [(claimed,)] = yield CLAIM.at(schema=schema)(link=link, run=run, seq=seq, clock=clock)
    check_held(claimed is not None)
    return bool(claimed)


# -- At the source, by its own dispatcher -----------------------------------------------------------------------------

CLAIMS = Sql(
    """
SELECT l.number, l.name, l.claim_seq, l.claim_clock, l.matched, n.life, n.incarnation,
       greatest(c.last_value, n.clock_ceiling), coalesce(t.seq, 0)
FROM {schema}.link AS l CROSS JOIN {schema}.node AS n CROSS JOIN {schema}.clock AS c LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit WHERE link = l.number ORDER BY seq DESC LIMIT 1) AS t ON true
WHERE l.claim_seq IS NOT NULL ORDER BY l.number
""",
    columns={
        "link": "bigint",
        "reader": "text",
        "seq": "bigint",
        "clock": "bigint",
        "matched": "uuid",
        "life": "uuid",
        **dict.fromkeys(("incarnation", "reached", "newest"), "bigint"),
    },
)
RENEW = Sql(
    """
WITH renewed AS (
    UPDATE {schema}.node SET incarnation = %(incarnation)s::bigint, clock_ceiling = %(clock)s::bigint
    RETURNING clock_ceiling)
SELECT setval('{schema}.clock'::regclass, clock_ceiling) FROM renewed
""",
    columns=("bigint",),
)
ANSWERED = Sql("UPDATE {schema}.link SET claim_seq = NULL, claim_clock = NULL WHERE claim_seq IS NOT NULL")
INCARNATION = Sql(
    "SELECT n.incarnation, greatest(c.last_value, n.clock_ceiling) FROM {schema}.node AS n, {schema}.clock AS c",
    columns=("bigint", "bigint"),
)


def reading_incarnation(schema: str) -> Operation[int]:
    """Return the node's incarnation."""
    incarnation, _ = the_one((yield INCARNATION.at(schema=schema)()), NODE_ROW, schema)
    return int(incarnation)


@dataclass(frozen=True, slots=True)
class ClaimedHistory:
    """A reader's claim: it had received this node's rows up to `seq`, with clocks up to `clock`; `newest` is left."""

    reader: str
    seq: int
    clock: int
    newest: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The source's new incarnation and clock, and the claims that it answers."""

    incarnation: int
    clock: int
    claims: tuple[ClaimedHistory, ...]


def finding_claims(schema: str) -> Operation[bool]:
    """Return whether a reader of a link in doubt has claimed rows: what to ask before `renewing`."""
    rows = CLAIMS.named((yield CLAIMS.at(schema=schema)()))
    return any(is_in_doubt(each.matched, each.life) for each in rows)


def renewing(schema: str) -> Operation[Renewed | None]:
    """Take a new incarnation if a reader of a link in doubt has claimed rows; in a READ COMMITTED transaction.

    Claims of links that are not in doubt prove nothing, and wait for `mailroom node restored`. The new incarnation is
    durable once the transaction commits.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    return (yield from renewing_locked(schema))


def renewing_locked(
    schema: str, *, restored: bool = False, above: int = 0, actor: str = DISPATCHER, why: str | None = None
) -> Operation[Renewed | None]:
    """Do the same under the dispatch lock; with `restored` also without a claim, and above the incarnation `above`."""
    act = acts.NODE_RESTORED if restored else acts.NEW_INCARNATION
    rows = CLAIMS.named((yield CLAIMS.at(schema=schema)()))
    incarnation, clock = the_one((yield INCARNATION.at(schema=schema)()), NODE_ROW, schema)
    found = [(Claim(each.seq, each.clock), is_in_doubt(each.matched, each.life)) for each in rows]
    renewal = renewed(incarnation, clock, found, restored=restored, above=above)
    if renewal is None:
        return None
    yield DURABLE.at()()
    yield RENEW.at(schema=schema)(incarnation=renewal.incarnation, clock=renewal.clock)
    yield ANSWERED.at(schema=schema)()
    claims = tuple(ClaimedHistory(each.reader, each.seq, each.clock, each.newest) for each in rows)
    for each in claims:
        told = f"incarnation {renewal.incarnation}: {each.reader} had received rows up to {each.seq} and clock "
        told += f"{each.clock}, here were rows up to {each.newest}"
        yield from auditing(schema, act, [(None, each.reader, 0)], actor, why, told)
    return Renewed(renewal.incarnation, renewal.clock, claims)


# -- What both have ---------------------------------------------------------------------------------------------------

ENDS = Sql(
    """
SELECT last, last_id, stamped_at FROM {schema}.receipt
WHERE origin = %(origin)s::bigint AND last < %(below)s::bigint ORDER BY last DESC LIMIT %(rows)s::bigint
""",
    columns=("bigint", "uuid", "timestamptz"),
)
End = tuple[int, UUID, datetime]


def reading_ends(schema: str, origin: int, below: int, rows: int) -> Operation[list[End]]:
    """Return, at the target, the newest receipts below a seq: the last seq of each and its witness, newest first."""
    return list((yield ENDS.at(schema=schema)(origin=origin, below=below, rows=rows)))


ANCHOR = Sql(
    """
SELECT max(t.seq)
FROM unnest(%(seqs)s::bigint[], %(ids)s::uuid[], %(stamped)s::timestamptz[]) AS e (seq, id, stamped_at)
JOIN {schema}.transit AS t
  ON t.link = %(link)s::bigint AND t.seq = e.seq AND t.message_id = e.id AND t.stamped_at = e.stamped_at
""",
    columns=("bigint",),
)


def finding_anchor(schema: str, link: int, ends: Sequence[End]) -> Operation[int | None]:
    """Return, at the source, the last of these receipts whose row it has; None if it has none."""
    seqs, ids, stamped = map(list, zip(*ends, strict=True))
    [(anchor,)] = yield ANCHOR.at(schema=schema)(link=link, seqs=seqs, ids=ids, stamped=stamped)
    return None if anchor is None else int(anchor)


EXTENT = Sql(
    """
SELECT (SELECT seq FROM {schema}.transit WHERE link = %(link)s::bigint ORDER BY seq LIMIT 1),
       (SELECT seq FROM {schema}.transit WHERE link = %(link)s::bigint ORDER BY seq DESC LIMIT 1)
""",
    columns=("bigint", "bigint"),
)


def reading_extent(schema: str, link: int) -> Operation[tuple[int, int] | None]:
    """Return, at the source, the seqs of the oldest and the newest row of a link; None if nothing was stamped yet."""
    [(oldest, newest)] = yield EXTENT.at(schema=schema)(link=link)
    return None if newest is None else (int(oldest), int(newest))


SENT = Sql(
    """
SELECT seq, message_id FROM {schema}.transit
WHERE link = %(link)s::bigint AND seq > %(after)s::bigint AND seq <= %(after)s::bigint + %(rows)s::bigint ORDER BY seq
""",
    columns=("bigint", "uuid"),
)
# Receipts are few and ids many: only those of receipts that reach into the range are taken apart.
RECEIVED = Sql(
    """
SELECT r.first + i.nth - 1, i.id
FROM {schema}.receipt AS r, LATERAL pg_catalog.unnest(r.ids) WITH ORDINALITY AS i (id, nth)
WHERE r.origin = %(origin)s::bigint AND r.last > %(after)s::bigint AND r.first <= %(after)s::bigint + %(rows)s::bigint
  AND r.first + i.nth - 1 > %(after)s::bigint AND r.first + i.nth - 1 <= %(after)s::bigint + %(rows)s::bigint
ORDER BY 1
""",
    columns=("bigint", "uuid"),
)
Sent = list[tuple[int, UUID]]


def reading_sent(schema: str, link: int, after: int, rows: int) -> Operation[Sent]:
    """Return, at the source, seq and message id of the `rows` rows after a seq, as far as they are there."""
    return list((yield SENT.at(schema=schema)(link=link, after=after, rows=rows)))


def reading_received(schema: str, origin: int, after: int, rows: int) -> Operation[Sent]:
    """Return the same, at the target, of what it has received."""
    return list((yield RECEIVED.at(schema=schema)(origin=origin, after=after, rows=rows)))


ROW = Sql(
    """
SELECT message_id, stamped_at, sent_clock FROM {schema}.transit WHERE link = %(link)s::bigint AND seq = %(seq)s::bigint
""",
    columns=("uuid", "timestamptz", "bigint"),
)


@dataclass(frozen=True, slots=True)
class Ending:
    """The row at which a target's receipts are to end: the source's, or one that an operator vouches for."""

    seq: int
    id: UUID
    stamped_at: datetime
    sent_clock: int


def reading_ending(schema: str, link: int, seq: int) -> Operation[Ending | None]:
    """Return, at the source, the row of a link with this seq."""
    rows = yield ROW.at(schema=schema)(link=link, seq=seq)
    return Ending(seq, *rows[0]) if rows else None


# -- At the target ----------------------------------------------------------------------------------------------------

HELD = Sql(
    """
SELECT o.name, o.incarnation, o.link, r.last, r.last_id, r.stamped_at, r.sent_clock
FROM {schema}.origin AS o LEFT JOIN LATERAL (
    SELECT last, last_id, stamped_at, sent_clock FROM {schema}.receipt WHERE origin = o.number
    ORDER BY last DESC LIMIT 1) AS r ON true
WHERE o.number = %(origin)s::bigint FOR UPDATE OF o
""",
    columns={
        "name": "text",
        "incarnation": "bigint",
        "link": "bigint",
        "last": "bigint",
        "last_id": "uuid",
        "stamped_at": "timestamptz",
        "sent_clock": "bigint",
    },
)
# A position by hand stands for rows that never came: they have no ids, and none is missing.
# D-links-12: What came by a link of another number becomes known before the dispatch lock is taken.
UNKNOWN = Sql(
    """
SELECT min(greatest(first, %(last)s::bigint + 1)), max(last) FROM {schema}.receipt
WHERE origin = %(origin)s::bigint AND last > %(last)s::bigint
  AND pg_catalog.cardinality(ids) = 0 AND last_id <> %(by_hand)s::uuid
""",
    columns=("bigint", "bigint"),
)
KNOW = Sql(
    """
WITH above AS (
    SELECT i.id FROM {schema}.receipt AS r, LATERAL pg_catalog.unnest(r.ids) WITH ORDINALITY AS i (id, nth)
    WHERE r.origin = %(origin)s::bigint AND r.last > %(last)s::bigint AND r.first + i.nth - 1 > %(last)s::bigint),
known AS (
    INSERT INTO {schema}.known AS k (origin, message_id) SELECT %(origin)s::bigint, id FROM above
    ON CONFLICT (origin, message_id) DO UPDATE SET link = NULL WHERE k.link IS NOT NULL)
SELECT count(*) FROM above
""",
    columns=("bigint",),
)
CUT = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.receipt WHERE origin = %(origin)s::bigint AND last > %(last)s::bigint RETURNING *)
INSERT INTO {schema}.receipt (origin, last, first, last_id, stamped_at, sent_clock, received_at, ids)
SELECT origin, %(last)s::bigint, first, %(id)s::uuid, %(stamped_at)s::timestamptz, %(sent_clock)s::bigint, received_at,
       ids[1:(%(last)s::bigint - first + 1)::integer]
FROM gone WHERE first <= %(last)s::bigint
"""
)
# Also of a receipt that ends there: the source may have stamped the same message again, at another time.
WITNESS = Sql(
    """
UPDATE {schema}.receipt
SET last_id = %(id)s::uuid, stamped_at = %(stamped_at)s::timestamptz, sent_clock = %(sent_clock)s::bigint
WHERE origin = %(origin)s::bigint AND last = %(last)s::bigint
"""
)
CUT_ALL = Sql("DELETE FROM {schema}.receipt WHERE origin = %(origin)s::bigint")
# What was shown stays: everything up to there has come, even from a lost history.
PIN = Sql(
    """
UPDATE {schema}.origin
SET incarnation = %(incarnation)s::bigint, state = CASE WHEN state = 'stopped' THEN 'open' ELSE state END,
    trouble = CASE WHEN state = 'stopped' THEN coalesce(trouble, 'failing') ELSE trouble END,
    shown = greatest(shown, %(shown)s::bigint)
WHERE number = %(origin)s::bigint
"""
)


@dataclass(frozen=True, slots=True)
class Newest:
    """What a target has of an origin, under the dispatch lock: name, incarnation, link and its newest receipt."""

    name: str
    incarnation: int | None
    link: int | None
    last: int
    last_id: UUID | None
    stamped_at: datetime | None
    sent_clock: int


def holding(schema: str, origin: int) -> Operation[Newest | None]:
    """Return what the target has of an origin, None if it is gone; nothing is received until the transaction ends."""
    yield DISPATCH_LOCK.at(schema=schema)()
    return (yield from reading_newest(schema, origin))


def reading_newest(schema: str, origin: int) -> Operation[Newest | None]:
    """Return the same without the dispatch lock; only the origin's row is locked."""
    rows = yield HELD.at(schema=schema)(origin=origin)
    if not rows:
        return None
    [found] = HELD.named(rows)
    return Newest(**found._asdict() | {"last": found.last or 0, "sent_clock": found.sent_clock or 0})


def finding_unknown(schema: str, origin: int, last: int) -> Operation[range]:
    """Return the seqs above `last` of which the target has received the messages, but no longer has the ids."""
    [(first, end)] = yield UNKNOWN.at(schema=schema)(origin=origin, last=last, by_hand=BY_HAND)
    return range(0) if first is None else range(first, end + 1)


def cutting_receipts(schema: str, origin: int, ending: Ending | None) -> Operation[int]:
    """Let the receipts end at that row (None: before the first one); return how many messages above become known.

    In a transaction that holds the dispatch lock (`holding`).
    """
    last = 0 if ending is None else ending.seq
    [(known,)] = yield KNOW.at(schema=schema)(origin=origin, last=last)
    if ending is None:
        yield CUT_ALL.at(schema=schema)(origin=origin)
    else:
        row = {"id": ending.id, "stamped_at": ending.stamped_at, "sent_clock": ending.sent_clock}
        yield CUT.at(schema=schema)(origin=origin, last=last, **row)
        yield WITNESS.at(schema=schema)(origin=origin, last=last, **row)
    return int(known)


def rewinding(schema: str, origin: int, seen: Newest, incarnation: int, ending: Ending | None) -> Operation[int | None]:
    """Go on with the source's new history, at the target, after a row that both have (None: from its first row on).

    One transaction, durable once it commits. What the target alone has becomes known, and is left out whenever it comes
    again; the receipts end at that row; the incarnation is noted, and a stopped origin is open again. Returns how many
    messages only the target has; None, and nothing is changed, if it no longer holds what was `seen`.
    """
    held = yield from holding(schema, origin)
    if held != seen:
        return None
    yield DURABLE.at()()
    known = yield from cutting_receipts(schema, origin, ending)
    yield PIN.at(schema=schema)(origin=origin, incarnation=incarnation, shown=seen.sent_clock)
    last = 0 if ending is None else ending.seq
    if known:
        why = f"incarnation {incarnation} of {held.name}: its history parted from what was received after seq {last}"
        yield from auditing(schema, acts.SOURCE_LOST, [(None, held.name, known)], DISPATCHER, why)
    return known
