"""Register the tables that executables may write and the functions they may call.

Names of tables, columns and functions are given as in the catalog: case-sensitive and without quotes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from dispatcher.executor.targets.catalog import checking_function, checking_table
from mailroom.errors import ConfigurationError, InvalidName
from mailroom.message.executable import ACCOUNTING, STORE
from mailroom.schema import acts, checking
from mailroom.schema.audit import auditing, changed, check_actor
from mailroom.schema.node import OfNode
from mailroom.sql.methods import on_async_connection, on_connection
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import executable_name, shown
from mailroom.values.numbers import seconds

MAX_TIMEOUT_S = 300.0

# These names become identifiers in statements. PostgreSQL does not accept a lone surrogate.
RENDERED = re.compile('[^"%{}\0\ud800-\udfff]+')


@dataclass(frozen=True, slots=True)
class RegisteredTarget:
    """A table that executables may write. `table` is schema.table. Without `value` nothing can be put, without
    `number` nothing incremented. In a list, `fault` says why it could not be registered now: tables change.
    """

    name: str
    table: str
    key: str
    value: str | None
    number: str | None
    created_at: datetime = field(compare=False)
    fault: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        written = (f"{what} {column}" for what, column in (("value", self.value), ("number", self.number)) if column)
        return f"{self.name}: {', '.join([self.table, f'key {self.key}', *written])}"


@dataclass(frozen=True, slots=True)
class RegisteredFunction:
    """A function that executables may call. `function` is schema.function; a call may take `timeout_s` seconds.

    In a list, `fault` says why it could not be registered now.
    """

    name: str
    function: str
    timeout_s: float
    created_at: datetime = field(compare=False)
    fault: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.function}, {self.timeout_s:g} s"


TARGETS = Sql(
    """
SELECT name, table_schema || '.' || table_name, key_column, value_column, number_column, created_at
FROM {schema}.executable_target WHERE %(name)s::text IS NULL OR name = %(name)s::text ORDER BY name
""",
    columns=("text", "text", "text", "text", "text", "timestamptz"),
)
SET_TARGET = Sql(
    """
INSERT INTO {schema}.executable_target (name, table_schema, table_name, key_column, value_column, number_column)
VALUES (%(name)s::text, %(table_schema)s::text, %(table_name)s::text, %(key)s::text, %(value)s::text, %(number)s::text)
ON CONFLICT (name) DO UPDATE SET
    table_schema = excluded.table_schema, table_name = excluded.table_name, key_column = excluded.key_column,
    value_column = excluded.value_column, number_column = excluded.number_column, created_at = excluded.created_at
RETURNING created_at
""",
    columns=("timestamptz",),
)
REMOVE_TARGET = Sql("DELETE FROM {schema}.executable_target WHERE name = %(name)s::text")

FUNCTIONS = Sql(
    """
SELECT name, function_schema || '.' || function_name, timeout_s, created_at
FROM {schema}.executable_function WHERE %(name)s::text IS NULL OR name = %(name)s::text ORDER BY name
""",
    columns=("text", "text", "float8", "timestamptz"),
)
SET_FUNCTION = Sql(
    """
INSERT INTO {schema}.executable_function (name, function_schema, function_name, timeout_s)
VALUES (%(name)s::text, %(function_schema)s::text, %(function_name)s::text, %(timeout_s)s::float8)
ON CONFLICT (name) DO UPDATE SET
    function_schema = excluded.function_schema, function_name = excluded.function_name,
    timeout_s = excluded.timeout_s, created_at = excluded.created_at
RETURNING created_at
""",
    columns=("timestamptz",),
)
REMOVE_FUNCTION = Sql("DELETE FROM {schema}.executable_function WHERE name = %(name)s::text")


R = TypeVar("R", RegisteredTarget, RegisteredFunction)


@dataclass(frozen=True, slots=True)
class Registrable(Generic[R]):
    """What can be registered under a name: how its rows are found, set and removed, and whether something is fit."""

    add: acts.Act
    removal: acts.Act
    of: type[R]
    find: Sql
    set: Sql
    remove: Sql
    checking: Callable[[R], Operation[None]]


TARGET = Registrable(
    acts.TARGET_ADD, acts.TARGET_REMOVE, RegisteredTarget, TARGETS, SET_TARGET, REMOVE_TARGET,
    lambda each: checking_table(_qualified(each.table, "table"), each.key, each.value, each.number),
)  # fmt: skip
FUNCTION = Registrable(
    acts.FUNCTION_ADD, acts.FUNCTION_REMOVE, RegisteredFunction, FUNCTIONS, SET_FUNCTION, REMOVE_FUNCTION,
    lambda each: checking_function(_qualified(each.function, "function")),
)  # fmt: skip
NOT_YET = datetime.max.replace(tzinfo=UTC)


class _Operations(OfNode):
    """What both classes do, as operations."""

    def _register_target(
        self,
        name: str,
        table: str,
        *,
        key: str,
        value: str | None = None,
        number: str | None = None,
        actor: str,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[RegisteredTarget | None]:
        """Let executables write a table, as the target `name`. Return what the name stood for before, or None.

        A name that is registered already is changed; registering the same again changes nothing. `table` is
        schema.table, an ordinary or partitioned table of yours. `key` is a column of type text, character varying, uuid
        or an integer type, not null and unique by itself. `value` is a column of type bytea, text or character varying,
        which `put` writes; `number` one of an integer type, which `increment` changes. At least one of the two is
        needed. The executor's role needs USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on the table.
        Raises `InvalidName` or `ConfigurationError`.
        """
        check_actor(actor, why)
        name, (table_schema, table_name) = _own_name(name), _qualified(table, "table")
        key, value, number = _column(key), _column_or_none(value), _column_or_none(number)
        wanted = RegisteredTarget(name, f"{table_schema}.{table_name}", key, value, number, NOT_YET)
        place = {"table_schema": table_schema, "table_name": table_name}
        values = {**place, "key": key, "value": value, "number": number}
        return self._registering(TARGET, wanted, values, actor, why, dry_run)

    def _remove_target(
        self, name: str, *, actor: str, why: str | None = None, dry_run: bool = False
    ) -> Operation[RegisteredTarget | None]:
        """Stop executables from writing the table of target `name`. Return what it was, or None if there was none.

        Executables for it that are not executed yet go to `dead_letter`. The table itself is not changed.
        """
        return self._removing(TARGET, name, actor, why, dry_run)

    def _targets(self) -> Operation[list[RegisteredTarget]]:
        """Return the registered targets, ordered by name, without the built-in ones, store and accounting."""
        return self._listing(TARGET)

    def _register_function(
        self,
        name: str,
        function: str,
        *,
        timeout_s: float = 10.0,
        actor: str,
        why: str | None = None,
        dry_run: bool = False,
    ) -> Operation[RegisteredFunction | None]:
        """Let executables call a function, as `name`. Return what the name stood for before, or None.

        A name that is registered already is changed; registering the same again changes nothing. `function` is
        schema.function; it takes one jsonb and does not return a set. It runs in the executor's transaction and with
        its rights, one call after another: a slow call holds up all executables, for at most `timeout_s` seconds
        (default 10, up to 300). Raises `InvalidName` or `ConfigurationError`.
        """
        check_actor(actor, why)
        name, (function_schema, function_name) = _own_name(name), _qualified(function, "function")
        timeout_s = float(seconds(timeout_s, "timeout_s", MAX_TIMEOUT_S))
        wanted = RegisteredFunction(name, f"{function_schema}.{function_name}", timeout_s, NOT_YET)
        values = {"function_schema": function_schema, "function_name": function_name, "timeout_s": timeout_s}
        return self._registering(FUNCTION, wanted, values, actor, why, dry_run)

    def _remove_function(
        self, name: str, *, actor: str, why: str | None = None, dry_run: bool = False
    ) -> Operation[RegisteredFunction | None]:
        """Stop executables from calling the function `name`. Return what it was, or None if there was none.

        Executables for it that are not executed yet go to `dead_letter`. The function itself is not changed.
        """
        return self._removing(FUNCTION, name, actor, why, dry_run)

    def _functions(self) -> Operation[list[RegisteredFunction]]:
        """Return the registered functions, ordered by name."""
        return self._listing(FUNCTION)

    def _registering(
        self, kind: Registrable[R], wanted: R, values: Mapping[str, object], actor: str, why: str | None, dry_run: bool
    ) -> Operation[R | None]:
        yield IN_TRANSACTION
        before = yield from self._finding(kind, wanted.name)
        yield from kind.checking(wanted)
        if not dry_run and before != [wanted]:
            [(created_at,)] = yield kind.set.at(schema=self.schema)(name=wanted.name, **values)
            told = changed(before, [replace(wanted, created_at=created_at)])
            yield from auditing(self.schema, kind.add, [(None, wanted.name, 0)], actor, why, told)
        return before[0] if before else None

    def _removing(
        self, kind: Registrable[R], name: str, actor: str, why: str | None, dry_run: bool
    ) -> Operation[R | None]:
        check_actor(actor, why)
        name = executable_name(name)
        yield IN_TRANSACTION
        before = yield from self._finding(kind, name)
        if before and not dry_run:
            yield kind.remove.at(schema=self.schema)(name=name)
            yield from auditing(self.schema, kind.removal, [(None, name, 0)], actor, why, changed(before, []))
        return before[0] if before else None

    def _listing(self, kind: Registrable[R]) -> Operation[list[R]]:
        found = []
        for each in (yield from self._finding(kind)):
            found.append(replace(each, fault=(yield from _fault(kind.checking(each)))))
        return found

    def _finding(self, kind: Registrable[R], name: str | None = None) -> Operation[list[R]]:
        yield from checking(self.schema)
        return [kind.of(*row) for row in (yield kind.find.at(schema=self.schema)(name=name))]


class Registrations(_Operations):
    """The tables that the executables of a node may write, and the functions they may call; free to share.

    Every method takes a psycopg connection or a SQLAlchemy `Connection` or `Session`. What changes something does so
    in the caller's transaction and never commits; with `dry_run` everything is checked and nothing changes. It raises
    `NotInTransaction` on an autocommit connection outside a transaction. `actor` says who acts and `why` for what
    reason; both go into the table `audit`, with what was registered. Names of tables, columns and functions are given
    as in the catalog: case-sensitive and without quotes.
    """

    register_target = on_connection(_Operations._register_target)
    remove_target = on_connection(_Operations._remove_target)
    targets = on_connection(_Operations._targets)
    register_function = on_connection(_Operations._register_function)
    remove_function = on_connection(_Operations._remove_function)
    functions = on_connection(_Operations._functions)


class AsyncRegistrations(_Operations):
    """`Registrations` for async connections: psycopg's, and SQLAlchemy's `AsyncConnection` and `AsyncSession`."""

    register_target = on_async_connection(_Operations._register_target)
    remove_target = on_async_connection(_Operations._remove_target)
    targets = on_async_connection(_Operations._targets)
    register_function = on_async_connection(_Operations._register_function)
    remove_function = on_async_connection(_Operations._remove_function)
    functions = on_async_connection(_Operations._functions)


def _fault(check: Operation[None]) -> Operation[str | None]:
    try:
        yield from check
    except ConfigurationError as error:
        return str(error)
    return None


def _own_name(name: str) -> str:
    name = executable_name(name)
    if name in (STORE, ACCOUNTING):
        raise InvalidName(f"{name} is a built-in target: choose another name.")
    return name


def _qualified(name: str, what: str) -> tuple[str, str]:
    schema, dot, rest = str.partition(name, ".") if isinstance(name, str) else ("", "", "")
    if not (dot and RENDERED.fullmatch(schema) and RENDERED.fullmatch(rest)):
        raise InvalidName(
            f"The {what} {shown(name)} is not valid: give schema.{what} without quotes. Names may not contain any of "
            'the characters " % { } and NUL.'
        )
    return schema, rest


def _column(name: str) -> str:
    if not isinstance(name, str) or not RENDERED.fullmatch(name):
        raise InvalidName(
            f"The column {shown(name)} is not valid: give its name without quotes. It may not contain any of the "
            'characters " % { } and NUL.'
        )
    return str.__str__(name)


def _column_or_none(name: str | None) -> str | None:
    return None if name is None else _column(name)
