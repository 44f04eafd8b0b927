"""`Archive` and `AsyncArchive`: find what was reaped or discarded from an inbox that keeps it, and replay it."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from inbox.order import finding_order
from mailroom.errors import ConfigurationError, InvalidMessage
from mailroom.message.columns import MESSAGE, MOVING, listed
from mailroom.message.message import COLUMNS, EXPRESSIONS, SELECTED, Message, messages
from mailroom.message.outgoing import aware
from mailroom.order.placing import making_room
from mailroom.schema import acts, finding
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql import locks
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.sight import seeing
from mailroom.values.names import DEFAULT_SCHEMA, Key, inbox_name, key_text, schema_name, topic_name
from mailroom.values.numbers import count_or_all

log = logging.getLogger("mailroom.choice")


@dataclass(frozen=True, slots=True)
class Reaped:
    """A message of the archive, as it was when it was reaped at `reaped_at`, by the database's clock.

    `discarded`: no consumer was handed it, since an operator discarded it then, from a parked key.
    """

    message: Message
    reaped_at: datetime
    discarded: bool = False


# What is put in by one statement of a claim has one time.
CHOSEN = """
    WHERE inbox = '{inbox}'
      AND (%(ids)s::uuid[] IS NULL OR message_id = ANY (%(ids)s::uuid[]))
      AND (%(key)s::text IS NULL OR key = %(key)s::text)
      AND (%(topic)s::text IS NULL OR topic = %(topic)s::text)
      AND reaped_at >= coalesce(%(since)s::timestamptz, '-infinity'::timestamptz)
      AND reaped_at < coalesce(%(until)s::timestamptz, 'infinity'::timestamptz)
    ORDER BY reaped_at, clock LIMIT %(limit)s::bigint"""
FIND = Sql(
    "SELECT {selected}, reaped_at, discarded FROM {schema}.reaped {chosen}",
    columns=COLUMNS | {"reaped_at": "timestamptz", "discarded": "boolean"},
    selected=SELECTED,
    chosen=CHOSEN,
)
# For who may not see what messages say: the values are not read.
NO_VALUES = {"value": "''::bytea", "value_json": "NULL::text"}
FIND_BARE = Sql(
    "SELECT {selected}, reaped_at, discarded FROM {schema}.reaped {chosen}",
    columns=COLUMNS | {"reaped_at": "timestamptz", "discarded": "boolean"},
    selected=", ".join((EXPRESSIONS | NO_VALUES).values()),
    chosen=CHOSEN,
)
MAY_SEE = Sql(
    "SELECT pg_catalog.has_column_privilege('{schema}.reaped'::regclass, 'value'::text, 'SELECT'::text)",
    columns=("boolean",),
)
COUNT = Sql(
    "SELECT count(*) FROM (SELECT FROM {schema}.reaped {chosen}) AS c",
    columns=("bigint",),
    chosen=CHOSEN,
)
SOURCE = "mailroom archive replay"  # the sender of what was replayed: an audit knows by it that no other inbox got it
# Straight into this inbox, as a dead letter that it skipped: by its topic others would get it too. A new message of
# this node, of now, in the order of the clocks that they had, which claims on several keys need not have kept. It asks
# for no second answer, and does not expire.
REPLAYED = listed(
    MOVING,
    message_id="pg_catalog.gen_random_uuid()",
    headers="""coalesce(headers, '{}'::jsonb) - 'reply_to'::text
           || pg_catalog.jsonb_build_object('causation', message_id)""",
    expires_at="NULL",
    after_clock="NULL",
    source=f"'{SOURCE}'::text",
    sent_at="statement_timestamp()",
)
REPLAY = Sql(
    """
WITH chosen AS MATERIALIZED (SELECT clock, {message} FROM {schema}.reaped {chosen}),
stamped AS MATERIALIZED (
    SELECT c.*, n.id AS here, %(base)s::bigint + row_number() OVER (ORDER BY c.clock) AS stamp
    FROM chosen AS c, {schema}.node AS n),
placed AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT '{inbox}', stamp, stamp, here, {replayed} FROM stamped ORDER BY key, stamp RETURNING key)
SELECT key, count(*), (SELECT setval('{schema}.clock'::regclass, max(stamp)) FROM stamped),
       pg_notify({channel}, '') IS NULL
FROM placed GROUP BY key ORDER BY key
""",
    columns=("text", "bigint", "bigint", "boolean"),
    message=MESSAGE,
    chosen=CHOSEN,
    replayed=REPLAYED,
    channel=locks.channel("'{schema}.inbox_{inbox}'::regclass"),
)


class _Operations:
    """The methods of both classes, as operations."""

    def __init__(self, inbox: str, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _find(
        self,
        ids: UUID | Collection[UUID] | None = None,
        *,
        key: Key | None = None,
        topic: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = 100,
        values: bool = True,
    ) -> Operation[list[Reaped]]:
        """Return messages that were reaped or discarded, the ones that were taken first first.

        Without `values` none is read, as for an auditor's role, which may not: then `value` of the messages raises
        `DecodeError`.
        """
        return self._finding(_chosen(ids, key, topic, since, until, limit), FIND if values else FIND_BARE)

    def _may_see_values(self) -> Operation[bool]:
        """Return whether this role may read what the messages say."""
        [(may,)] = yield MAY_SEE.at(schema=self.schema)()
        return bool(may)

    def _finding(self, chosen: dict[str, object], statement: Sql) -> Operation[list[Reaped]]:
        yield from seeing(self.schema, "reaped")
        rows = yield statement.at(**self._names)(**chosen)
        if not rows:
            # One that was dropped may have left some; of one that never was there can be none.
            yield from finding(self.schema, self.inbox)
        return [Reaped(message, *row[-2:]) for message, row in zip(messages(rows), rows, strict=True)]

    def _count(
        self,
        ids: UUID | Collection[UUID] | None = None,
        *,
        key: Key | None = None,
        topic: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Operation[int]:
        """Count messages that were reaped or discarded."""
        return self._counting(_chosen(ids, key, topic, since, until, None))

    def _counting(self, chosen: dict[str, object]) -> Operation[int]:
        yield from seeing(self.schema, "reaped")
        [(number,)] = yield COUNT.at(**self._names)(**chosen)
        if not number:
            yield from finding(self.schema, self.inbox)
        return int(number)

    def _replay(
        self,
        ids: UUID | Collection[UUID] | None = None,
        *,
        actor: str,
        key: Key | None = None,
        topic: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[int]:
        """Put messages that were reaped or discarded into the inbox again, as new ones, and return how many.

        Each has an id of its own, and the one that it repeats is its cause (header `causation`): so `mailroom.effects`
        of that one finds it. Content, topic, key and other headers are the same, but for `reply_to`: what was answered
        is not answered again. They come after the other messages of their keys, in the order of the clocks that they
        had, and only into this inbox. They do not expire. The archive keeps what it has, and nothing prevents a second
        replay: each call makes new messages.

        The node's dispatch lock is held until the caller commits, and nothing is delivered meanwhile: so commit soon.
        Raises `UnknownInbox`, and `ConfigurationError` for a total inbox, which gets no message that other nodes do
        not get.
        """
        check_actor(actor, why)
        chosen = _chosen(ids, key, topic, since, until, limit)
        return self._replaying(chosen, actor, why, dry_run)

    def _replaying(self, chosen: dict[str, object], actor: str, why: str | None, dry_run: bool) -> Operation[int]:
        yield IN_TRANSACTION
        order = yield from finding_order(self.schema, self.inbox)
        if order.traits.reads_log:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} reads a log, where what it has handled still stands: set it back "
                f"(mailroom inbox rewind {self.inbox} --to TIME).",
                code="MR-replay-of-log",
            )
        if not order.traits.takes_replays:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} has {order.traits.name} order, the same at all nodes, and gets no message by "
                "itself. Send anew what is needed (mailroom outbox send).",
                code="MR-replay-total-order",
            )
        number = yield from self._counting(chosen)
        if not number:
            log.warning("inbox %s: no reaped message is chosen", self.inbox)
        if dry_run or not number:
            return number
        yield from seeing(self.schema, "node", "inbox", "fan_out")
        base = yield from making_room(self.schema, number)
        # More may have been reaped since they were counted: there is room for no more.
        placed = yield REPLAY.at(**self._names)(base=base, **chosen | {"limit": number})
        counts = [(self.inbox, key, messages) for key, messages, _, _ in placed]
        yield from auditing(self.schema, acts.ARCHIVE_REPLAY, counts, actor, why)
        return sum(messages for _, _, messages in counts)

    @property
    def _names(self) -> dict[str, str]:
        return {"schema": self.schema, "inbox": self.inbox}


class Archive(_Operations):
    """What was reaped from an inbox that keeps it (`keep_reaped_days`). Threads may share an instance.

    A message is there if and only if the transaction that reaped it has committed, for as many whole days as the inbox
    kept what was reaped then; or the one that discarded it from a parked key (`Parked.discard`). What was parked,
    skipped or dropped is not there. An archive outlives its
    inbox; a renamed inbox takes it along.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. `ids` (one message id, several,
    or None for all), `key`, `topic`, `since` and `until` (when they were reaped, with time zone; from `since` on, and
    before `until`) choose messages, and `limit` takes those that were reaped first. `replay` makes its change in the
    caller's transaction and never commits; with `dry_run` it changes nothing and returns how many it would put in. It
    raises `NotInTransaction` on an autocommit connection outside a transaction. `actor` says who acts and `why` gives
    the reason; both are written to the table `audit`, one row per key.

    Raises `UnknownInbox` if there is no such inbox and nothing is left of it, and `InvalidMessage` for wrong arguments.
    """

    find = on_connection(_Operations._find)
    count = on_connection(_Operations._count)
    may_see_values = on_connection(_Operations._may_see_values)
    replay = on_connection(_Operations._replay)


class AsyncArchive(_Operations):
    """`Archive` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    find = on_async_connection(_Operations._find)
    count = on_async_connection(_Operations._count)
    may_see_values = on_async_connection(_Operations._may_see_values)
    replay = on_async_connection(_Operations._replay)


def _chosen(
    ids: UUID | Collection[UUID] | None, key: Key | None, topic: str | None, since: datetime | None,
    until: datetime | None, limit: int | None,
) -> dict[str, object]:  # fmt: skip
    return {
        "ids": None if ids is None else [_id(each) for each in (ids if isinstance(ids, Collection) else [ids])],
        "key": None if key is None else key_text(key),
        "topic": None if topic is None else topic_name(topic),
        "since": None if since is None else aware(since, "since"),
        "until": None if until is None else aware(until, "until"),
        "limit": count_or_all(limit, "limit"),
    }


def _id(given: UUID) -> UUID:
    if not isinstance(given, UUID):
        raise InvalidMessage(
            f"an id of a message must be a UUID, not {type(given).__name__}.", code="MR-invalid-argument"
        )
    return given
