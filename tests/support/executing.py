"""Executables as tests see them: a model that applies them one after another, and an executor without a daemon."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.rows import TupleRow

from dispatcher.executor.execute import executing
from dispatcher.executor.execution import Execution
from mailroom.sql import runner
from mailroom.sql.operation import Operation, Step, T
from mailroom.values import codec
from outbox import Executable, Store
from tests.support.node import Node

SCHEMA = "mailroom"
STORE = Store()
THINGS = Store(target="things")
SMALLEST, LARGEST = -(2**63), 2**63 - 1
UNREGISTERED = "its target is not registered, or its table has changed: mailroom executor target add, then requeue this"

Entry: TypeAlias = list[Any]  # value and number of a row of a user's table
Told: TypeAlias = tuple[str, int, str | None, dict[str, Any]]  # correlation, status, event type, value


class Failed(Exception):
    """It cannot be applied, for this reason."""


class Compared(Failed):
    """The key does not hold what was expected, but this."""

    def __init__(self, found: Any, reason: str) -> None:
        super().__init__(reason)
        self.found = found


@dataclass
class Things:
    """A user's table `app.thing`: id integer, body text, total smallint, each of them maybe null but the key.

    `check` returns the reason for which its CHECK refuses a row.
    """

    rows: dict[int, Entry] = field(default_factory=dict)
    check: Callable[[Entry], str | None] = lambda entry: None

    def key(self, text: str) -> int:
        """Return a key as the table has it."""
        try:
            number = int(text)
        except ValueError:
            number = 2**31
        if str(number) != text or not -(2**31) <= number < 2**31:
            raise Failed("the key is not a valid integer")
        return number

    def written(self, key: int, entry: Entry) -> None:
        """Write a row, if it may be so."""
        if reason := self.check(entry):
            raise Failed(reason)
        self.rows[key] = entry


class Model:
    """What executables come to, applied one after another by the plainest program that does it."""

    def __init__(self, things: Things | None = None) -> None:
        self.store: dict[str, Any] = {}
        self.books: dict[tuple[str, datetime], tuple[int, int]] = {}
        self.things = things
        self.functions: dict[str, Callable[[Any], Any]] = {}
        self.dead: list[tuple[UUID, str]] = []
        self.replies: list[Told] = []

    def apply(self, executables: Iterable[Executable]) -> None:
        """Apply executables; each has an id, and each `account` a time."""
        for executable in executables:
            own = "accounting" if executable.operation == "account" else "store"
            each = replace(executable, target=executable.target or own)
            try:
                event, details = getattr(self, each.operation)(each)
                self._tell(each, 200, event, {"outcome": "applied", **details})
            except Compared as compared:
                if each.notify is None:
                    self._bury(each, str(compared))
                self._tell(each, 409, None, {"outcome": "compare failed", "found": compared.found})
            except Failed as failed:
                self._bury(each, str(failed))
                self._tell(each, 500, None, {"outcome": "refused", "reason": str(failed)})

    def _bury(self, each: Executable, reason: str) -> None:
        assert each.id is not None
        self.dead.append((each.id, reason))

    def _tell(self, each: Executable, status: int, event: str | None, details: dict[str, Any]) -> None:
        if each.notify is not None:
            about = {"operation": each.operation, "target": each.target, "key": str(each.key or "")}
            self.replies.append((str(each.id), status, event, about | details))

    def put(self, each: Executable) -> tuple[str, dict[str, Any]]:
        assert each.value is not None
        key, found = str(each.key), None
        if each.target == "store":
            is_there, found = key in self.store, self.store.get(key)
            held = found if isinstance(found, bytes) else None
        else:
            number = self._things(each).key(key)
            is_there, (body, total) = number in self._things(each).rows, self._things(each).rows.get(number, (None, 0))
            held = None if body is None else body.encode()
            found = (total if body is None else held) if is_there else None
        if each.expected is not None and (is_there if each.expected == b"" else held != each.expected):
            raise Compared(found, "the key does not hold the expected value" if is_there else "the key does not exist")
        if each.target == "store":
            self.store[key] = each.value
        else:
            try:
                text = each.value.decode()
            except UnicodeDecodeError:
                raise Failed("the value is not UTF-8, and the column is text") from None
            if "\0" in text:
                raise Failed("the value holds a NUL character, and the column is text")
            self._things(each).written(number, [text, total])
        return "U" if is_there else "C", {}

    def increment(self, each: Executable) -> tuple[str, dict[str, Any]]:
        assert each.amount is not None
        key, smallest, largest = str(each.key), SMALLEST, LARGEST
        if each.target == "store":
            is_there, before = key in self.store, self.store.get(key, 0)
            if isinstance(before, bytes):
                raise Failed("the key holds a value, not a number")
        else:
            number, smallest, largest = self._things(each).key(key), -(2**15), 2**15 - 1
            is_there, (body, before) = number in self._things(each).rows, self._things(each).rows.get(number, (None, 0))
        total = (before or 0) + each.amount
        if not smallest <= total <= largest:
            raise Failed(f"the number would leave its range, {smallest} to {largest}")
        if each.target == "store":
            self.store[key] = total
        else:
            self._things(each).written(number, [body, total])
        return "U" if is_there else "C", {"number": total}

    def delete(self, each: Executable) -> tuple[str | None, dict[str, Any]]:
        if each.target == "store":
            gone = self.store.pop(str(each.key), None)
        else:
            gone = self._things(each).rows.pop(self._things(each).key(str(each.key)), None)
        return (None, {"deleted": 0}) if gone is None else ("D", {"deleted": 1})

    def delete_range(self, each: Executable) -> tuple[str | None, dict[str, Any]]:
        rows: dict[Any, Any] = self.store
        key_of: Callable[[str], Any] = str
        if each.target != "store":
            rows, key_of = self._things(each).rows, self._things(each).key
        start = key_of(str(each.key)) if each.key else None
        end = None if each.end_key is None else key_of(str(each.end_key))
        keys = sorted(rows)  # of text too: code points stand in the order of their UTF-8
        found = [key for key in keys if (start is None or key >= start) and (end is None or key < end)]
        for key in found[: each.row_limit]:
            del rows[key]
        deleted = len(found[: each.row_limit])
        return "D" if deleted else None, {"deleted": deleted}

    def account(self, each: Executable) -> tuple[str, dict[str, Any]]:
        assert each.at is not None
        assert each.amount is not None
        assert each.bytes is not None
        parts = str(each.key).split("/")
        after = {}
        for length in range(1, len(parts) + 1):
            if prefix := "/".join(parts[:length]):
                book = prefix, each.at.astimezone(UTC).replace(second=0, microsecond=0)
                entries, size = self.books.get(book, (0, 0))
                after[book] = entries + each.amount, size + each.bytes
        if not all(SMALLEST <= number <= LARGEST for sums in after.values() for number in sums):
            raise Failed(f"a sum would leave its range, {SMALLEST} to {LARGEST}")
        self.books |= after
        return "U", {}

    def call(self, each: Executable) -> tuple[None, dict[str, Any]]:
        return None, {"result": self.functions[str(each.target)](each.arguments)}

    def _things(self, each: Executable) -> Things:
        if self.things is None or each.target != "things":
            raise Failed(UNREGISTERED)
        return self.things


def register(connection: psycopg.Connection[TupleRow], name: str, table: str, *columns: str | None) -> None:
    """Register a table `schema.table` with its key, value and number columns."""
    connection.execute(
        "INSERT INTO mailroom.executable_target (name, table_schema, table_name, key_column, value_column, "
        "number_column) VALUES (%s, split_part(%s, '.', 1), split_part(%s, '.', 2), %s, %s, %s)",
        [name, table, table, *columns],
    )


def make_things(connection: psycopg.Connection[TupleRow], check: str = "true") -> None:
    """Make the table of `Things` and register it as `things`; a check other than true is applied to each operation."""
    constraint = "" if check == "true" else f", CONSTRAINT thing_check CHECK ({check})"
    connection.execute("CREATE SCHEMA app")
    connection.execute(
        f"CREATE TABLE app.thing (id integer PRIMARY KEY, body text, total smallint{constraint})".encode()
    )
    register(connection, "things", "app.thing", "id", "body", "total")


def sent(node: Node, send: Callable[..., UUID], *given: Any, **named: Any) -> UUID:
    """Send one executable in a transaction of its own."""
    with node.connection.transaction():
        return send(node.connection, *given, **named)


def function(node: Node, name: str, body: str, returns: str = "jsonb", timeout_s: float = 10) -> None:
    """Make a function and register it."""
    node.connection.execute("CREATE SCHEMA IF NOT EXISTS app")
    node.connection.execute(
        f"CREATE FUNCTION app.{name}(given jsonb) RETURNS {returns} LANGUAGE plpgsql AS $$ {body} $$".encode()
    )
    node.connection.execute(
        "INSERT INTO mailroom.executable_function VALUES (%s, 'app', %s, %s)", [name, name, timeout_s]
    )


def trigger(node: Node, when: str, body: str, table: str = "app.thing") -> None:
    """Make a trigger on a table of a user's, for each row."""
    node.connection.execute(
        f"CREATE FUNCTION app.on_thing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$".encode()
    )
    node.connection.execute(
        f"CREATE TRIGGER on_thing {when} ON {table} FOR EACH ROW EXECUTE FUNCTION app.on_thing()".encode()
    )


def execute_all(
    connection: psycopg.Connection[TupleRow],
    *,
    rows: int = 10_000,
    max_bytes: int = 2**25,
    before: Callable[[], None] = lambda: None,
) -> list[Execution]:
    """Execute on an autocommit connection until there is nothing left; `before` is called before each statement."""
    done = []
    while True:
        before()
        connection.execute("BEGIN")
        try:
            execution = runner.run(
                connection,
                observed(executing(SCHEMA, rows=rows, max_bytes=max_bytes, bound_s=3_600), before),
            )
        except BaseException:
            if not connection.closed:
                connection.execute("ROLLBACK")
            raise
        before()
        connection.execute("COMMIT")
        done.append(execution)
        if not execution.more:
            return done


def execute(node: Node, rows: int = 10_000, max_bytes: int = 2**25) -> list[Execution]:
    """Execute all there is, and return what each transaction did."""
    return execute_all(node.connection, rows=rows, max_bytes=max_bytes)


def observed(operation: Operation[T], before: Callable[[], None]) -> Operation[T]:
    """The operation, with a call before each of its steps."""
    resume: Callable[[Any], Step] = operation.send
    given: Any = None
    while True:
        try:
            step = resume(given)
        except StopIteration as stop:
            result: T = stop.value
            return result
        before()
        try:
            resume, given = operation.send, (yield step)
        except Exception as error:
            resume, given = operation.throw, error


def store_of(connection: psycopg.Connection[TupleRow]) -> dict[str, Any]:
    """Return what stands in the store."""
    rows = connection.execute("SELECT key, value, number FROM mailroom.store").fetchall()
    return {key: number if value is None else value for key, value, number in rows}


def books_of(connection: psycopg.Connection[TupleRow]) -> dict[tuple[str, datetime], tuple[int, int]]:
    """Return what stands in the books."""
    rows = connection.execute("SELECT key, minute, count, bytes FROM mailroom.accounting").fetchall()
    return {(key, minute.astimezone(UTC)): (count, size) for key, minute, count, size in rows}


def things_of(connection: psycopg.Connection[TupleRow]) -> dict[int, Entry]:
    """Return what stands in the user's table."""
    rows = connection.execute("SELECT id, body, total FROM app.thing").fetchall()
    return {key: [body, total] for key, body, total in rows}


def dead_of(connection: psycopg.Connection[TupleRow]) -> list[tuple[UUID, str]]:
    """Return the dead letters, in their order."""
    return connection.execute("SELECT message_id, reason FROM mailroom.dead_letter ORDER BY id").fetchall()


def told_of(connection: psycopg.Connection[TupleRow]) -> list[Told]:
    """Return what was told of outcomes and not yet delivered, in its order."""
    rows = connection.execute(
        "SELECT headers->>'correlation', (headers->>'status')::integer, event_type::text, value FROM mailroom.outbox "
        "ORDER BY position"
    )
    return [(correlation, status, event, dict(_decoded(value))) for correlation, status, event, value in rows]


def _decoded(raw: bytes) -> Any:
    return codec.decode(raw)


def waiting(connection: psycopg.Connection[TupleRow]) -> Iterator[tuple[int, str]]:
    """Give position and operation of what has not been executed."""
    yield from connection.execute("SELECT position, operation FROM mailroom.outbox_executable ORDER BY position")


def check_equal(connection: psycopg.Connection[TupleRow], model: Model) -> None:
    """See that all has been executed, and that it came to what the model says."""
    assert list(waiting(connection)) == []
    assert store_of(connection) == model.store
    assert books_of(connection) == model.books
    if model.things is not None:
        assert things_of(connection) == model.things.rows
    assert dead_of(connection) == model.dead
    assert told_of(connection) == model.replies
