"""Register the tables that executables may write and the functions they may call.

Every function runs in the caller's transaction and never commits. On an autocommit connection outside of a transaction
it raises `NotInTransaction`. `actor` says who acts, `why` for what reason; the table `audit` keeps both, with what was
registered. With `dry_run` everything is checked and nothing changes. Names of tables, columns and functions are given
as in the catalog: case-sensitive and without quotes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from mailroom.audit import auditing, check_actor
from mailroom.errors import ConfigurationError, InvalidName
from mailroom.executable import ACCOUNTING, STORE
from mailroom.names import DEFAULT_SCHEMA, executable_name, schema_name, shown
from mailroom.schema import checking
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.runner import AnyConnection, run

MAX_TIMEOUT_S = 300.0

# Allowed column types, by their names in pg_catalog.
INTS = {"int2": "smallint", "int4": "integer", "int8": "bigint"}
TEXTS = {"text": "text", "varchar": "character varying"}
KEY_TYPES = TEXTS | {"uuid": "uuid"} | INTS
VALUE_TYPES = {"bytea": "bytea"} | TEXTS
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


# -- Targets ----------------------------------------------------------------------------------------------------------


def register_target(
    connection: AnyConnection,
    name: str,
    table: str,
    *,
    key: str,
    value: str | None = None,
    number: str | None = None,
    schema: str = DEFAULT_SCHEMA,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
) -> RegisteredTarget | None:
    """Let executables write a table, as the target `name`. Return what the name stood for before, or None.

    A name that is registered already is changed; registering the same again changes nothing. `table` is schema.table,
    an ordinary or partitioned table of yours. `key` is a column of type text, character varying, uuid or an integer
    type, not null and unique by itself. `value` is a column of type bytea, text or character varying, which `put`
    writes; `number` one of an integer type, which `increment` changes. At least one of the two is needed. The
    executor's role needs USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on the table. Raises `InvalidName`
    or `ConfigurationError`.
    """
    check_actor(actor, why)
    operation = _registering_target(
        schema_name(schema), _own_name(name), _qualified(table, "table"), _column(key),
        None if value is None else _column(value), None if number is None else _column(number),
        actor, why, dry_run,
    )  # fmt: skip
    return run(connection, operation)


def remove_target(
    connection: AnyConnection,
    name: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
) -> RegisteredTarget | None:
    """Stop executables from writing the table of target `name`. Return what it was, or None if there was none.

    Executables for it that are not executed yet go to `dead_letter`. The table itself is not changed.
    """
    check_actor(actor, why)
    return run(connection, _removing_target(schema_name(schema), executable_name(name), actor, why, dry_run))


def targets(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA) -> list[RegisteredTarget]:
    """Return the registered targets, ordered by name, without the built-in ones, store and accounting."""
    return run(connection, _listing_targets(schema_name(schema)))


# Joined by name: to_regclass would fail without USAGE on the schema.
TABLE = Sql(
    """
SELECT c.oid::bigint, c.relkind IN ('r', 'p'),
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhparent = c.oid),
       EXISTS (SELECT FROM pg_catalog.pg_class AS m
               WHERE m.relnamespace = c.relnamespace AND m.relname = 'outbox_executable')
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(table_schema)s::text AND c.relname = %(table_name)s::text
""",
    columns=("bigint", "boolean", "boolean", "boolean"),
)
# ON CONFLICT does not accept a unique index that is deferrable or partial.
COLUMNS = Sql(
    """
SELECT a.attname::text, CASE WHEN t.typnamespace = 'pg_catalog'::regnamespace::oid THEN t.typname::text END,
       pg_catalog.format_type(a.atttypid, NULL::integer), a.attnotnull, a.attgenerated <> '' OR a.attidentity = 'a',
       coalesce(o.collisdeterministic, true),
       EXISTS (SELECT FROM pg_catalog.pg_index AS i
               WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid AND i.indimmediate
                 AND i.indpred IS NULL AND i.indkey::text = a.attnum::text)
FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
LEFT JOIN pg_catalog.pg_collation AS o ON o.oid = a.attcollation
WHERE a.attrelid = %(table)s::bigint::oid AND a.attname = ANY(%(columns)s::text[])
""",
    columns=("text", "text", "text", "boolean", "boolean", "boolean", "boolean"),
)
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


def _registering_target(
    schema: str, name: str, table: tuple[str, str], key: str, value: str | None, number: str | None,
    actor: str, why: str | None, dry_run: bool,
) -> Operation[RegisteredTarget | None]:  # fmt: skip
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from _checking_table(table, key, value, number)
    before = yield from _finding_targets(schema, name)
    wanted = (".".join(table), key, value, number)
    if not dry_run and [(each.table, each.key, each.value, each.number) for each in before] != [wanted]:
        [(created_at,)] = yield SET_TARGET.at(schema=schema)(
            name=name, table_schema=table[0], table_name=table[1], key=key, value=value, number=number
        )
        yield from _auditing(schema, "target", before, [RegisteredTarget(name, *wanted, created_at)], actor, why)
    return before[0] if before else None


def _removing_target(
    schema: str, name: str, actor: str, why: str | None, dry_run: bool
) -> Operation[RegisteredTarget | None]:
    yield IN_TRANSACTION
    before = yield from _finding_targets(schema, name)
    if before and not dry_run:
        yield REMOVE_TARGET.at(schema=schema)(name=name)
        yield from _auditing(schema, "target", before, [], actor, why)
    return before[0] if before else None


def _finding_targets(schema: str, name: str | None = None) -> Operation[list[RegisteredTarget]]:
    yield from checking(schema)
    return [RegisteredTarget(*row) for row in (yield TARGETS.at(schema=schema)(name=name))]


def _listing_targets(schema: str) -> Operation[list[RegisteredTarget]]:
    found = []
    for each in (yield from _finding_targets(schema)):
        check = _checking_table(_qualified(each.table, "table"), each.key, each.value, each.number)
        found.append(replace(each, fault=(yield from _fault(check))))
    return found


def _checking_table(table: tuple[str, str], key: str, value: str | None, number: str | None) -> Operation[None]:
    columns = [column for column in (key, value, number) if column is not None]
    if len(columns) == 1:
        raise ConfigurationError("Give a column for values, one for numbers, or both.")
    if len(set(columns)) < len(columns):
        raise ConfigurationError("Key, value and number must be three different columns.")
    of = shown(".".join(table))
    found = yield TABLE.at()(table_schema=table[0], table_name=table[1])
    if not found:
        raise ConfigurationError(f"There is no table {of}. Names are case-sensitive.")
    [(oid, is_table, has_children, is_ours)] = found
    if is_ours or table[0].startswith("pg_") or table[0] == "information_schema":
        raise ConfigurationError(
            f"Table {of} is in a schema of {'Mailroom' if is_ours else 'PostgreSQL'}: give a table of your own."
        )
    if not is_table:
        raise ConfigurationError(f"{of} is not an ordinary or partitioned table.")
    if has_children:
        raise ConfigurationError(f"Other tables inherit from {of}, so no key is unique in it.")
    described = {row[0]: row[1:] for row in (yield COLUMNS.at()(table=oid, columns=columns))}
    if missing := [column for column in columns if column not in described]:
        raise ConfigurationError(f"Table {of} has no column {shown(missing[0])}. Names are case-sensitive.")
    for column, what, types in ((key, "key", KEY_TYPES), (value, "value", VALUE_TYPES), (number, "number", INTS)):
        if column is None:
            continue
        kind, type_name, _, is_generated, _, _ = described[column]
        if kind not in types:
            allowed = ", ".join(types.values())
            raise ConfigurationError(f"Column {shown(column)} of {of} is {type_name}; the {what} may be {allowed}.")
        if is_generated:
            raise ConfigurationError(f"Column {shown(column)} of {of} is generated and cannot be written.")
    _, _, is_not_null, _, is_deterministic, is_unique = described[key]
    if not is_not_null:
        raise ConfigurationError(f"Column {shown(key)} of {of} may be null; a key must be NOT NULL.")
    if not is_unique:
        raise ConfigurationError(
            f"Column {shown(key)} of {of} is not unique by itself: it needs a unique index that is neither "
            "partial nor deferrable."
        )
    if not is_deterministic:
        raise ConfigurationError(
            f"Column {shown(key)} of {of} has a nondeterministic collation, under which two keys can be equal."
        )


# -- Functions --------------------------------------------------------------------------------------------------------


def register_function(
    connection: AnyConnection,
    name: str,
    function: str,
    *,
    timeout_s: float = 10.0,
    schema: str = DEFAULT_SCHEMA,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
) -> RegisteredFunction | None:
    """Let executables call a function, as `name`. Return what the name stood for before, or None.

    A name that is registered already is changed; registering the same again changes nothing. `function` is
    schema.function; it takes one jsonb and does not return a set. It runs in the executor's transaction and with its
    rights, one call after another: a slow call holds up all executables, for at most `timeout_s` seconds (default 10,
    up to 300). Raises `InvalidName` or `ConfigurationError`.
    """
    check_actor(actor, why)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigurationError(f"timeout_s is {shown(timeout_s)}; give seconds above 0 and up to {MAX_TIMEOUT_S:g}.")
    operation = _registering_function(
        schema_name(schema), _own_name(name), _qualified(function, "function"), float(timeout_s), actor, why, dry_run
    )
    return run(connection, operation)


def remove_function(
    connection: AnyConnection,
    name: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    actor: str,
    why: str | None = None,
    dry_run: bool = False,
) -> RegisteredFunction | None:
    """Stop executables from calling the function `name`. Return what it was, or None if there was none.

    Executables for it that are not executed yet go to `dead_letter`. The function itself is not changed.
    """
    check_actor(actor, why)
    return run(connection, _removing_function(schema_name(schema), executable_name(name), actor, why, dry_run))


def functions(connection: AnyConnection, *, schema: str = DEFAULT_SCHEMA) -> list[RegisteredFunction]:
    """Return the registered functions, ordered by name."""
    return run(connection, _listing_functions(schema_name(schema)))


FUNCTION = Sql(
    """
SELECT p.prokind = 'f', p.proretset
FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = %(function_schema)s::text AND p.proname = %(function_name)s::text
  AND p.pronargs = 1 AND p.proargtypes[0] = 'pg_catalog.jsonb'::regtype::oid
""",
    columns=("boolean", "boolean"),
)
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


def _registering_function(
    schema: str, name: str, function: tuple[str, str], timeout_s: float, actor: str, why: str | None, dry_run: bool
) -> Operation[RegisteredFunction | None]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield from _checking_function(function)
    before = yield from _finding_functions(schema, name)
    wanted = (".".join(function), timeout_s)
    if not dry_run and [(each.function, each.timeout_s) for each in before] != [wanted]:
        [(created_at,)] = yield SET_FUNCTION.at(schema=schema)(
            name=name, function_schema=function[0], function_name=function[1], timeout_s=timeout_s
        )
        yield from _auditing(schema, "function", before, [RegisteredFunction(name, *wanted, created_at)], actor, why)
    return before[0] if before else None


def _removing_function(
    schema: str, name: str, actor: str, why: str | None, dry_run: bool
) -> Operation[RegisteredFunction | None]:
    yield IN_TRANSACTION
    before = yield from _finding_functions(schema, name)
    if before and not dry_run:
        yield REMOVE_FUNCTION.at(schema=schema)(name=name)
        yield from _auditing(schema, "function", before, [], actor, why)
    return before[0] if before else None


def _finding_functions(schema: str, name: str | None = None) -> Operation[list[RegisteredFunction]]:
    yield from checking(schema)
    return [RegisteredFunction(*row) for row in (yield FUNCTIONS.at(schema=schema)(name=name))]


def _listing_functions(schema: str) -> Operation[list[RegisteredFunction]]:
    found = []
    for each in (yield from _finding_functions(schema)):
        check = _checking_function(_qualified(each.function, "function"))
        found.append(replace(each, fault=(yield from _fault(check))))
    return found


def _checking_function(function: tuple[str, str]) -> Operation[None]:
    of = shown(".".join(function))
    found = yield FUNCTION.at()(function_schema=function[0], function_name=function[1])
    if not found:
        raise ConfigurationError(
            f"There is no function {of} with exactly one argument, of type jsonb. Names are case-sensitive."
        )
    [(is_function, is_set)] = found
    if not is_function:
        raise ConfigurationError(f"{of} is a procedure, an aggregate or a window function: register a plain function.")
    if is_set:
        raise ConfigurationError(f"Function {of} returns a set: register one that returns one value, or void.")


# -- Both -------------------------------------------------------------------------------------------------------------


def _auditing(
    schema: str, what: str, before: Sequence[object], after: Sequence[object], actor: str, why: str | None
) -> Operation[None]:
    for action, registered in (("remove", before), ("register", after)):
        yield from auditing(schema, f"{action} {what}", [(None, str(each), 0) for each in registered], actor, why)


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
