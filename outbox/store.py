"""The outbox of executables: the executor applies each of them exactly once, instead of delivering it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, Unpack
from uuid import UUID

from mailroom.errors import ConfigurationError, InvalidMessage, InvalidName
from mailroom.executable import ACCOUNTING, STORE
from mailroom.names import DEFAULT_SCHEMA, Key, executable_name, key_text, schema_name
from mailroom.sql.operation import IN_TRANSACTION, Fill, Operation, Row, Sql
from mailroom.sql.runner import AnyAsyncConnection, AnyConnection, run, run_async
from outbox.executable import COLUMNS, Executable, Raw
from outbox.outgoing import aware


class Told(TypedDict, total=False):
    """What every executable may be given besides.

    `notify` is the topic of the message that tells the outcome, a reply with the executable's id as header
    `correlation`; `headers` are text to text, of which saga, user and tenant go on to that message, and `after_clock`
    is a clock that it is stamped later than. `id` is the executable's id, a fresh one if not given.
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


NAMES = ", ".join(name for name, _ in COLUMNS)
COPY = Sql(
    "COPY {schema}.outbox_executable ({names}) FROM STDIN (FORMAT binary)",
    names=NAMES,
)
# Ordered, because positions are assigned row by row.
UNNEST = Sql(
    "INSERT INTO {schema}.outbox_executable ({names}) "
    "SELECT message_id, version::smallint, operation, target, key, end_key, value, amount, bytes, expected, "
    "arguments::jsonb, at, row_limit, notify, headers::jsonb, after_clock FROM unnest("
    "%(message_id)s::uuid[], %(version)s::bigint[], %(operation)s::text[], %(target)s::text[], %(key)s::text[], "
    "%(end_key)s::text[], %(value)s::bytea[], %(amount)s::bigint[], %(bytes)s::bigint[], %(expected)s::bytea[], "
    "%(arguments)s::text[], %(at)s::timestamptz[], %(row_limit)s::bigint[], %(notify)s::text[], "
    "%(headers)s::text[], %(after_clock)s::bigint[]) WITH ORDINALITY AS rows ({names}, nth) ORDER BY nth",
    names=NAMES,
)
# Only the columns that a row has are sent; each set of columns has its own prepared statement.
INSERT = Sql("INSERT INTO {schema}.outbox_executable ({given}) VALUES ({values})")
# The parameter types of columns whose own type drivers do not bind.
CAST = {"jsonb": "text::jsonb", "smallint": "bigint"}
VALUES = {name: f"%({name})s::{CAST.get(kind, kind)}" for name, kind in COLUMNS}


def _writing(schema: str, row: Row) -> Operation[None]:
    given = {name: value for (name, _), value in zip(COLUMNS, row, strict=True) if value is not None}
    yield IN_TRANSACTION
    insert = INSERT.at(schema=schema, given=", ".join(given), values=", ".join(VALUES[name] for name in given))
    yield insert(**given)


def writing_many(schema: str, rows: list[Row]) -> Operation[int]:
    """Insert rows of `Executable.row` in order; return how many."""
    yield IN_TRANSACTION
    if rows:
        yield Fill(COPY.at(schema=schema), UNNEST.at(schema=schema), COLUMNS, rows)
    return len(rows)


GET = Sql("SELECT value, number FROM {schema}.store WHERE key = %(key)s::text", columns=("bytea", "bigint"))
BOOKS = Sql(
    """
SELECT coalesce(sum(count), 0::numeric)::text, coalesce(sum(bytes), 0::numeric)::text FROM {schema}.accounting
WHERE key = %(key)s::text AND minute >= coalesce(%(since)s::timestamptz, '-infinity'::timestamptz)
  AND minute < coalesce(%(until)s::timestamptz, 'infinity'::timestamptz)
""",
    columns=("text", "text"),  # the sum over all minutes may exceed 64 bits
)


def _executable(given: Executable) -> Executable:
    if not isinstance(given, Executable):
        raise InvalidMessage(f"It is {type(given).__name__}: give an Executable.")
    return given


class _Target:
    """What the sync and the async class share: the node and the target they write to."""

    def __init__(self, schema: str = DEFAULT_SCHEMA, target: str = STORE) -> None:
        self.schema = schema_name(schema)
        self.target = executable_name(target)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r}, target={self.target!r})"

    def _write(self, executable: Executable) -> tuple[Operation[None], UUID]:
        row = executable.row()
        return _writing(self.schema, row), row[0]

    def _write_many(self, executables: Iterable[Executable]) -> Operation[int]:
        # All are checked before the first is written, so a bad one leaves the transaction unchanged.
        rows = []
        for nth, executable in enumerate(executables, start=1):
            try:
                rows.append(_executable(executable).row())
            except (InvalidMessage, InvalidName) as error:
                raise type(error)(f"Executable {nth}: {error} None of this call was sent.") from None
        return writing_many(self.schema, rows)

    def _get(self, key: Key) -> Operation[Raw | int | None]:
        if self.target != STORE:
            raise ConfigurationError(f"{self.target} is a table of your own: read it as such.")
        text = key_text(key)
        rows = yield GET.at(schema=self.schema)(key=text)
        return None if not rows else rows[0][1] if rows[0][0] is None else bytes(rows[0][0])

    def _books(self, key: Key, since: datetime | None, until: datetime | None) -> Operation[Books]:
        bounds = {
            "since": None if since is None else aware(since, "since"),
            "until": None if until is None else aware(until, "until"),
        }
        [(count, size)] = yield BOOKS.at(schema=self.schema)(key=key_text(key), **bounds)
        return Books(int(count), int(size))


class Store(_Target):
    """Writes executables in the caller's transaction; the executor applies each exactly once, soon after it commits.

    What is busy or numerous (counters, accounting, entries of an index) need not be in the transaction that causes it:
    writers of one key do not wait for each other. They are applied in the order in which they were sent, with the same
    result as one after another; one that cannot be applied goes to `dead_letter` with its reason.

    One instance per node (`schema`) and target, free to share. `target` is `store`, the node's own table of values and
    counters, or the name of a table of yours that an administrator has registered (`mailroom executor target add`).
    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`, adds rows in its current
    transaction and never commits; it returns the executable's id. Raises `InvalidMessage` for what is over a limit and
    `NotInTransaction` on an autocommit connection outside a transaction; errors of the driver pass through. What all
    take by name is described with `Told`.
    """

    def put(
        self, connection: AnyConnection, key: Key, value: Raw, *, expected: Raw | None = None, **told: Unpack[Told]
    ) -> UUID:
        """Set the value of `key`, at most 4 MiB; a counter becomes a value.

        With `expected` only if that is its value (zero bytes: if there is none). If it is not, nothing is done, and
        that is the outcome that `notify` is told; where nobody is, the executable goes to `dead_letter`.
        """
        operation, id = self._write(Executable("put", key, self.target, value=value, expected=expected, **told))
        run(connection, operation)
        return id

    def increment(self, connection: AnyConnection, key: Key, by: int = 1, **told: Unpack[Told]) -> UUID:
        """Add `by` to the counter `key`, which begins at 0; both are ints of 64 bits.

        A sum beyond 64 bits, or a key that holds a value, fails this executable alone.
        """
        operation, id = self._write(Executable("increment", key, self.target, amount=by, **told))
        run(connection, operation)
        return id

    def delete(self, connection: AnyConnection, key: Key, **told: Unpack[Told]) -> UUID:
        """Delete the value or counter of `key`, if there is one."""
        operation, id = self._write(Executable("delete", key, self.target, **told))
        run(connection, operation)
        return id

    def delete_range(
        self,
        connection: AnyConnection,
        start: Key | None = None,
        end: Key | None = None,
        limit: int | None = None,
        **told: Unpack[Told],
    ) -> UUID:
        """Delete the first `limit` of the keys from `start` up to, but not including, `end`.

        None stands for the first key, for behind the last one, and for all. Keys are compared by their bytes in UTF-8,
        those of a table of yours as its column compares them. Later executables wait for it. One that deletes many
        keys does so in several transactions, each of which readers see.
        """
        operation, id = self._write(
            Executable("delete_range", start, self.target, end_key=end, row_limit=limit, **told)
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
        **told: Unpack[Told],
    ) -> UUID:
        """Add `count` and `bytes` to the books of every successive prefix of `key`: of a/b/c these are a, a/b, a/b/c.

        The books are by the minute, of `at` (aware), or of the send. Both are ints of 64 bits, and may be negative; a
        sum beyond that fails this executable alone. A key has at most 32 levels.
        """
        operation, id = self._write(Executable("account", key, ACCOUNTING, amount=count, bytes=bytes, at=at, **told))
        run(connection, operation)
        return id

    def call(
        self,
        connection: AnyConnection,
        name: str,
        arguments: object = None,
        *,
        key: Key | None = None,
        **told: Unpack[Told],
    ) -> UUID:
        """Call the function that an administrator registered as `name` (`mailroom executor function add`).

        It is given the `arguments`, which JSON can say, at most 4 MiB, as one jsonb. What it returns is the outcome;
        its error fails this executable alone. `key` is the key of the message that tells so.
        """
        operation, id = self._write(Executable("call", key, name, arguments=arguments, **told))
        run(connection, operation)
        return id

    def send_many(self, connection: AnyConnection, executables: Iterable[Executable]) -> int:
        """Write many executables in order, by COPY if the driver can, and return how many.

        All of them are checked first: a bad one raises `InvalidMessage` with its number before any is written.
        """
        return run(connection, self._write_many(executables))

    def get(self, connection: AnyConnection, key: Key) -> Raw | int | None:
        """Return the value or counter of `key` as applied so far, None if there is none."""
        return run(connection, self._get(key))

    def books(
        self, connection: AnyConnection, key: Key, since: datetime | None = None, until: datetime | None = None
    ) -> Books:
        """Return the totals of `key` for the minutes that began at or after `since` and before `until`."""
        return run(connection, self._books(key, since, until))


class AsyncStore(_Target):
    """`Store` for async connections: psycopg `AsyncConnection`, SQLAlchemy `AsyncConnection` and `AsyncSession`."""

    async def put(
        self, connection: AnyAsyncConnection, key: Key, value: Raw, *, expected: Raw | None = None, **told: Unpack[Told]
    ) -> UUID:
        """See `Store.put`."""
        operation, id = self._write(Executable("put", key, self.target, value=value, expected=expected, **told))
        await run_async(connection, operation)
        return id

    async def increment(self, connection: AnyAsyncConnection, key: Key, by: int = 1, **told: Unpack[Told]) -> UUID:
        """See `Store.increment`."""
        operation, id = self._write(Executable("increment", key, self.target, amount=by, **told))
        await run_async(connection, operation)
        return id

    async def delete(self, connection: AnyAsyncConnection, key: Key, **told: Unpack[Told]) -> UUID:
        """See `Store.delete`."""
        operation, id = self._write(Executable("delete", key, self.target, **told))
        await run_async(connection, operation)
        return id

    async def delete_range(
        self,
        connection: AnyAsyncConnection,
        start: Key | None = None,
        end: Key | None = None,
        limit: int | None = None,
        **told: Unpack[Told],
    ) -> UUID:
        """See `Store.delete_range`."""
        operation, id = self._write(
            Executable("delete_range", start, self.target, end_key=end, row_limit=limit, **told)
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
        **told: Unpack[Told],
    ) -> UUID:
        """See `Store.account`."""
        operation, id = self._write(Executable("account", key, ACCOUNTING, amount=count, bytes=bytes, at=at, **told))
        await run_async(connection, operation)
        return id

    async def call(
        self,
        connection: AnyAsyncConnection,
        name: str,
        arguments: object = None,
        *,
        key: Key | None = None,
        **told: Unpack[Told],
    ) -> UUID:
        """See `Store.call`."""
        operation, id = self._write(Executable("call", key, name, arguments=arguments, **told))
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
