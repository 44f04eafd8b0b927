"""Bridges out of a node: links of which a broker is the reader. What links have holds for them too."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from mailroom.bridges.settings import OutSettings, with_given
from mailroom.errors import ConfigurationError, UnknownBridge
from mailroom.links.handshake.hello import LinkTaken
from mailroom.links.readers import (
    LINK,
    MAX_ROWS,
    changing_link,
    giving_link,
    held,
    holding_link,
    link_settings,
    reading_settings,
)
from mailroom.message.columns import MESSAGE
from mailroom.order.clock import DURABLE
from mailroom.schema import acts
from mailroom.schema.audit import auditing, differences
from mailroom.schema.node import beginning_act
from mailroom.schema.otherwise import check_same
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import meant, node_name
from mailroom.values.numbers import whole

KEEP_S = 0.0  # what the broker has acknowledged is not kept any longer

TAKEN = Sql(
    """
SELECT b.settings::text
FROM {schema}.link AS l LEFT JOIN {schema}.bridge_out AS b ON b.link = l.number WHERE l.name = %(name)s::text
UNION ALL SELECT NULL FROM {schema}.origin AS o JOIN {schema}.bridge_in AS b ON b.origin = o.number
WHERE o.name = %(name)s::text
""",
    columns=("text",),
)
# No node says hello under this name: it would have to have this id. What a new link has published, is known: nothing.
BAR = Sql(
    "UPDATE {schema}.link AS l SET reader_id = gen_random_uuid(), matched = n.life FROM {schema}.node AS n "
    "WHERE l.number = %(link)s::bigint AND l.reader_id IS NULL"
)
ADD = Sql("INSERT INTO {schema}.bridge_out (link, settings) VALUES (%(link)s::bigint, %(settings)s::text::jsonb)")
# D-bridges-28: Other settings leave recorded trouble as it is.
CHANGE = Sql("UPDATE {schema}.bridge_out SET settings = %(settings)s::text::jsonb WHERE link = %(link)s::bigint")
WANT = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.link_topic WHERE link = %(link)s::bigint AND topic <> ALL (%(topics)s::text[]))
INSERT INTO {schema}.link_topic (link, topic) SELECT %(link)s::bigint, pg_catalog.unnest(%(topics)s::text[])
ON CONFLICT DO NOTHING
"""
)


# Another cluster counts anew. Who publishes to the one before acknowledges nothing more, and notes nothing.
ELSEWHERE = Sql(
    """
WITH left_behind AS (
    UPDATE {schema}.link SET run = NULL WHERE name = %(name)s::text RETURNING number)
DELETE FROM {schema}.bridge_last AS e USING left_behind AS l WHERE e.link = l.number
"""
)
FIXED = ("broker", "exactly_once", "mark_topic")


def bridging_out(schema: str, name: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[bool]:
    """`Bridges.out` as an operation, with what is given of the settings and of those of links."""
    node_name(name)
    given = _checked(given)
    yield from beginning_act(schema, actor, why)
    before = yield from _reading(schema, name)
    if before is None:
        settings = OutSettings.made(with_given({}, given))
        given_link = {"topics": ["#"], "keep_s": KEEP_S, **given}
        link = yield from giving_link(schema, name, given_link)
        if link is not None:
            yield BAR.at(schema=schema)(link=link)
            yield ADD.at(schema=schema)(link=link, settings=settings.text())
            yield WANT.at(schema=schema)(link=link, topics=given_link["topics"])
            change = differences(None, (yield from _reading(schema, name)) or {})
            yield from auditing(schema, acts.BRIDGE_OUT, [(None, name, 0)], actor, why, change)
            return True
        before = yield from _reading(schema, name)  # another session has just made it
    before = before or {}
    _, after = _changed(name, before, given)
    changed_by = f"mailroom bridge set {name}, or Bridges.set"
    check_same(f"Bridge {name}", before, after, changed_by, "MR-bridge-set-otherwise")
    return False


def setting_out(schema: str, name: str, given: Mapping[str, Any], *, actor: str, why: str | None) -> Operation[str]:
    """`Bridges.set` as an operation, for a bridge out. A dispatcher begins anew with it, and tells its trouble anew."""
    given = _checked(given)
    link = yield from holding_link(schema, name, given)
    before = yield from _reading(schema, name)
    if link is None or before is None:
        raise UnknownBridge(f"There is no bridge {name} out of this node. See: mailroom bridge status")
    settings, after = _changed(name, before, given)
    if before["address"] != after["address"]:
        yield ELSEWHERE.at(schema=schema)(name=name)
    yield from changing_link(schema, link, given)
    yield CHANGE.at(schema=schema)(link=link, settings=settings.text())
    if "topics" in given:
        yield WANT.at(schema=schema)(link=link, topics=given["topics"])
    if change := differences(before, after):
        yield from auditing(schema, acts.BRIDGE_SET, [(None, name, 0)], actor, why, change)
    return change


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in given.items() if name not in LINK}
    return others | link_settings(*(given.get(name) for name in LINK))


def _reading(schema: str, name: str) -> Operation[dict[str, Any] | None]:
    """Return the settings of a bridge out with those of its link, None if nothing has its name."""
    rows = yield TAKEN.at(schema=schema)(name=name)
    if not rows:
        return None
    if rows[0][0] is None:
        raise ConfigurationError(
            f"The node {name} reads this one, or a bridge of this name is there: this one needs another name.",
            code="MR-bridge-name-taken",
        )
    return OutSettings.of(rows[0][0]).flat() | ((yield from reading_settings(schema, name)) or {})


def _changed(name: str, before: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[OutSettings, dict[str, Any]]:
    """Return the settings that a bridge would have. Raises `ConfigurationError` for what cannot change.

    Those of the link alone change also where the broker's package is not installed.
    """
    settings = OutSettings.made(with_given(before, given), is_kept=given.keys() <= {*LINK})
    after = {**before, **settings.flat(), **held(given)}
    if any(before[each] != after[each] for each in FIXED):
        raise ConfigurationError(
            f"Bridge {name} has its mark elsewhere: the broker ({before['broker']}), exactly_once and mark_topic "
            f"cannot be changed. Make a bridge of another name, and then: mailroom bridge remove {name}",
            code="MR-bridge-settings",
        )
    return settings, after


@dataclass(frozen=True, slots=True)
class OutRow:
    """A bridge out, as its dispatcher reads it: its link and settings, and the node that it belongs to.

    What is to be published has seqs above `acked`. `marked_at` is when the mark at the broker was last set. If
    `is_well`, no trouble is recorded. `skips` counts the rows that somebody has skipped.
    """

    link: int
    name: str
    settings: OutSettings
    acked: int
    node_id: UUID
    node: str
    marked_at: datetime | None
    is_well: bool
    skips: int


OUTS = Sql(
    """
SELECT l.number, l.name, b.settings::text, l.acked, n.id, n.name, b.marked_at, b.why IS NULL, b.skips
FROM {schema}.bridge_out AS b JOIN {schema}.link AS l ON l.number = b.link CROSS JOIN {schema}.node AS n
WHERE l.state = 'open' AND (%(name)s::text IS NULL OR l.name = %(name)s::text) ORDER BY l.number
""",
    columns=("bigint", "text", "text", "bigint", "uuid", "text", "timestamptz", "boolean", "bigint"),
)


def reading_outs(schema: str, name: str | None = None) -> Operation[list[OutRow]]:
    """Return the bridges out of a node that are not cut; with `name` only that one."""
    return [
        OutRow(link, name, OutSettings.of(settings), *others)
        for link, name, settings, *others in (yield OUTS.at(schema=schema)(name=name))
    ]


def finding_out(schema: str, name: str, others: Collection[str] = ()) -> Operation[OutRow]:
    """Return the bridge out of that name. Raises `UnknownBridge` if there is none, or if it is cut.

    `others` are names which may have been meant too.
    """
    rows = yield from reading_outs(schema, node_name(name))
    if not rows:
        near = meant(name, {each.name for each in (yield from reading_outs(schema))} | {*others})
        raise UnknownBridge(
            f"There is no bridge {name} out of this node, or it is cut.{near} See: mailroom bridge status"
        )
    return rows[0]


@dataclass(frozen=True, slots=True)
class OutStart:
    """Where a run of a bridge begins: everything up to the row `acked`, stamped at `since` with `clock`, is published.

    If it is `in_doubt`, this node may have lost history since: what it stamps again may be published already.
    `is_known`: there are messages that are known to be; after `acked`, rows up to `ahead_to` may need no publishing.
    No clock above `reach` was given out by this node. `tried` is what the publisher had noted before it sent what was
    sent last, if it notes anything.
    """

    acked: int
    clock: int
    since: datetime
    in_doubt: bool
    is_known: bool
    ahead_to: int
    reach: int
    tried: str | None


# A run that publishes takes the link, as a reader does by its hello. The row `acked` stays until a newer one is.
TAKE = Sql(
    """
UPDATE {schema}.link AS l SET run = %(run)s::uuid, seen_at = clock_timestamp()
FROM {schema}.node AS n WHERE l.number = %(link)s::bigint AND l.state = 'open'
RETURNING l.acked,
    coalesce((SELECT t.sent_clock FROM {schema}.transit AS t WHERE t.link = l.number AND t.seq = l.acked), 0),
    coalesce((SELECT t.stamped_at FROM {schema}.transit AS t WHERE t.link = l.number AND t.seq = l.acked),
             l.created_at),
    l.matched IS DISTINCT FROM n.life,
    EXISTS (SELECT FROM {schema}.bridge_known AS k WHERE k.link = l.number),
    coalesce((SELECT max(d.seq) FROM {schema}.bridge_done AS d WHERE d.link = l.number), 0::bigint),
    greatest(n.clock_ceiling, (SELECT c.last_value FROM {schema}.clock AS c))
""",
    columns=("bigint", "bigint", "timestamptz", "boolean", "boolean", "bigint", "bigint"),
)
# A statement of its own: the one before may have waited for a run that noted just then what it sends.
TRIED = Sql("SELECT tried FROM {schema}.bridge_out WHERE link = %(link)s::bigint", columns=("text",))


def taking_link(schema: str, link: int, run: UUID) -> Operation[OutStart | None]:
    """Take the link for this run of a dispatcher; return where it begins, None if there is no open link."""
    rows = yield TAKE.at(schema=schema)(link=link, run=run)
    if not rows:
        return None
    [(tried,)] = yield TRIED.at(schema=schema)(link=link)
    return OutStart(*(*rows[0], tried))


# What the broker has and this node does not know to be published: it was stamped in a history that is lost, or waits.
# The same clock was given to the same message in one history only.
SETTLE = Sql(
    """
WITH lost AS (
    INSERT INTO {schema}.bridge_known (link, message_id)
    SELECT DISTINCT %(link)s::bigint, p.id
    FROM ROWS FROM (pg_catalog.unnest(%(ids)s::uuid[]), pg_catalog.unnest(%(clocks)s::bigint[])) AS p (id, clock)
    WHERE NOT EXISTS (SELECT FROM {schema}.transit AS t JOIN {schema}.link AS l ON l.number = t.link
                      WHERE t.link = %(link)s::bigint AND t.sent_clock = p.clock AND t.message_id = p.id
                        AND t.seq <= l.acked)
    ON CONFLICT DO NOTHING RETURNING 1),
matched AS (
    UPDATE {schema}.link AS l SET matched = n.life FROM {schema}.node AS n
    WHERE l.number = %(link)s::bigint AND l.run = %(run)s::uuid)
SELECT count(*) FROM lost
""",
    columns=("bigint",),
)
KNOWN = Sql(
    """
SELECT message_id FROM {schema}.bridge_known
WHERE link = %(link)s::bigint AND message_id = ANY (%(ids)s::uuid[])
""",
    columns=("uuid",),
)


def settling_doubt(schema: str, link: int, run: UUID, published: Collection[tuple[int, UUID]]) -> Operation[int]:
    """Note which of the messages that the broker has, each with its clock, this node would publish; return how many."""
    [(lost,)] = yield SETTLE.at(schema=schema)(
        link=link, run=run, ids=[id for _, id in published], clocks=[clock for clock, _ in published]
    )
    return int(lost)


# D-bridges-8: A node that was put back in time asks the broker what it has.
def knowing_published(schema: str, link: int, ids: Collection[UUID]) -> Operation[frozenset[UUID]]:
    """Return which of these messages were published in a history that this node has lost."""
    return frozenset(id for (id,) in (yield KNOWN.at(schema=schema)(link=link, ids=list(ids))))


# NULL if another run has the link.
FLUSH = Sql(
    """
SELECT clock_timestamp(), pg_catalog.pg_logical_emit_message(true, 'mailroom'::text, ''::text) IS NULL,
       (SELECT l.matched IS NOT DISTINCT FROM n.life FROM {schema}.link AS l CROSS JOIN {schema}.node AS n
        WHERE l.number = %(link)s::bigint AND l.run = %(run)s::uuid)
""",
    columns=("timestamptz", "boolean", "boolean"),
)


# D-bridges-4: Rows are made durable before they are published.
def making_published(schema: str, link: int, run: UUID) -> Operation[tuple[datetime, bool | None]]:
    """Make durable what was read for publishing, in a transaction that commits before.

    Returns the time of the database, and whether this node's history is still that in which the run began; None if
    another run has the link. What was stamped in a later one may be published already.

    A delivery commits synchronously if something leaves by it; a requeue of a dead letter may not. What a crash
    took back would come again with other clocks: a reader that compares clocks would take it for new.
    """
    yield DURABLE.at()()
    [(now, _, is_settled)] = yield FLUSH.at(schema=schema)(link=link, run=run)
    return now, is_settled


# The link stays this run's until it is noted: the next one reads what was sent last.
TRY = Sql(
    """
WITH held AS MATERIALIZED (
    SELECT number FROM {schema}.link WHERE number = %(link)s::bigint AND run = %(run)s::uuid FOR NO KEY UPDATE)
UPDATE {schema}.bridge_out AS b SET tried = %(tried)s::text FROM held AS h WHERE b.link = h.number RETURNING true
""",
    columns=("boolean",),
)


def noting_tried(schema: str, link: int, run: UUID, tried: str) -> Operation[bool]:
    """Record what is sent next, in the words of the publisher; return whether the link is still this run's."""
    return bool((yield TRY.at(schema=schema)(link=link, run=run, tried=tried)))


SINCE = "since = coalesce(b.since, clock_timestamp() - %(for_s)s::float8 * interval '1 second')"
NOTE = Sql(
    """
UPDATE {schema}.bridge_out AS b
SET state = CASE WHEN %(trouble)s::text IS NULL THEN 'stopped' ELSE 'open' END, trouble = %(trouble)s::text,
    why = %(why)s::text, {since}
WHERE link = %(link)s::bigint
  AND (b.state, b.trouble, b.why) IS DISTINCT FROM
      (CASE WHEN %(trouble)s::text IS NULL THEN 'stopped' ELSE 'open' END, %(trouble)s::text, %(why)s::text)
""",
    since=SINCE,
)
OPEN = Sql(
    """
UPDATE {schema}.bridge_out SET state = 'open', trouble = NULL, why = NULL, since = NULL
WHERE link = %(link)s::bigint AND (state <> 'open' OR why IS NOT NULL) AND lost IS NULL
"""
)
MARKED = Sql("UPDATE {schema}.bridge_out SET marked_at = clock_timestamp() WHERE link = %(link)s::bigint")


def noting_trouble(schema: str, link: int, trouble: str | None, why: str, for_s: float) -> Operation[None]:
    """Record why nothing is published, which has been so for this many seconds.

    `trouble` is unreachable, refused or failing; None if it is stopped.
    """
    yield NOTE.at(schema=schema)(link=link, trouble=trouble, why=why, for_s=for_s)


def noting_published(schema: str, link: int) -> Operation[None]:
    """Record that it is published again, unless the broker has lost records."""
    yield OPEN.at(schema=schema)(link=link)


MARK = Sql("SELECT marked FROM {schema}.bridge_out WHERE link = %(link)s::bigint", columns=("bigint",))
SET_MARK = Sql(
    """
UPDATE {schema}.bridge_out AS b SET marked = %(clock)s::bigint FROM {schema}.link AS l
WHERE b.link = %(link)s::bigint AND l.number = b.link AND l.run = %(run)s::uuid
"""
)


def reading_marked(schema: str, link: int) -> Operation[int]:
    """Return the mark that the broker is known to have had, 0 if none is."""
    rows = yield MARK.at(schema=schema)(link=link)
    return int(rows[0][0] or 0) if rows else 0


def noting_mark(schema: str, link: int, run: UUID, clock: int) -> Operation[None]:
    """Record up to which clock the broker has acknowledged with its mark what this run has published."""
    yield SET_MARK.at(schema=schema)(link=link, run=run, clock=clock)


def noting_marked(schema: str, link: int) -> Operation[None]:
    """Record that the broker's mark was set now."""
    yield MARKED.at(schema=schema)(link=link)


RESUME = Sql(
    """
UPDATE {schema}.bridge_out AS b
SET state = 'open', trouble = NULL, why = NULL, since = NULL, marked = NULL, lost = NULL
FROM {schema}.link AS l
WHERE l.number = b.link AND l.name = %(name)s::text AND (b.why IS NOT NULL OR b.lost IS NOT NULL) RETURNING true
""",
    columns=("boolean",),
)


def resuming_out(schema: str, name: str, *, actor: str, why: str | None) -> Operation[bool]:
    """`Bridges.resume` as an operation. A dispatcher sees it at its next look at the bridges."""
    was = yield RESUME.at(schema=schema)(name=name)
    if was:
        yield from auditing(schema, acts.BRIDGE_RESUME, [(None, name, 0)], actor, why)
    return bool(was)


# -- Rows that are published, or left out, before older ones are published -------------------------------------------

DONE = Sql(
    """
SELECT seq FROM {schema}.bridge_done
WHERE link = %(link)s::bigint AND seq > %(after)s::bigint AND seq <= %(to)s::bigint
""",
    columns=("bigint",),
)
ADVANCE = Sql(
    """
WITH held AS MATERIALIZED (
    SELECT number FROM {schema}.link WHERE number = %(link)s::bigint AND run = %(run)s::uuid FOR NO KEY UPDATE),
told AS MATERIALIZED (
    SELECT {schema}.link_acknowledge(h.number, %(run)s::uuid, %(acked)s::bigint) AS is_ours FROM held AS h),
done AS (
    INSERT INTO {schema}.bridge_done (link, seq) SELECT h.number, d.seq
    FROM held AS h CROSS JOIN pg_catalog.unnest(%(done)s::bigint[]) AS d (seq) ON CONFLICT DO NOTHING),
gone AS (
    DELETE FROM {schema}.bridge_done AS d USING held AS h WHERE d.link = h.number AND d.seq <= %(acked)s::bigint)
SELECT coalesce(pg_catalog.bool_and(is_ours), false) FROM told
""",
    columns=("boolean",),
)


def knowing_done(schema: str, link: int, after: int, to: int) -> Operation[frozenset[int]]:
    """Return which rows after `after` up to `to` need no publishing any more."""
    return frozenset(seq for (seq,) in (yield DONE.at(schema=schema)(link=link, after=after, to=to)))


def advancing(schema: str, link: int, run: UUID, acked: int, done: Collection[int]) -> Operation[bool]:
    """Acknowledge all rows up to `acked`, and those of `done` above it; return whether the link is this run's."""
    [(ours,)] = yield ADVANCE.at(schema=schema)(link=link, run=run, acked=acked, done=list(done))
    return bool(ours)


# The lock first, and then what is to be skipped: it may just have been noted that it is published.
HOLD = Sql(
    """
SELECT number, name FROM {schema}.link
WHERE number = %(link)s::bigint AND (%(run)s::uuid IS NULL OR run = %(run)s::uuid) FOR NO KEY UPDATE
""",
    columns=("bigint", "text"),
)
SKIP = Sql(
    """
WITH skipped AS (
    INSERT INTO {schema}.dead_letter (stage, reason, bridge, sent_clock, {message})
    SELECT 'publish', %(why)s::text, l.name, sent_clock, {message}
    FROM {schema}.transit AS t JOIN {schema}.link AS l ON l.number = t.link
    WHERE t.link = %(link)s::bigint AND t.seq = %(seq)s::bigint AND t.seq > l.acked AND t.kind <> 'H'
      AND NOT EXISTS (SELECT FROM {schema}.bridge_done AS d WHERE d.link = t.link AND d.seq = t.seq)
    RETURNING message_id),
done AS (
    INSERT INTO {schema}.bridge_done (link, seq) SELECT %(link)s::bigint, %(seq)s::bigint FROM skipped)
SELECT message_id FROM skipped
""",
    columns=("uuid",),
    message=MESSAGE,
)
SKIPPED = Sql(
    "UPDATE {schema}.bridge_out SET skips = skips + 1, state = 'open', trouble = NULL, why = NULL, since = NULL "
    "WHERE link = %(link)s::bigint"
)


def skipping(schema: str, link: int, run: UUID | None, seq: int, why: str) -> Operation[UUID | None]:
    """Let the message `seq` go to `dead_letter`, so that it is done; return its id, None if it is already done.

    Raises `LinkTaken` if another run than `run` has the link; None is anybody.
    """
    yield DURABLE.at()()
    if not (yield HOLD.at(schema=schema)(link=link, run=run)):
        raise LinkTaken("another dispatcher has the link now")
    rows = yield SKIP.at(schema=schema)(link=link, seq=seq, why=why)
    return rows[0][0] if rows else None


def skipping_row(schema: str, name: str, seq: int, *, actor: str, why: str | None) -> Operation[UUID]:
    """`Bridges.skip` as an operation. A dispatcher that has the row in hand begins anew."""
    whole(seq, "row", 1, MAX_ROWS, ConfigurationError)
    bridge = yield from finding_out(schema, name)
    told = f"bridge {name}: row {seq} was skipped by {actor}"
    message_id = yield from skipping(schema, bridge.link, None, seq, told if why is None else f"{told}: {why}")
    if message_id is None:
        raise ConfigurationError(
            f"Row {seq} does not wait for bridge {name}: it is published, or skipped, or there is none. See: mailroom "
            f"bridge show {name}",
            code="MR-bridge-no-row",
        )
    yield SKIPPED.at(schema=schema)(link=bridge.link)
    yield from auditing(schema, acts.BRIDGE_SKIP, [(None, name, 1)], actor, why, f"row {seq}")
    return message_id
