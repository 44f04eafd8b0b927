"""Whether a table or function is one that executables may reach: asked of the catalog."""

from typing import NamedTuple

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql
from mailroom.values.names import shown

# Allowed column types, by their names in pg_catalog.
INTS = {"int2": "smallint", "int4": "integer", "int8": "bigint"}
TEXTS = {"text": "text", "varchar": "character varying"}
KEY_TYPES = TEXTS | {"uuid": "uuid"} | INTS
VALUE_TYPES = {"bytea": "bytea"} | TEXTS

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


class _Column(NamedTuple):
    name: str
    kind: str | None
    type_name: str
    is_not_null: bool
    is_generated: bool
    is_deterministic: bool
    is_unique: bool


# ON CONFLICT does not accept a unique index that is deferrable or partial.
TABLE_COLUMNS = Sql(
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
    into=_Column,
)


def checking_table(table: tuple[str, str], key: str, value: str | None, number: str | None) -> Operation[None]:
    """Raise `ConfigurationError` unless executables may write these columns of the table, given as schema and name."""
    columns = [column for column in (key, value, number) if column is not None]
    if len(columns) == 1:
        raise ConfigurationError("Give a column for values, one for numbers, or both.", code="MR-target-unfit")
    if len(set(columns)) < len(columns):
        raise ConfigurationError("Key, value and number must be three different columns.", code="MR-target-unfit")
    of = shown(".".join(table))
    oid = yield from _finding_table(table, of)
    rows = TABLE_COLUMNS.named((yield TABLE_COLUMNS.at()(table=oid, columns=columns)))
    described: dict[str, _Column] = {each.name: each for each in rows}
    if missing := [column for column in columns if column not in described]:
        raise ConfigurationError(
            f"Table {of} has no column {shown(missing[0])}. Names are case-sensitive.", code="MR-target-unfit"
        )
    for column, what, types in ((key, "key", KEY_TYPES), (value, "value", VALUE_TYPES), (number, "number", INTS)):
        if column is None:
            continue
        found = described[column]
        if found.kind not in types:
            allowed = ", ".join(types.values())
            raise ConfigurationError(
                f"Column {shown(column)} of {of} is {found.type_name}; the {what} may be {allowed}.",
                code="MR-target-unfit",
            )
        if found.is_generated:
            raise ConfigurationError(
                f"Column {shown(column)} of {of} is generated and cannot be written.", code="MR-target-unfit"
            )
    if why := _why_no_key(described[key]):
        raise ConfigurationError(f"Column {shown(key)} of {of} {why}", code="MR-target-unfit")


def _finding_table(table: tuple[str, str], of: str) -> Operation[int]:
    """Return the oid of a table that may be written, which errors call `of`."""
    found = yield TABLE.at()(table_schema=table[0], table_name=table[1])
    if not found:
        raise ConfigurationError(f"There is no table {of}. Names are case-sensitive.", code="MR-target-unfit")
    [(oid, is_table, has_children, is_ours)] = found
    if is_ours or table[0].startswith("pg_") or table[0] == "information_schema":
        raise ConfigurationError(
            f"Table {of} is in a schema of {'Mailroom' if is_ours else 'PostgreSQL'}: give a table of your own.",
            code="MR-target-unfit",
        )
    if not is_table:
        raise ConfigurationError(f"{of} is not an ordinary or partitioned table.", code="MR-target-unfit")
    if has_children:
        raise ConfigurationError(f"Other tables inherit from {of}, so no key is unique in it.", code="MR-target-unfit")
    return int(oid)


def _why_no_key(column: _Column) -> str:
    """Return why a column can be no key, "" if it can."""
    if not column.is_not_null:
        return "may be null; a key must be NOT NULL."
    if not column.is_unique:
        return "is not unique by itself: it needs a unique index that is neither partial nor deferrable."
    return "" if column.is_deterministic else "has a nondeterministic collation, under which two keys can be equal."


FUNCTION = Sql(
    """
SELECT p.prokind = 'f', p.proretset
FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = %(function_schema)s::text AND p.proname = %(function_name)s::text
  AND p.pronargs = 1 AND p.proargtypes[0] = 'pg_catalog.jsonb'::regtype::oid
""",
    columns=("boolean", "boolean"),
)


def checking_function(function: tuple[str, str]) -> Operation[None]:
    """Raise `ConfigurationError` unless executables may call the function, given as schema and name."""
    of = shown(".".join(function))
    found = yield FUNCTION.at()(function_schema=function[0], function_name=function[1])
    if not found:
        raise ConfigurationError(
            f"There is no function {of} with exactly one argument, of type jsonb. Names are case-sensitive.",
            code="MR-function-unfit",
        )
    [(is_function, is_set)] = found
    if not is_function:
        raise ConfigurationError(
            f"{of} is a procedure, an aggregate or a window function: register a plain function.",
            code="MR-function-unfit",
        )
    if is_set:
        raise ConfigurationError(
            f"Function {of} returns a set: register one that returns one value, or void.", code="MR-function-unfit"
        )
