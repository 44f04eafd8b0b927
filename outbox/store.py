"""The outbox of executables: the executor applies each of them exactly once instead of delivering it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, Unpack
from uuid import UUID

from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName
from mailroom.message.columns import EXECUTABLE_ROW
from mailroom.message.executable import ACCOUNTING, STORE
from mailroom.message.insert import Insert
from mailroom.message.outgoing import aware
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from mailroom.sql.sight import seeing
from mailroom.values.names import DEFAULT_SCHEMA, Key, executable_name, key_text, schema_name
from outbox.executable import Executable, Raw, row_of


class Options(TypedDict, total=False):
    """The optional fields of every executable.

    `notify` is the topic of the reply, a message with the outcome and with the executable's id as header `correlation`.
    `headers` map text to text; the reply carries over those that are carried (saga, user and so on). The reply is
    stamped later than `after_clock`. `id` is the executable's id, by default a new one.
    """

    notify: str | None
    headers: Mapping[str, str] | None
    after_clock: int | None
    id: UUID | None


@dataclass(frozen=True, slots=True)
class Books:
    """The totals of what was accounted: a count and a number of bytes."""

    count: int
    bytes: int


INSERT = Insert("outbox_executable", EXECUTABLE_ROW)


# A key may be absent, or hidden: the same statement says whether it can be hidden.
GET = Sql(
    """
SELECT value, number, row_security_active('{schema}.store'::regclass::oid)
FROM (SELECT) AS one LEFT JOIN {schema}.store ON key = %(key)s::text
""",
    columns=("bytea", "bigint", "boolean"),
)
BOOKS = Sql(
    """
SELECT coalesce(sum(count), 0::numeric)::text, coalesce(sum(bytes), 0::numeric)::text,
       row_security_active('{schema}.accounting'::regclass::oid)
FROM {schema}.accounting
WHERE key = %(key)s::text AND minute >= coalesce(%(since)s::timestamptz, '-infinity'::timestamptz)
  AND minute < coalesce(%(until)s::timestamptz, 'infinity'::timestamptz)
""",
    columns=("text", "text", "boolean"),  # the sum over all minutes may exceed 64 bits
)


def _executable(given: Executable) -> Executable:
    if not isinstance(given, Executable):
        raise InvalidMessage(f"It is a {type(given).__name__}: give an Executable.", code="MR-invalid-executable")
    return given


class _Target:
    """What the sync and the async class share: the node and the target they write to."""

    def __init__(self, *, schema: str = DEFAULT_SCHEMA, target: str = STORE) -> None:
        self.schema = schema_name(schema)
        self.target = executable_name(target)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r}, target={self.target!r})"

    def _write(self, executable: Executable) -> tuple[Operation[None], UUID]:
        row = row_of(executable)
        return INSERT.one(self.schema, row), row[0]

    def _write_many(self, executables: Iterable[Executable]) -> Operation[int]:
        # All are checked before the first is sent, so a bad one leaves the transaction unchanged.
        rows = []
        for nth, executable in enumerate(executables, start=1):
            try:
                rows.append(row_of(_executable(executable)))
            except (InvalidMessage, InvalidName) as error:
                text = f"Executable {nth}: {error} None of this call was sent."
                raise type(error)(text, code=error.code) from None
        return INSERT.all(self.schema, rows)

    def _get(self, key: Key) -> Operation[Raw | int | None]:
        if self.target != STORE:
            raise ConfigurationError(
                f"{self.target} is a table of your own: read it with SQL.", code="MR-store-not-kept"
            )
        text = key_text(key)
        [(value, number, may_be_hidden)] = yield GET.at(schema=self.schema)(key=text)
        if value is None and number is None and may_be_hidden:
            yield from seeing(self.schema, "store")
        return number if value is None else bytes(value)

    def _books(self, key: Key, since: datetime | None, until: datetime | None) -> Operation[Books]:
        bounds = {
            "since": None if since is None else aware(since, "since"),
            "until": None if until is None else aware(until, "until"),
        }
        [(count, size, may_be_hidden)] = yield BOOKS.at(schema=self.schema)(key=key_text(key), **bounds)
        if may_be_hidden:
            yield from seeing(self.schema, "accounting")
        return Books(int(count), int(size))


class Store(_Target):
    """Sends executables in the caller's transaction. The executor applies each exactly once, soon after the commit.

    Use it for changes that would contend for rows or be numerous: counters, accounting, entries of an index. Writers of
    one key do not wait for each other. Executables are applied in the order sent, with the same result as one after
    another; one that cannot be applied goes to `dead_letter` with the reason.

    One instance per node (`schema`) and target is enough; threads may share it. `target` is `store`, the node's own
    table of values and counters, or the name of a table of yours that an administrator has registered (`mailroom
    executor target add`). Every method that writes takes a psycopg connection or a SQLAlchemy `Connection` or
    `Session`, inserts rows in its current transaction and never commits; it returns the executable's id. Raises
    `InvalidMessage` for a value over a limit, and `NotInTransaction` on an autocommit connection outside a transaction.
    Errors of the driver pass through unchanged. `options` are described with `Options`.
    """

    def put(
        self,
        connection: AnyConnection,
        key: Key,
        value: Raw,
        *,
        expected: Raw | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """Set the value of `key`, at most 4 MiB; a counter becomes a value.

        With `expected`, only if the key holds that value (empty bytes: if the key is absent). If it does not, nothing
        changes, and the reply says so; without `notify` the executable goes to `dead_letter`.
        """
        operation, id = self._write(Executable("put", key, self.target, value=value, expected=expected, **options))
        run(connection, operation)
        return id

    def increment(self, connection: AnyConnection, key: Key, by: int = 1, **options: Unpack[Options]) -> UUID:
        """Add `by` to the counter `key`, which starts at 0; both are ints of 64 bits.

        If the sum exceeds 64 bits, or the key holds a value, this executable fails, and no other.
        """
        operation, id = self._write(Executable("increment", key, self.target, amount=by, **options))
        run(connection, operation)
        return id

    def delete(self, connection: AnyConnection, key: Key, **options: Unpack[Options]) -> UUID:
        """Delete the value or counter of `key`, if there is one."""
        operation, id = self._write(Executable("delete", key, self.target, **options))
        run(connection, operation)
        return id

    def delete_range(
        self,
        connection: AnyConnection,
        start: Key | None = None,
        end: Key | None = None,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """Delete the keys from `start` up to, but not including, `end`: at most `limit` of them, the lowest first.

        Omit `start` for the first key, `end` for no upper bound, `limit` for no limit. Keys are compared by their bytes
        in UTF-8; those of a table of yours, as its column compares them. Later executables wait for it. A large range
        is deleted in several transactions, and readers see the result of each.
        """
        operation, id = self._write(
            Executable("delete_range", start, self.target, end_key=end, row_limit=limit, **options)
        )
        run(connection, operation)
        return id

    def account(
        self,
        connection: AnyConnection,
        key: Key,
        count: int = 1,
        bytes: int = 0,
        at: datetime | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """Add `count` and `bytes` to the books of every successive prefix of `key`: for a/b/c these are a, a/b, a/b/c.

        There is a book per minute: that of `at` (an aware datetime), by default that of the send. `count` and `bytes`
        are ints of 64 bits and may be negative. If a sum exceeds 64 bits, this executable fails, and no other. A key
        has at most 32 levels.
        """
        operation, id = self._write(Executable("account", key, ACCOUNTING, amount=count, bytes=bytes, at=at, **options))
        run(connection, operation)
        return id

    def call(
        self,
        connection: AnyConnection,
        name: str,
        arguments: object = None,
        *,
        key: Key | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """Call the function that an administrator registered as `name` (`mailroom executor function add`).

        It gets `arguments`, any value that JSON can represent, at most 4 MiB, as one jsonb. The reply contains its
        result. If it raises an error, this executable fails, and no other. `key` is the key of the reply.
        """
        operation, id = self._write(Executable("call", key, name, arguments=arguments, **options))
        run(connection, operation)
        return id

    def send_many(self, connection: AnyConnection, executables: Iterable[Executable]) -> int:
        """Send many executables in order, by COPY if the driver can, and return how many.

        All are checked before the first is sent: a bad one raises `InvalidMessage` with its number.
        """
        return run(connection, self._write_many(executables))

    def get(self, connection: AnyConnection, key: Key) -> Raw | int | None:
        """Return the value or counter that `key` holds now, None if it is absent. It lacks what waits to be applied."""
        return run(connection, self._get(key))

    def books(
        self, connection: AnyConnection, key: Key, since: datetime | None = None, until: datetime | None = None
    ) -> Books:
        """Return the totals of `key` for the minutes that began at or after `since` and before `until`."""
        return run(connection, self._books(key, since, until))


class AsyncStore(_Target):
    """`Store` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    async def put(
        self,
        connection: AnyAsyncConnection,
        key: Key,
        value: Raw,
        *,
        expected: Raw | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """See `Store.put`."""
        operation, id = self._write(Executable("put", key, self.target, value=value, expected=expected, **options))
        await run_async(connection, operation)
        return id

    async def increment(
        self, connection: AnyAsyncConnection, key: Key, by: int = 1, **options: Unpack[Options]
    ) -> UUID:
        """See `Store.increment`."""
        operation, id = self._write(Executable("increment", key, self.target, amount=by, **options))
        await run_async(connection, operation)
        return id

    async def delete(self, connection: AnyAsyncConnection, key: Key, **options: Unpack[Options]) -> UUID:
        """See `Store.delete`."""
        operation, id = self._write(Executable("delete", key, self.target, **options))
        await run_async(connection, operation)
        return id

    async def delete_range(
        self,
        connection: AnyAsyncConnection,
        start: Key | None = None,
        end: Key | None = None,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """See `Store.delete_range`."""
        operation, id = self._write(
            Executable("delete_range", start, self.target, end_key=end, row_limit=limit, **options)
        )
        await run_async(connection, operation)
        return id

    async def account(
        self,
        connection: AnyAsyncConnection,
        key: Key,
        count: int = 1,
        bytes: int = 0,
        at: datetime | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """See `Store.account`."""
        operation, id = self._write(Executable("account", key, ACCOUNTING, amount=count, bytes=bytes, at=at, **options))
        await run_async(connection, operation)
        return id

    async def call(
        self,
        connection: AnyAsyncConnection,
        name: str,
        arguments: object = None,
        *,
        key: Key | None = None,
        **options: Unpack[Options],
    ) -> UUID:
        """See `Store.call`."""
        operation, id = self._write(Executable("call", key, name, arguments=arguments, **options))
        await run_async(connection, operation)
        return id

    async def send_many(self, connection: AnyAsyncConnection, executables: Iterable[Executable]) -> int:
        """See `Store.send_many`."""
        return await run_async(connection, self._write_many(executables))

    async def get(self, connection: AnyAsyncConnection, key: Key) -> Raw | int | None:
        """See `Store.get`."""
        return await run_async(connection, self._get(key))

    async def books(
        self, connection: AnyAsyncConnection, key: Key, since: datetime | None = None, until: datetime | None = None
    ) -> Books:
        """See `Store.books`."""
        return await run_async(connection, self._books(key, since, until))
