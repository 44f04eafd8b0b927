"""Dead letters: single messages that could not be delivered or executed, or that an inbox skipped.

They are kept until an operator requeues or discards them.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias, get_args
from uuid import UUID

from mailroom.errors import ConfigurationError, DecodeError, InvalidMessage, UnknownBridge, UnknownInbox
from mailroom.logs.readers import locking_lanes
from mailroom.logs.writing import IS_INBOX, LOGGED, WOKEN_BY_LOGS
from mailroom.message.answer import ASKS, Undone, answering_undone
from mailroom.message.columns import MESSAGE, MESSAGE_PARTS, PARTS, listed
from mailroom.message.executable import NAMES, unwired
from mailroom.message.message import parsed
from mailroom.order.placing import making_room
from mailroom.order.traits import chosen
from mailroom.registry.routing import ORIGIN_LOG_ROUTE, ORIGIN_SINCE
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.schema.node import OfNode
from mailroom.sql import locks
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Row, Sql, filled
from mailroom.sql.sight import seeing
from mailroom.values import codec
from mailroom.values.names import inbox_name, utf8
from mailroom.values.numbers import MAX_INT64, count_or_all, whole

__all__ = [
    "AsyncDeadLetters",
    "DeadLetter",
    "DeadLetterContent",
    "DeadLetters",
]

log = logging.getLogger("mailroom.choice")

Stage: TypeAlias = Literal["deliver", "reap", "execute", "receive", "order", "publish", "take in"]
Change: TypeAlias = Callable[
    [list[Row]], Operation[acts.Act]
]  # changes the rows and returns the action's name for the audit


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter, without its value. `id` is its number in this table, `message_id` the id of the message.

    `stage` says where it failed. `deliver`: no inbox got it. `reap`: only `inbox` skipped it, where it had the clock
    `clock` and was tried `attempts` times; other inboxes have their own copies. `execute`: it is an executable that
    could not be applied; its `topic` is target and operation, such as store.put. `receive`: it came from another
    node, and no inbox got it. `order`: it came from another node too late for the total order of `inbox`. `publish`:
    the broker of the `bridge` refused it. `take in`: it came by the `bridge`, and no inbox got it; or it is a record
    that is not a message, and its value is the record's, as bytes.
    """

    id: int
    failed_at: datetime
    stage: str
    reason: str
    inbox: str | None
    clock: int | None
    attempts: int | None
    message_id: UUID
    topic: str
    key: str
    kind: str
    source: str | None
    sent_at: datetime
    expires_at: datetime | None
    bridge: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetterContent:
    """The content of a dead letter: its headers, and its value as sent (`raw`: CBOR, or JSON in UTF-8).

    The value of an executable is a map of its parts.
    """

    headers: Mapping[str, str]
    raw: bytes
    is_json: bool

    @property
    def value(self) -> Any:
        """The value, decoded. Raises `DecodeError` if the bytes are not a value."""
        return parsed(self.raw.decode()) if self.is_json else codec.decode(self.raw)


def content_of(headers: str | None, value: bytes, value_json: str | None) -> DeadLetterContent:
    """Return the content of a row that holds a message."""
    raw = value if value_json is None else value_json.encode()
    return DeadLetterContent(json.loads(headers or "{}"), raw, value_json is not None)


CHOSEN = """
    WHERE id > %(after)s::bigint AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s::bigint[]))
      AND (%(matching)s::text IS NULL OR position(%(matching)s::text IN reason) > 0)
      AND (%(stage)s::text IS NULL OR stage = %(stage)s::text)
      AND (%(inbox)s::text IS NULL OR inbox = %(inbox)s::text)
    ORDER BY id LIMIT %(limit)s::bigint"""
FIELDS = (
    "id, failed_at, stage, reason, inbox, clock, attempts::bigint, message_id, topic, key, kind::text, source, "
    "sent_at, expires_at, bridge"
)
TYPES = (
    *("bigint", "timestamptz", "text", "text", "text", "bigint", "bigint", "uuid", "text", "text", "text", "text"),
    *("timestamptz", "timestamptz", "text"),
)

FIND = Sql(
    "SELECT {fields} FROM {schema}.dead_letter {chosen}",
    columns=TYPES,
    fields=FIELDS,
    chosen=CHOSEN,
)
GET = Sql(
    "SELECT {fields}, headers::text, value, value_json::text FROM {schema}.dead_letter WHERE id = %(id)s::bigint",
    columns=(*TYPES, "text", "bytea", "text"),
    fields=FIELDS,
)
COUNT = Sql(
    "SELECT count(*) FROM (SELECT FROM {schema}.dead_letter {chosen}) AS m",
    columns=("bigint",),
    chosen=CHOSEN,
)
HOLD = Sql(
    "SELECT id, stage, inbox FROM {schema}.dead_letter {chosen} FOR UPDATE",
    columns=("bigint", "text", "text"),
    chosen=CHOSEN,
)

GONE = Sql(
    """
SELECT name FROM pg_catalog.unnest(%(inboxes)s::text[]) AS name
WHERE to_regclass('{schema}.inbox_' || name) IS NULL ORDER BY name LIMIT 1
""",
    columns=("text",),
)
# Back to the outbox, like a scheduled message that is due: there the deliver statement routes and stamps it, and the
# doorbell's trigger wakes the dispatcher.
SEND = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[]) RETURNING id, {message})
INSERT INTO {schema}.outbox ({message}) SELECT {message} FROM gone ORDER BY id
""",
    message=MESSAGE,
)
# Only into the inbox that skipped it, and with a new clock: it is ordered by the time of the requeue. One of another
# node keeps whose it is and its clock there.
PLACE = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[])
    RETURNING id, inbox, origin, sent_clock, {message}),
stamped AS MATERIALIZED (
    SELECT g.*, n.id AS here, %(base)s::bigint + row_number() OVER (ORDER BY g.id) AS clock
    FROM gone AS g, {schema}.node AS n),
placed AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT inbox, clock, CASE WHEN origin <> here THEN sent_clock ELSE clock END, coalesce(origin, here), {message}
    FROM stamped ORDER BY inbox, key, stamped.clock),
touched AS MATERIALIZED (
    SELECT DISTINCT to_regclass('{schema}.inbox_' || inbox) AS partition FROM stamped)
SELECT setval('{schema}.clock'::regclass, (SELECT max(clock) FROM stamped)),
       (SELECT pg_catalog.count(pg_notify({channel}, '')) FROM touched)
""",
    columns=("bigint", "bigint"),
    message=MESSAGE,
    channel=locks.channel("partition"),
)
# Of one other node, or of one bridge: routed by the subscriptions to it as they are now, with new clocks here. What
# no inbox wants dies again. A total inbox gets none: it would stand in another place than on other nodes.
RECEIVE_AGAIN = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[]) RETURNING id, origin, sent_clock, {message}),
source AS MATERIALIZED (
    SELECT name FROM {schema}.origin
    WHERE CASE WHEN %(bridge)s::text IS NULL THEN id = %(origin)s::uuid ELSE name = %(bridge)s::text END),
{route},
reach AS MATERIALIZED (
    SELECT g.id, g.kind, pg_catalog.count(r.inbox) FILTER (WHERE NOT is_bounded) AS inboxes,
           pg_catalog.count(r.inbox) AS receivers
    FROM gone AS g LEFT JOIN route AS r ON r.topic = g.topic AND g.sent_clock > {gets_since} GROUP BY g.id, g.kind),
stamped AS MATERIALIZED (
    SELECT g.*, %(base)s::bigint + row_number() OVER (ORDER BY g.id) AS clock, receivers,
           CASE WHEN expires_at <= clock_timestamp() THEN 'expired'
                WHEN g.kind = 'C' AND receivers > 1 THEN 'dead'
                WHEN inboxes > 0 THEN 'delivered'
                WHEN g.kind = 'E' AND receivers = 0 THEN 'unrouted'
                ELSE 'dead' END AS outcome
    FROM gone AS g JOIN reach USING (id)),
placed AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT r.inbox, clock, sent_clock, origin, {message} FROM stamped JOIN route AS r USING (topic)
    WHERE outcome = 'delivered' AND NOT is_bounded AND sent_clock > {gets_since} AND {is_inbox}
    ORDER BY r.inbox, key, clock
    RETURNING inbox),{logged}
dead AS (
    INSERT INTO {schema}.dead_letter (stage, bridge, reason, origin, sent_clock, {message})
    SELECT CASE WHEN %(bridge)s::text IS NULL THEN 'receive' ELSE 'take in' END, %(bridge)s::text,
           CASE WHEN kind = 'C' AND receivers > 1
                           THEN pg_catalog.format('a command needs exactly one inbox, its topic has %%s', receivers)
                           WHEN receivers > 0 THEN 'only inboxes in total order get this topic: send it anew'
                           ELSE 'no inbox gets this topic of that node' END, origin, sent_clock, {message}
    FROM stamped WHERE outcome = 'dead' ORDER BY id),
touched AS MATERIALIZED (
    SELECT DISTINCT to_regclass('{schema}.inbox_' || inbox) AS partition FROM placed)
SELECT setval('{schema}.clock'::regclass, (SELECT max(clock) FROM stamped)),
       (SELECT pg_catalog.count(pg_notify({channel}, '')) FROM touched){woken_by_logs}
""",
    columns=("bigint", "bigint"),
    route=ORIGIN_LOG_ROUTE,
    is_inbox=IS_INBOX,
    logged=filled(
        LOGGED,
        stamped="(SELECT * FROM stamped WHERE outcome = 'delivered') AS s",
        ways="(SELECT topic, inbox, lanes, segment FROM route) AS r",
        top="(SELECT max(clock) FROM stamped)",
    ),
    woken_by_logs=WOKEN_BY_LOGS,
    source="source",
    sent="gone",
    gets_since=ORIGIN_SINCE,
    message=MESSAGE,
    channel=locks.channel("partition"),
)
ORIGINS = Sql(
    "SELECT origin, bridge, pg_catalog.array_agg(id ORDER BY id) FROM {schema}.dead_letter "
    "WHERE id = ANY(%(ids)s::bigint[]) GROUP BY origin, bridge ORDER BY min(id)",
    columns=("uuid", "text", "bigint[]"),
)
# Behind what waits for the bridge, with a new clock: it is ordered by the time of the requeue.
PUBLISH_AGAIN = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[]) RETURNING id, bridge, {message}),
stamped AS MATERIALIZED (
    SELECT g.*, l.number AS link, %(base)s::bigint + row_number() OVER (ORDER BY g.id) AS clock,
           coalesce(n.seq, 0) + row_number() OVER (PARTITION BY l.number ORDER BY g.id) AS seq
    FROM gone AS g JOIN {schema}.link AS l ON l.name = g.bridge LEFT JOIN LATERAL (
        SELECT t.seq FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1) AS n ON true),
placed AS (
    INSERT INTO {schema}.transit (link, seq, sent_clock, stamped_at, {message})
    SELECT link, seq, clock, clock_timestamp(), {message} FROM stamped ORDER BY link, seq)
SELECT setval('{schema}.clock'::regclass, (SELECT max(clock) FROM stamped)),
       (SELECT pg_catalog.count(pg_notify({link_channel}, '')) FROM (SELECT DISTINCT link FROM stamped) AS s)
""",
    columns=("bigint", "bigint"),
    message=MESSAGE,
    link_channel=locks.link_channel("'{schema}.transit'::regclass", "link"),
)
BRIDGES_GONE = Sql(
    """
SELECT d.bridge FROM {schema}.dead_letter AS d WHERE d.id = ANY(%(ids)s::bigint[]) AND NOT EXISTS (
    SELECT FROM {schema}.link AS l JOIN {schema}.bridge_out AS b ON b.link = l.number
    WHERE l.name = d.bridge AND l.state = 'open') ORDER BY d.bridge LIMIT 1
""",
    columns=("text",),
)
# Again in a total inbox, a message would have another place there than at other nodes.
TAKES_NONE = Sql(
    """
SELECT name FROM {schema}.inbox_registry WHERE name = ANY(%(inboxes)s::text[]) AND {takes_none}
ORDER BY name LIMIT 1
""",
    columns=("text",),
    takes_none=chosen(takes_replays=False),
)
EXECUTABLES = Sql(
    "SELECT id, value FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[]) ORDER BY id",
    columns=("bigint", "bytea"),
)
# Back to the outbox of executables, after those that wait there. The other columns never leave the database.
EXECUTE = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(id)s::bigint[])
    RETURNING id, message_id, {kept})
INSERT INTO {schema}.outbox_executable ({names}, message_id, {kept})
SELECT {taken}, message_id, {kept}
FROM gone JOIN unnest(%(id)s::bigint[], {given}) AS parts (id, {names}) USING (id)
ORDER BY id
""",
    names=listed(PARTS),
    kept=listed(MESSAGE_PARTS),
    taken=", ".join(
        {"target": "coalesce(target, 'store')", "key": "coalesce(key, '')"}.get(part.name) or part.taken()
        for part in PARTS
    ),
    given=", ".join(f"%({part.name})s::{part.plain}[]" for part in PARTS),
)
# psycopg sends arrays as text. With other settings, nulls and bytes in them would change.
LITERALS = Sql(
    "SELECT current_setting('array_nulls'), current_setting('standard_conforming_strings'), "
    "set_config('array_nulls', %(nulls)s::text, true), "
    "set_config('standard_conforming_strings', %(strings)s::text, true)",
    columns=("text", "text", "text", "text"),
)
# One that an inbox skipped was answered then, and has lost its reply_to.
DISCARD = Sql(
    """
WITH gone AS (
    DELETE FROM {schema}.dead_letter WHERE id = ANY(%(ids)s::bigint[])
    RETURNING id, message_id, key, kind, headers)
SELECT message_id, key, headers::text FROM gone WHERE {asks} ORDER BY id
""",
    columns=("uuid", "text", "text"),
    asks=ASKS,
)


READ = ("dead_letter",)
CHANGED = ("node", "inbox", "inbox_registry", "subscription", "origin", "fan_out")  # or read to know what to change


class _Operations(OfNode):
    """The methods of both classes, as operations."""

    def _find(
        self,
        ids: int | Collection[int] | None = None,
        *,
        matching: str | None = None,
        stage: Stage | None = None,
        inbox: str | None = None,
        limit: int | None = 100,
        after: int = 0,
    ) -> Operation[list[DeadLetter]]:
        """Return dead letters, oldest first; those with a number up to `after` are left out, to go on after a list."""
        chosen = _chosen(ids, matching, stage, inbox, limit) | {"after": whole(after, "after", 0, MAX_INT64)}
        yield from seeing(self.schema, *READ)
        return [DeadLetter(*row) for row in (yield FIND.at(schema=self.schema)(**chosen))]

    def _get(self, id: int) -> Operation[tuple[DeadLetter, DeadLetterContent] | None]:
        """Return one dead letter with its content, or None if there is none with this number."""
        number = _id(id)
        yield from seeing(self.schema, *READ)
        rows = yield GET.at(schema=self.schema)(id=number)
        if not rows:
            return None
        [(*fields, headers, value, value_json)] = rows
        return DeadLetter(*fields), content_of(headers, value, value_json)

    def _requeue(
        self,
        ids: int | Collection[int] | None,
        *,
        actor: str,
        matching: str | None = None,
        stage: Stage | None = None,
        inbox: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[int]:
        """Send dead letters again, with their own message ids, and return how many.

        One that was not delivered goes back to the outbox and is routed again; if it has expired, it is dropped there.
        An executable goes back to the outbox of executables, after those that wait there. One that an inbox skipped
        goes into that inbox only, after the other messages of its key. For those, the node's dispatch lock is held
        until the caller commits, and nothing is delivered meanwhile: so commit soon. One that came from another node is
        routed again by the subscriptions to that node, with the same lock, and keeps its origin and sent_clock; so is
        one that came by a bridge. One that a bridge could not publish goes after what waits for that bridge. No inbox
        in total order gets any. Raises `UnknownInbox` if an inbox that skipped some is gone, `UnknownBridge` if such a
        bridge is, `ConfigurationError` if the inbox is in total order, and `DecodeError` for an executable that this
        release cannot read; then nothing is requeued.
        """
        chosen = _chosen(ids, matching, stage, inbox, limit)
        return (yield from self._changing(self._requeueing, chosen, actor, why, dry_run))

    def _discard(
        self,
        ids: int | Collection[int] | None,
        *,
        actor: str,
        matching: str | None = None,
        stage: Stage | None = None,
        inbox: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[int]:
        """Delete dead letters for good and return how many; commands that ask for an answer get status 500."""
        chosen = _chosen(ids, matching, stage, inbox, limit)
        return (yield from self._changing(self._discarding, chosen, actor, why, dry_run))

    def _changing(
        self, change: Change, chosen: dict[str, object], actor: str, why: str | None, dry_run: bool
    ) -> Operation[int]:
        check_actor(actor, why)
        yield IN_TRANSACTION
        yield from seeing(self.schema, *READ, *(() if dry_run else CHANGED))
        if dry_run:
            [(number,)] = yield COUNT.at(schema=self.schema)(**chosen)
            _tell_of_none(number, chosen)
            return int(number)
        held: list[Row] = yield HOLD.at(schema=self.schema)(**chosen)
        _tell_of_none(len(held), chosen)
        act = yield from change(held)
        changes = [(inbox, None, number) for inbox, number in Counter(inbox for _, _, inbox in held).items()]
        yield from auditing(self.schema, act, changes, actor, why)
        return len(held)

    def _requeueing(self, held: list[Row]) -> Operation[acts.Act]:
        executables = yield from self._reading_executables([id for id, stage, _ in held if stage == "execute"])
        skipped = [(id, inbox) for id, _, inbox in held if inbox is not None]
        if skipped:
            yield from self._placing([id for id, _ in skipped], sorted({inbox for _, inbox in skipped}))
        if received := [id for id, stage, inbox in held if inbox is None and stage in ("receive", "take in")]:
            for origin, bridge, ids in (yield ORIGINS.at(schema=self.schema)(ids=received)):
                base = yield from making_room(self.schema, len(ids))
                yield RECEIVE_AGAIN.at(schema=self.schema)(ids=ids, origin=origin, bridge=bridge, base=base)
        if unpublished := [id for id, stage, _ in held if stage == "publish"]:
            yield from self._publishing(unpublished)
        if undelivered := [id for id, stage, inbox in held if inbox is None and stage in ("deliver", "order")]:
            yield SEND.at(schema=self.schema)(ids=undelivered)
        if executables:
            columns: dict[str, object] = {name: [each[name] for each in executables] for name in ("id", *NAMES)}
            [(nulls, strings, *_)] = yield LITERALS.at()(nulls="on", strings="on")
            yield EXECUTE.at(schema=self.schema)(**columns)
            yield LITERALS.at()(nulls=nulls, strings=strings)
        return acts.DEAD_LETTER_REQUEUE

    def _reading_executables(self, ids: list[int]) -> Operation[list[dict[str, Any]]]:
        """Return the parts of executables. If one cannot be read, raise before anything is written."""
        rows = (yield EXECUTABLES.at(schema=self.schema)(ids=ids)) if ids else []
        found = []
        for id, raw in rows:
            try:
                found.append({"id": id} | unwired(b"" if raw is None else bytes(raw)))
            except DecodeError as error:
                raise DecodeError(
                    f"Dead letter {id} cannot be requeued, and none was: {error} Upgrade, leave it out (ids), or "
                    "discard it.",
                    code="MR-executable-unknown",
                ) from None
        return found

    def _placing(self, ids: list[int], inboxes: list[str]) -> Operation[None]:
        if gone := (yield GONE.at(schema=self.schema)(inboxes=inboxes)):
            raise UnknownInbox(
                f"Inbox {gone[0][0]!r}, which skipped some of these messages, is gone. Leave them out (--inbox, ids), "
                "or discard them.",
                code="MR-dead-letter-inbox-gone",
            )
        if refusing := (yield TAKES_NONE.at(schema=self.schema)(inboxes=inboxes)):
            raise ConfigurationError(
                f"Inbox {refusing[0][0]!r} is in total order, and gets no dead letter again. Leave its messages out "
                "(--inbox, ids), and send anew what it needs.",
                code="MR-dead-letter-total-order",
            )
        yield from locking_lanes(self.schema, inboxes, ids)
        base = yield from making_room(self.schema, len(ids))
        yield PLACE.at(schema=self.schema)(ids=ids, base=base)

    def _publishing(self, ids: list[int]) -> Operation[None]:
        if gone := (yield BRIDGES_GONE.at(schema=self.schema)(ids=ids)):
            raise UnknownBridge(
                f"Bridge {gone[0][0]}, which could not publish some of these messages, is gone or cut. Leave them out "
                "(--stage, ids), or discard them."
            )
        base = yield from making_room(self.schema, len(ids))
        yield PUBLISH_AGAIN.at(schema=self.schema)(ids=ids, base=base)

    def _discarding(self, held: list[Row]) -> Operation[acts.Act]:
        commands = yield DISCARD.at(schema=self.schema)(ids=[id for id, _, _ in held])
        yield from answering_undone(self.schema, [Undone.of(*row) for row in commands])
        return acts.DEAD_LETTER_DISCARD


class DeadLetters(_Operations):
    """The dead letters of a node. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. `requeue` and `discard` make
    their changes in the caller's transaction and never commit; with `dry_run` they change nothing and return how many
    they would change. They raise `NotInTransaction` on an autocommit connection outside a transaction. `actor` says who
    acts and `why` gives the reason; both are written to the table `audit`. `ids` is one number, several, or None for
    all. `matching` (those whose reason contains that text), `stage` and `inbox` limit them, and `limit` takes the
    oldest ones. A choice that finds none changes nothing, and a warning is logged.
    """

    find = on_connection(_Operations._find)
    get = on_connection(_Operations._get)
    requeue = on_connection(_Operations._requeue)
    discard = on_connection(_Operations._discard)


class AsyncDeadLetters(_Operations):
    """`DeadLetters` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection`, `AsyncSession`."""

    find = on_async_connection(_Operations._find)
    get = on_async_connection(_Operations._get)
    requeue = on_async_connection(_Operations._requeue)
    discard = on_async_connection(_Operations._discard)


def _chosen(
    ids: int | Collection[int] | None, matching: str | None, stage: str | None, inbox: str | None, limit: int | None
) -> dict[str, object]:
    if matching is not None:
        utf8(matching, "matching")
    if stage is not None and stage not in get_args(Stage):
        raise InvalidMessage(
            f"stage is {stage!r}; give one of {', '.join(map(repr, get_args(Stage)))}.", code="MR-invalid-argument"
        )
    return {
        "ids": None if ids is None else [_id(each) for each in (ids if isinstance(ids, Collection) else [ids])],
        "matching": matching,
        "stage": stage,
        "inbox": None if inbox is None else inbox_name(inbox),
        "limit": count_or_all(limit, "limit"),
        "after": 0,
    }


def _tell_of_none(number: int, chosen: dict[str, object]) -> None:
    if not number and any(chosen[name] is not None for name in ("ids", "matching", "stage", "inbox")):
        log.warning("no dead letter is chosen by these ids, this matching, stage or inbox")


def _id(number: int) -> int:
    return whole(number, "the id of a dead letter", 1, MAX_INT64)
