"""`Inbox` and `AsyncInbox`: reap messages in clock order, in the caller's transaction."""

from collections.abc import Sequence
from uuid import UUID

from inbox.claim import Claimed, Course, Share, reaping_any, reaping_key
from inbox.due import reaping_due
from inbox.peek import counting, finding, peeking
from inbox.total import reaping_total, reaping_total_due
from mailroom.errors import ConfigurationError
from mailroom.message import Message
from mailroom.names import DEFAULT_SCHEMA, Key, count, inbox_name, key_text, schema_name
from mailroom.sql.operation import Operation
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.total import is_total


class _Named:
    """The name of an inbox, and what `Inbox` and `AsyncInbox` share."""

    def __init__(self, name: str, schema: str = DEFAULT_SCHEMA) -> None:
        self.name = inbox_name(name)
        self.schema = schema_name(schema)
        self._is_total: bool | None = None  # None: not yet looked up
        self._course = Course()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, schema={self.schema!r})"

    @property
    def is_total(self) -> bool:
        """Whether the inbox has total order; False as long as no method was called."""
        return bool(self._is_total)

    def _reap(self, key: Key, limit: int) -> Operation[list[Message]]:
        text, most = key_text(key), count(limit, "limit")
        if (yield from self._looked_up()):
            raise ConfigurationError(
                f"Inbox {self.name!r} has total order, so no key can be reaped by itself: take the next messages, "
                "whatever their keys, with reap_any (mailroom inbox reap --any)."
            )
        return (yield from reaping_key(self.schema, self.name, text, most))

    def _reap_any(self, max_keys: int, per_key: int) -> Operation[list[Message]]:
        share = Share(count(max_keys, "max_keys"), count(per_key, "per_key"), max_keys * per_key)
        return (yield from self.claiming(share)).messages

    def claiming(self, share: Share) -> Operation[Claimed]:
        """Do what `reap_any` does, as an operation, within the bounds of `share`."""
        if (yield from self._looked_up()):
            return (yield from reaping_total(self.schema, self.name, share))
        claimed, self._course = yield from reaping_any(self.schema, self.name, share, self._course)
        return claimed

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """Take one message of a failing key that is due, or end it; take up to `limit` if none is suspected."""
        if (yield from self._looked_up()):
            return (yield from reaping_total_due(self.schema, self.name, hold=hold, mine=mine))
        return (yield from reaping_due(self.schema, self.name, limit, hold=hold, mine=mine))

    def _peek(self, key: Key | None, limit: int) -> Operation[list[Message]]:
        text, most = _text(key), count(limit, "limit")
        whole = yield from self._found()
        return (yield from peeking(self.schema, self.name, text, most, is_total=whole))

    def _backlog(self, key: Key | None) -> Operation[int]:
        text = _text(key)
        yield from self._found()
        return (yield from counting(self.schema, self.name, text))

    def _looked_up(self) -> Operation[bool]:
        """Return whether the inbox has total order. Raises `UnknownInbox`."""
        # Checked once per instance, and first: a statement that fails would abort the caller's transaction.
        return (yield from self._found()) if self._is_total is None else self._is_total

    def _found(self) -> Operation[bool]:
        """The same, looked up anew whether the inbox is there and seen whole, which each claim asks of the server."""
        yield from finding(self.schema, self.name)
        if self._is_total is None:
            self._is_total = yield from is_total(self.schema, self.name)
        return self._is_total


def _text(key: Key | None) -> str | None:
    return None if key is None else key_text(key)


class Inbox(_Named):
    """One inbox of a node. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. The messages that `reap` and
    `reap_any` return are consumed if and only if the caller's transaction commits. After a rollback they are in the
    inbox again, and no later message of their keys has overtaken them.

    Raises `UnknownInbox`, and `NotInTransaction` on an autocommit connection outside a transaction. Errors of the
    driver pass through unchanged; on 40001 and 40P01 retry the whole transaction.
    """

    def reap(self, connection: AnyConnection, key: Key, limit: int = 100) -> list[Message]:
        """Take up to `limit` of the key's oldest messages, in clock order; commit after the work, not before.

        Waits while another transaction works on the key. The list is empty if the key has no messages, or if it waits
        after a failure or is parked. Raises `ConfigurationError` for a total inbox, which has no queues of keys.
        """
        return run(connection, self._reap(key, limit))

    def reap_any(self, connection: AnyConnection, max_keys: int = 100, per_key: int = 10) -> list[Message]:
        """Take messages of up to `max_keys` keys, at most `per_key` of each, the longest waiting keys first.

        Never waits: keys that another transaction works on, that wait after a failure or that are parked are left out.
        The list is in clock order and holds the oldest messages of each key.

        Of a total inbox it takes up to `max_keys` times `per_key` messages, whatever their keys, by sent_clock; and
        none while another transaction works on the inbox.
        """
        return run(connection, self._reap_any(max_keys, per_key))

    def peek(self, connection: AnyConnection, key: Key | None = None, limit: int = 10) -> list[Message]:
        """Return the oldest messages of one key or of all, without taking them; a worker may be handling them."""
        return run(connection, self._peek(key, limit))

    def backlog(self, connection: AnyConnection, key: Key | None = None) -> int:
        """Count the waiting messages of one key or of all."""
        return run(connection, self._backlog(key))


class AsyncInbox(_Named):
    """`Inbox` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    async def reap(self, connection: AnyAsyncConnection, key: Key, limit: int = 100) -> list[Message]:
        """See `Inbox.reap`."""
        return await run_async(connection, self._reap(key, limit))

    async def reap_any(self, connection: AnyAsyncConnection, max_keys: int = 100, per_key: int = 10) -> list[Message]:
        """See `Inbox.reap_any`."""
        return await run_async(connection, self._reap_any(max_keys, per_key))

    async def peek(self, connection: AnyAsyncConnection, key: Key | None = None, limit: int = 10) -> list[Message]:
        """See `Inbox.peek`."""
        return await run_async(connection, self._peek(key, limit))

    async def backlog(self, connection: AnyAsyncConnection, key: Key | None = None) -> int:
        """See `Inbox.backlog`."""
        return await run_async(connection, self._backlog(key))
