"""`FailingKeys` and `AsyncFailingKeys`: an operator looks at the keys that are tried again, and has them tried at once.

A failing key waits for its next attempt, longer after each one. Who has mended the cause need not wait: the key's time
becomes now, and nothing else of it changes. Its attempts go on counting, and its messages keep their order.
"""

from collections.abc import Collection

from inbox.by_key.parked_keys import NOTIFY
from inbox.order import finding_order
from inbox.parked import chosen_keys
from mailroom.errors import ConfigurationError
from mailroom.figures.failing_keys import (
    CHOSEN,
    WAITS,
    FailingError,
    FailingKey,
    reading_errors,
    reading_failing,
)
from mailroom.schema import acts, finding
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, Key, inbox_name, schema_name, utf8

# Keys are locked in key order, as everywhere. One whose time has come is left as it is: a worker may have it in hand.
OF_INBOX = f"s.inbox = '{{inbox}}' AND {WAITS}"
RETRY = Sql(
    """
WITH held AS MATERIALIZED (
    SELECT s.key FROM (
        SELECT s.key FROM {schema}.key_state AS s WHERE {waits} AND {chosen}
        ORDER BY s.retry_at, s.key LIMIT %(limit)s::bigint) AS c
    JOIN {schema}.key_state AS s ON s.key = c.key WHERE {waits} ORDER BY s.key FOR UPDATE OF s)
UPDATE {schema}.key_state AS k SET retry_at = clock_timestamp() FROM held AS h
WHERE k.inbox = '{inbox}' AND k.key = h.key RETURNING k.key
""",
    columns=("text",),
    waits=OF_INBOX,
    chosen=CHOSEN,
)
WOULD = Sql(
    "SELECT s.key FROM {schema}.key_state AS s WHERE {waits} AND {chosen} ORDER BY s.retry_at, s.key "
    "LIMIT %(limit)s::bigint",
    columns=("text",),
    waits=OF_INBOX,
    chosen=CHOSEN,
)


class _Operations:
    """What both classes do, as operations."""

    def __init__(self, inbox: str, *, schema: str = DEFAULT_SCHEMA) -> None:
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inbox!r}, schema={self.schema!r})"

    def _keys(
        self,
        keys: Key | Collection[Key] | None = None,
        *,
        matching: str | None = None,
        error: str | None = None,
        limit: int | None = 100,
    ) -> Operation[list[FailingKey]]:
        """Return at most `limit` failing keys (None: all), the one that is tried next first."""
        return self._finding(chosen_keys(keys, matching, limit), error)

    def _finding(self, chosen: dict[str, object], error: str | None) -> Operation[list[FailingKey]]:
        yield from finding(self.schema, self.inbox)
        return (yield from reading_failing(self.schema, self.inbox, error=error, **chosen))  # type: ignore[arg-type]

    def _errors(self, *, matching: str | None = None, limit: int | None = 100) -> Operation[list[FailingError]]:
        """Return with which errors keys fail, and how many of each; that of the most keys first.

        An error is what a failure begins with, up to the first colon. 100,000 failing keys are looked through.
        """
        chosen = chosen_keys(None, matching, limit)
        return self._grouping(chosen["matching"], chosen["limit"])

    def _grouping(self, matching: object, limit: object) -> Operation[list[FailingError]]:
        yield from finding(self.schema, self.inbox)
        return (yield from reading_errors(self.schema, self.inbox, matching=matching, limit=limit))  # type: ignore[arg-type]

    def _retry(
        self,
        keys: Key | Collection[Key] | None,
        *,
        actor: str,
        matching: str | None = None,
        error: str | None = None,
        limit: int | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[list[str]]:
        """Have failing keys tried at once instead of after their backoff; return which keys.

        Their attempts count on, and one that fails again waits longer than before. At most `limit` keys are chosen,
        those that would be tried next first. A key that is due already is none of them, nor one that waits for the
        breaker of its prefix (`Inbox.resume` closes that), nor one that is parked or paused.
        """
        check_actor(actor, why)
        if error is not None:
            utf8(error, "error")
        return self._retrying(chosen_keys(keys, matching, limit) | {"error": error}, keys, actor, why, dry_run)

    def _retrying(
        self, chosen: dict[str, object], keys: object, actor: str, why: str | None, dry_run: bool
    ) -> Operation[list[str]]:
        yield IN_TRANSACTION
        order = yield from finding_order(self.schema, self.inbox)
        if keys is not None and not order.traits.parks_one:
            raise ConfigurationError(
                f"Inbox {self.inbox!r} has {order.traits.name} order and fails as a whole: leave the key out (--all).",
                code="MR-total-order-has-no-keys",
            )
        names = {"schema": self.schema, "inbox": self.inbox}
        rows = yield (WOULD if dry_run else RETRY).at(**names)(**chosen)
        found = sorted(key for (key,) in rows)
        if found and not dry_run:
            about = [(self.inbox, key, 0) for key in found]
            yield from auditing(self.schema, acts.INBOX_RETRY, about, actor, why)
            yield NOTIFY.at(**names)()  # at the commit: sleeping workers look at once
        return found


class FailingKeys(_Operations):
    """The failing keys of one inbox: those that are tried again after a while. Threads may share an instance.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. `retry` makes its change in the
    caller's transaction and never commits; with `dry_run` it changes nothing. `actor` says who acts and `why` gives the
    reason; both are written to the table `audit`, one row per key. `keys` is one key, several, or None for all failing
    keys; `matching` limits them to those whose failure contains that text, and `error` to those whose failure is of
    this error, as `errors` lists them. A total inbox fails as a whole: for it, leave the keys out.

    Raises `UnknownInbox`. `retry` raises `NotInTransaction` on an autocommit connection outside a transaction.
    """

    keys = on_connection(_Operations._keys)
    errors = on_connection(_Operations._errors)
    retry = on_connection(_Operations._retry)


class AsyncFailingKeys(_Operations):
    """`FailingKeys` for async connections of psycopg and SQLAlchemy, and for `AsyncSession`."""

    keys = on_async_connection(_Operations._keys)
    errors = on_async_connection(_Operations._errors)
    retry = on_async_connection(_Operations._retry)
