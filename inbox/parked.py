"""`Parked` and `AsyncParked`: an operator looks at what is parked, and replays or discards it.

What that means for an inbox is its order's (`inbox.order`); see `inbox.by_key.parked_keys` and
`inbox.total_order.total_parked`.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from inbox.by_key.parked_keys import CHOSEN, Changed, ParkedKey
from inbox.by_key.peek import finding
from inbox.order import Order, finding_order
from mailroom.errors import ConfigurationError
from mailroom.figures.keys import IS_PARKED
from mailroom.message.answer import Undone, answering_undone
from mailroom.message.message import Message
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql, filled
from mailroom.values.names import DEFAULT_SCHEMA, Key, inbox_name, key_text, schema_name, utf8
from mailroom.values.numbers import count, count_or_all

log = logging.getLogger("mailroom.choice")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed attempt at a message: its number, counted from 1, and its `outcome` (retry, park or skip).

    A replay is listed too, with `outcome` replay and `attempt` 0: the attempts after it count from 1 again.
    """

    at: datetime
    key: str
    clock: int
    message_id: UUID
    attempt: int
    outcome: str
    error: str
    worker: str


ATTEMPTS = Sql(
    """
SELECT at, key, clock, message_id, attempt::bigint, outcome, error, worker FROM {schema}.attempt
WHERE inbox = '{inbox}' AND (%(key)s::text IS NULL OR key = %(key)s::text) ORDER BY id DESC LIMIT %(limit)s::bigint
""",
    columns=("timestamptz", "text", "bigint", "uuid", "bigint", "text", "text", "text"),
)
# Keys are locked in key order, as everywhere, so that two of these statements cannot deadlock.
LOCK = Sql(
    """
SELECT s.key FROM ({chosen}) AS c JOIN {schema}.key_state AS s ON s.inbox = '{inbox}' AND s.key = c.key
WHERE {is_parked} ORDER BY s.key FOR UPDATE OF s
""",
    columns=("text",),
    chosen=CHOSEN,
    is_parked=filled(IS_PARKED, row="s"),
)


def _discarding(order: Order, keys: list[str], per_key: int | None, actor: str, why: str | None) -> Operation[Changed]:
    rows = yield from order.discarding(keys, per_key)
    discarded = [each for each in rows if each.messages is not None]
    commands = (each for each in rows if each.messages is None)
    undone = [Undone.of(each.id, each.key, each.headers, each.error) for each in commands]
    yield from answering_undone(order.schema, undone)
    counts = [(order.inbox, each.key, each.messages) for each in discarded]
    yield from auditing(order.schema, acts.PARKED_DISCARD, counts, actor, why)
    messages, freed = (sum(getattr(each, name) for each in discarded) for name in ("messages", "is_free"))
    return Changed(len(keys), messages, freed)


class _Operations:
    """What both classes do, as operations."""

    def __init__(self, inbox: str, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _keys(
        self, keys: Key | Collection[Key] | None = None, *, matching: str | None = None, limit: int | None = 100
    ) -> Operation[list[ParkedKey]]:
        """Return at most `limit` parked keys (None: all), the longest parked first, and count their messages."""
        chosen = chosen_keys(keys, matching, limit)
        order = yield from self._order(keys)
        return (yield from order.listing_parked(chosen))

    def _messages(self, key: Key | None = None, limit: int = 10) -> Operation[list[Message]]:
        """Return the first messages that a parked key holds, in clock order; none if the key is not parked.

        Leave the key out for a total inbox, and give one for any other.
        """
        text, first = None if key is None else key_text(key), count(limit, "limit")
        order = yield from self._order(key)
        return (yield from order.reading_parked(text, first))

    def _attempts(self, key: Key | None = None, limit: int = 100) -> Operation[list[Attempt]]:
        """Return the failed attempts of one key or of all, parked or not, newest first. They are kept for 14 days."""
        text, last = None if key is None else key_text(key), count(limit, "limit")
        yield from finding(self.schema, self.inbox)
        return [Attempt(*row) for row in (yield ATTEMPTS.at(**self._names)(key=text, limit=last))]

    def _replay(
        self,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        matching: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[Changed]:
        """Put the messages of parked keys back into the inbox, in order; their attempts count from 1 again.

        At most `limit` keys are replayed, the longest parked first. A key that fails again is parked again. Commit
        soon: until then the floors of the inbox cannot rise.
        """
        check_actor(actor, why)
        chosen = chosen_keys(keys, matching, limit)
        yield IN_TRANSACTION
        if dry_run:
            found = yield from self._keys(keys, matching=matching, limit=limit)
            self._tell_of_none(found, keys, matching)
            return Changed(len(found), sum(each.messages for each in found), len(found))
        order = yield from self._order(keys)
        held = yield from self._locking(chosen)
        self._tell_of_none(held, keys, matching)
        if not held:
            return Changed(0, 0, 0)
        return (yield from order.replaying(held, actor, why))

    def _discard(
        self,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        matching: str | None = None,
        per_key: int | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[Changed]:
        """Delete messages of parked keys: of each key the first `per_key` messages, or all with None.

        An inbox that keeps what is reaped (`keep_reaped_days`) keeps these too, and `Archive.replay` makes new messages
        of them. From any other inbox they are gone for good.

        At most `limit` keys are chosen, the longest parked first. Of a total inbox the first `per_key` messages of all
        go. Commands among them that ask for a reply get one of status 500, in the same transaction.

        A key with no messages left is no longer parked. Any other key stays parked: to drop the bad message and
        continue with the next one, discard with `per_key=1`, then `replay`.
        """
        check_actor(actor, why)
        per_key = count_or_all(per_key, "per_key")
        chosen = chosen_keys(keys, matching, limit)
        yield IN_TRANSACTION
        if dry_run:
            numbers = [each.messages for each in (yield from self._keys(keys, matching=matching, limit=limit))]
            self._tell_of_none(numbers, keys, matching)
            doomed = [number if per_key is None else min(number, per_key) for number in numbers]
            return Changed(len(numbers), sum(doomed), sum(map(int.__eq__, numbers, doomed)))
        order = yield from self._order(keys)
        held = yield from self._locking(chosen)
        self._tell_of_none(held, keys, matching)
        if not held:
            return Changed(0, 0, 0)
        return (yield from _discarding(order, held, per_key, actor, why))

    def _order(self, keys: Key | Collection[Key] | None) -> Operation[Order]:
        order = yield from finding_order(self.schema, self.inbox)
        if keys is not None and not order.traits.parks_one:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} has {order.traits.name} order and is parked as a whole: leave the key out "
                "(--all).",
                code="MR-total-order-has-no-keys",
            )
        return order

    def _locking(self, chosen: dict[str, object]) -> Operation[list[str]]:
        return [key for (key,) in (yield LOCK.at(**self._names)(**chosen))]

    def _tell_of_none(self, found: Collection[object], keys: object, matching: str | None) -> None:
        if not found and not (keys is None and matching is None):
            log.warning("inbox %s: no parked key is chosen by these keys or this matching", self.inbox)

    @property
    def _names(self) -> dict[str, str]:
        return {"schema": self.schema, "inbox": self.inbox}


class Parked(_Operations):
    """The parked keys of one inbox. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. `replay` and `discard` make
    their changes in the caller's transaction and never commit; with `dry_run` they change nothing and return what they
    would do. `actor` says who acts and `why` gives the reason; both are written to the table `audit`, one row per key.
    `keys` is one key, several, or None for all parked keys; `matching` limits them to keys whose reason contains that
    text. `limit` is a number of keys. A choice by keys or `matching` that finds no parked key changes nothing, and a
    warning is logged. A total inbox is parked as a whole: for it, leave the keys out.

    Raises `UnknownInbox`. `replay` and `discard` raise `NotInTransaction` on an autocommit connection outside a
    transaction.
    """

    keys = on_connection(_Operations._keys)
    messages = on_connection(_Operations._messages)
    attempts = on_connection(_Operations._attempts)
    replay = on_connection(_Operations._replay)
    discard = on_connection(_Operations._discard)


class AsyncParked(_Operations):
    """`Parked` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    keys = on_async_connection(_Operations._keys)
    messages = on_async_connection(_Operations._messages)
    attempts = on_async_connection(_Operations._attempts)
    replay = on_async_connection(_Operations._replay)
    discard = on_async_connection(_Operations._discard)


def chosen_keys(keys: Key | Collection[Key] | None, matching: str | None, limit: int | None) -> dict[str, object]:
    """Return what statements are given of a choice of keys, checked."""
    if matching is not None:
        utf8(matching, "matching")
    texts = None if keys is None else list(_texts(keys))
    return {"keys": texts, "matching": matching, "limit": count_or_all(limit, "limit")}


def _texts(keys: Key | Collection[Key]) -> Iterator[str]:
    # A str is a Collection too, of its characters.
    if isinstance(keys, Collection) and not isinstance(keys, str):
        yield from map(key_text, keys)
    else:
        yield key_text(keys)
