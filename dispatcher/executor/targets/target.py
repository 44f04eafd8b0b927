"""Targets of executables: the node's store, and users' tables that an administrator has registered."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from dispatcher.executor.batch.fold import STORE_RULES, Contents, KeyContent, OperationRefused, Rules
from dispatcher.executor.targets.catalog import INTS, KEY_TYPES, TEXTS, VALUE_TYPES
from mailroom.message.executable import STORE
from mailroom.sql.operation import Operation, Sql

RANGES = {"smallint": (-(2**15), 2**15 - 1), "integer": (-(2**31), 2**31 - 1), "bigint": (-(2**63), 2**63 - 1)}
INT = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Target:
    """A table, by its quoted names. `guarded`: its constraints or triggers must see each operation by itself."""

    name: str
    table: str
    key: str
    key_type: str
    value: str | None
    number: str | None
    number_type: str
    rules: Rules
    guarded: bool

    def key_of(self, text: str) -> str:
        """Return a key in the spelling of the table, so that each row has one name. Raises `OperationRefused`."""
        if self.key_type in RANGES:
            smallest, largest = RANGES[self.key_type]
            if not INT.fullmatch(text) or not smallest <= int(text) <= largest:
                raise OperationRefused(f"the key is not a valid {self.key_type}")
            return text
        if self.key_type == "uuid":
            try:
                return str(UUID(text))
            except ValueError:
                raise OperationRefused("the key is not a valid uuid") from None
        return text

    def spelled(self, text: str) -> str:
        """Return `key_of(text)`, or the text itself if it is not a valid key."""
        try:
            return self.key_of(text)
        except OperationRefused:
            return text

    def names(self, schema: str) -> dict[str, str]:
        """Return the names with which the statements below are rendered."""
        given = "convert_from(g.value, 'UTF8'::name)" if self.rules.text else "g.value"
        found = f"convert_to(t.{self.value}, 'UTF8'::name)" if self.rules.text else f"t.{self.value}"
        columns = [(self.value, given), (self.number, f"g.number::{self.number_type}")]
        written = [(column, expression) for column, expression in columns if column is not None]
        return {
            "schema": schema,
            "target": self.table.replace("{schema}", f'"{schema}"'),
            "key": self.key,
            "key_type": self.key_type,
            "locked": "" if self.name == STORE else "FOR UPDATE",  # only executors write the store, one at a time
            "found_value": "NULL::bytea" if self.value is None else found,
            "found_number": "NULL::bigint" if self.number is None else f"t.{self.number}::bigint",
            "sets": ", ".join(f"{column} = {expression}" for column, expression in written),
            "columns": ", ".join(column for column, _ in written),
            "given": ", ".join(expression for _, expression in written),
        }


STORE_TARGET = Target(STORE, "{schema}.store", "key", "text", "value", "number", "bigint", STORE_RULES, guarded=False)

# Usable: the columns exist, and the key is of a type with one spelling per value and unique by itself, not deferred.
# Types by their names in the catalog: the output of regtype depends on `quote_all_identifiers`.
# Guarded: something could tell single operations from their folded result. That is a check, a foreign key in either
# direction, another unique column, an index on an expression or on the value, a trigger, a rule, row security,
# inheritance, a partition, or a column that is generated, of a domain, of limited length or has to be given.
# Read each time, since tables change. Not by to_regclass: it fails without USAGE on the schema.
# D-execute-9: What may be folded is read from the catalog each time.
TARGETS = Sql(
    """
SELECT e.name, e.table_schema, e.table_name, e.key_column, e.value_column, e.number_column,
       kt.typname::text, vt.typname::text, nt.typname::text,
       k.attnum IS NOT NULL AND coalesce(kt.typname::text = ANY(%(keys)s::text[]), false)
       AND (k.attcollation = 0::oid OR EXISTS (SELECT FROM pg_catalog.pg_collation AS l
                                               WHERE l.oid = k.attcollation AND l.collisdeterministic))
       AND (e.value_column IS NULL OR coalesce(vt.typname::text = ANY(%(values)s::text[]), false))
       AND (e.number_column IS NULL OR coalesce(nt.typname::text = ANY(%(numbers)s::text[]), false))
       AND (c.relkind = 'v' OR EXISTS (SELECT FROM pg_catalog.pg_index AS i
                                       WHERE i.indrelid = c.oid AND i.indkey::text = k.attnum::text AND i.indisunique
                                         AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL)),
       c.relkind <> 'r' OR c.relhasrules OR c.relrowsecurity OR c.relhassubclass OR c.relispartition
       OR k.atttypmod <> -1 OR coalesce(v.atttypmod <> -1 OR v.attnotnull, false)
       OR EXISTS (SELECT FROM pg_catalog.pg_trigger AS t
                  WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D')
       OR EXISTS (SELECT FROM pg_catalog.pg_constraint AS o
                  WHERE o.conrelid = c.oid AND o.contype IN ('c', 'x', 'f', 't')
                     OR o.confrelid = c.oid AND o.contype = 'f')
       OR EXISTS (SELECT FROM pg_catalog.pg_index AS i
                  WHERE i.indrelid = c.oid
                    AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL OR v.attnum = ANY(i.indkey)
                         OR i.indisunique AND i.indkey::text <> k.attnum::text))
       OR EXISTS (SELECT FROM pg_catalog.pg_attribute AS a
                  JOIN pg_catalog.pg_type AS y ON y.oid = a.atttypid
                  WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND (a.attgenerated <> '' OR y.typtype = 'd'
                         OR a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
                            AND a.attname NOT IN (e.key_column::name)
                            AND a.attname IS DISTINCT FROM e.number_column::name))
FROM {schema}.executable_target AS e
LEFT JOIN pg_catalog.pg_namespace AS s ON s.nspname = e.table_schema::name
LEFT JOIN pg_catalog.pg_class AS c ON c.relnamespace = s.oid AND c.relname = e.table_name::name
LEFT JOIN pg_catalog.pg_attribute AS k ON k.attrelid = c.oid AND k.attname = e.key_column::name AND NOT k.attisdropped
LEFT JOIN pg_catalog.pg_attribute AS v ON v.attrelid = c.oid AND v.attname = e.value_column::name AND NOT v.attisdropped
LEFT JOIN pg_catalog.pg_attribute AS n
       ON n.attrelid = c.oid AND n.attname = e.number_column::name AND NOT n.attisdropped
LEFT JOIN pg_catalog.pg_type AS kt ON kt.oid = k.atttypid AND kt.typnamespace = 'pg_catalog'::regnamespace::oid
LEFT JOIN pg_catalog.pg_type AS vt ON vt.oid = v.atttypid AND vt.typnamespace = 'pg_catalog'::regnamespace::oid
LEFT JOIN pg_catalog.pg_type AS nt ON nt.oid = n.atttypid AND nt.typnamespace = 'pg_catalog'::regnamespace::oid
WHERE e.name = ANY(%(names)s::text[])
""",
    columns=("text",) * 9 + ("boolean",) * 2,
)

Targets: TypeAlias = dict[str, Target]


def reading_targets(schema: str, names: Collection[str]) -> Operation[Targets]:
    """Return those of the named targets that are registered and still usable."""
    targets = {STORE: STORE_TARGET}
    if others := sorted(set(names) - {STORE}):
        rows = yield TARGETS.at(schema=schema)(names=others, keys=[*KEY_TYPES], values=[*VALUE_TYPES], numbers=[*INTS])
        # Two names for one table: each sees the writes of the other only once they are made, so both are guarded.
        names_of = Counter(row[1:3] for row in rows)
        targets |= {row[0]: _target(*row[:9], guarded=row[10] or names_of[row[1:3]] > 1) for row in rows if row[9]}
    return targets


def _target(
    name: str, table_schema: str, table: str, key: str, value: str | None, number: str | None, key_type: str,
    value_type: str | None, number_type: str | None, *, guarded: bool,
) -> Target:  # fmt: skip
    number_type = INTS.get(number_type or "", "bigint")
    smallest, largest = RANGES[number_type]
    rules = Rules(value is not None, number is not None, smallest, largest, text=value_type in TEXTS)
    return Target(
        name, f"{quoted(table_schema)}.{quoted(table)}", quoted(key), KEY_TYPES[key_type],
        None if value is None else quoted(value), None if number is None else quoted(number), number_type,
        rules, guarded,
    )  # fmt: skip


def quoted(name: str) -> str:
    """Return a name as an identifier within a statement. Registration has checked that it holds no quote."""
    return '"' + name.replace("%", "%%") + '"'


FIND = Sql(
    "SELECT t.{key}::text, {found_value}, {found_number} FROM {target} AS t "
    "WHERE t.{key} = ANY(%(keys)s::text[]::{key_type}[]) ORDER BY t.{key} {locked} {skipping}",
    columns=("text", "bytea", "bigint"),
)


def finding_contents(schema: str, target: Target, keys: Iterable[str], *, waits: bool = True) -> Operation[Contents]:
    """Return what the keys hold, None for absent ones. Users' rows stay locked until the transaction ends.

    Without `waits` a row that another session has locked counts as absent.
    """
    contents: Contents = dict.fromkeys(keys)
    find = FIND.at(**target.names(schema), skipping="" if waits else "SKIP LOCKED")
    rows = yield find(keys=sorted(contents))
    contents.update((key, KeyContent(value, number)) for key, value, number in rows)
    return contents


GIVEN = "unnest(%(keys)s::text[], %(values)s::bytea[], %(numbers)s::bigint[]) AS g (key, value, number)"
UPDATE = Sql("UPDATE {target} AS t SET {sets} FROM " + GIVEN + " WHERE t.{key} = g.key::{key_type}")
# DO NOTHING: a row that another session has inserted since the read is not overwritten.
INSERT = Sql(
    "WITH begun AS (INSERT INTO {target} ({key}, {columns}) SELECT g.key::{key_type}, {given} FROM "
    + GIVEN
    + " ORDER BY g.key ON CONFLICT ({key}) DO NOTHING RETURNING 1) SELECT count(*) FROM begun",
    columns=("bigint",),
)
DELETE = Sql("DELETE FROM {target} WHERE {key} = ANY(%(keys)s::text[]::{key_type}[])")


def writing_contents(
    schema: str, target: Target, before: Contents, after: Contents, dropped: Collection[str]
) -> Operation[bool]:
    """Write what has changed. Return false if another session inserted one of the keys meanwhile: then read again.

    A user's row whose key was `dropped` on the way is deleted, and inserted again with its other columns at their
    defaults if the key was written afterwards.
    """
    names = target.names(schema)
    # The store has no other columns.
    lost = set() if target.name == STORE else {key for key in dropped if before[key] is not None}
    # Guarded: a trigger must also see a write that changes nothing.
    changed = {
        key: content for key, content in after.items() if target.guarded or key in lost or content != before[key]
    }
    kept = {key: content for key, content in changed.items() if content is not None}
    begun = {key: content for key, content in kept.items() if before[key] is None or key in lost}
    updated = {key: content for key, content in kept.items() if key not in begun}
    if gone := [key for key in changed if key not in kept or key in lost]:
        yield DELETE.at(**names)(keys=gone)
    if updated:
        yield UPDATE.at(**names)(**_columns(updated))
    if begun:
        [(inserted,)] = yield INSERT.at(**names)(**_columns(begun))
        return bool(inserted == len(begun))
    return True


def _columns(contents: Mapping[str, KeyContent]) -> dict[str, object]:
    return {
        "keys": list(contents),
        "values": [content.value for content in contents.values()],
        "numbers": [content.number for content in contents.values()],
    }
