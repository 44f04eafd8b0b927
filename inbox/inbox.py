"""`Inbox` and `AsyncInbox`: reap messages in clock order, in the caller's transaction."""

from inbox.by_key.claim import Share
from inbox.named import Named
from mailroom.message.message import Message
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import Operation
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.values.names import Key, key_text
from mailroom.values.numbers import count


class _Reaped(Named):
    """What `Inbox` and `AsyncInbox` do with its messages."""

    def _reap(self, key: Key, limit: int) -> Operation[list[Message]]:
        text, most = key_text(key), count(limit, "limit")
        return (yield from self._claims.claiming_key(text, most))

    def _reap_any(self, max_keys: int, per_key: int) -> Operation[list[Message]]:
        share = Share(count(max_keys, "max_keys"), count(per_key, "per_key"), max_keys * per_key)
        return (yield from self._claims.claiming(share)).messages

    def _peek(self, key: Key | None, limit: int) -> Operation[list[Message]]:
        text, most = _text(key), count(limit, "limit")
        order = yield from self._claims.finding()
        return (yield from order.peeking(text, most))

    def _backlog(self, key: Key | None) -> Operation[int]:
        text = _text(key)
        order = yield from self._claims.finding()
        return (yield from order.counting(text))


def _text(key: Key | None) -> str | None:
    return None if key is None else key_text(key)


class Inbox(_Reaped):
    """One inbox of a node. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. The messages that `reap` and
    `reap_any` return are consumed if and only if the caller's transaction commits. After a rollback they are in the
    inbox again, and no later message of their keys has overtaken them.

    Raises `UnknownInbox`, and `NotInTransaction` on an autocommit connection outside a transaction. Errors of the
    driver pass through unchanged; on 40001 and 40P01 retry the whole transaction.
    """

    create = on_connection(_Reaped._create)
    set = on_connection(_Reaped._set)
    subscribe = on_connection(_Reaped._subscribe)
    unsubscribe = on_connection(_Reaped._unsubscribe)
    pause = on_connection(_Reaped._pause)
    resume = on_connection(_Reaped._resume)
    paused_keys = on_connection(_Reaped._paused_keys)
    wait_for_batches = on_connection(_Reaped._wait_for_batches)
    rewind = on_connection(_Reaped._rewind)
    rename = on_connection(_Reaped._rename)
    drop = on_connection(_Reaped._drop)

    def reap(self, connection: AnyConnection, key: Key, limit: int = 100) -> list[Message]:
        """Take up to `limit` of the key's oldest messages, in clock order; commit after the work, not before.

        Waits while another transaction works on the key. The list is empty if the key has no messages, if it waits
        after a failure or is parked, and while it or the inbox is paused. Raises `ConfigurationError` for a total
        inbox and for one that reads a log, which have no queues of keys.
        """
        return run(connection, self._reap(key, limit))

    def reap_any(self, connection: AnyConnection, max_keys: int = 100, per_key: int = 10) -> list[Message]:
        """Take messages of up to `max_keys` keys, at most `per_key` of each, the longest waiting keys first.

        Never waits: keys that another transaction works on, that wait after a failure or that are parked or paused are
        left out. The list is in clock order and holds the oldest messages of each key; while the inbox is paused it is
        empty.

        Of a total inbox it takes up to `max_keys` times `per_key` messages, whatever their keys, by sent_clock; and
        none while another transaction works on the inbox. Of an inbox that reads a log it takes as many, of lanes that
        no other transaction reads, in a transaction of READ COMMITTED only.
        """
        return run(connection, self._reap_any(max_keys, per_key))

    def peek(self, connection: AnyConnection, key: Key | None = None, limit: int = 10) -> list[Message]:
        """Return the oldest messages of one key or of all, without taking them; a worker may be handling them."""
        return run(connection, self._peek(key, limit))

    def backlog(self, connection: AnyConnection, key: Key | None = None) -> int:
        """Count the waiting messages of one key or of all."""
        return run(connection, self._backlog(key))


class AsyncInbox(_Reaped):
    """`Inbox` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    create = on_async_connection(_Reaped._create)
    set = on_async_connection(_Reaped._set)
    subscribe = on_async_connection(_Reaped._subscribe)
    unsubscribe = on_async_connection(_Reaped._unsubscribe)
    pause = on_async_connection(_Reaped._pause)
    resume = on_async_connection(_Reaped._resume)
    paused_keys = on_async_connection(_Reaped._paused_keys)
    wait_for_batches = on_async_connection(_Reaped._wait_for_batches)
    rewind = on_async_connection(_Reaped._rewind)
    rename = on_async_connection(_Reaped._rename)
    drop = on_async_connection(_Reaped._drop)

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
