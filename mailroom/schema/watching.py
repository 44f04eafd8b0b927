"""Watched tables: triggers that send what happens to the rows, in the transaction that changes them.

The triggers are the only record of a watch: they stay with the table through renames, dumps and restores. What they do
is in `alembic/base/13_watch.sql`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mailroom.errors import ConfigurationError, InvalidMessage
from mailroom.schema.acts import UNWATCH, WATCH
from mailroom.schema.audit import changed, checked_actor
from mailroom.schema.checks import checking
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, MAX_KEY_BYTES, schema_name, shown, topic_name, utf8

# The longest of the words that follow the topic is `truncated`. An md5 has 32 bytes.
LONGEST_WORD = "truncated"
MAX_PREFIX_BYTES = MAX_KEY_BYTES - 32


@dataclass(frozen=True, slots=True)
class Watched:
    """A watched table, as `schema.table`. `fault` says why some of its changes are no longer sent: tables change."""

    table: str
    topic: str
    key_prefix: str
    without: tuple[str, ...]
    fault: str | None = None

    def __str__(self) -> str:
        """What is sent of it, such as `topic customer, without password`."""
        prefix = f", key prefix {self.key_prefix}" if self.key_prefix else ""
        return f"topic {self.topic}{prefix}" + (f", without {', '.join(self.without)}" if self.without else "")


class _Found(NamedTuple):
    oid: int
    kind: str
    by_row: bool
    is_partition: bool
    inherits: bool
    is_ours: bool
    is_deferrable: bool
    columns: str  # JSON: the number of each name
    key: str | None  # JSON: the names of the primary key


# Names are compared as a whole, so that they may have dots. Not by to_regclass, which fails without USAGE on a schema.
# D-watch-1: The triggers are the only record of a watch.
TABLE = Sql(
    """
SELECT c.oid::bigint, c.relkind::text, c.relkind = 'p' OR EXISTS (
           SELECT FROM pg_catalog.pg_constraint AS f
           WHERE f.conrelid = c.oid AND f.confrelid = c.oid AND f.contype = 'f'
             AND (f.confdeltype IN ('c', 'n', 'd') OR f.confupdtype IN ('c', 'n', 'd'))), c.relispartition,
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits AS i
                                   WHERE i.inhparent = c.oid OR i.inhrelid = c.oid),
       EXISTS (SELECT FROM pg_catalog.pg_class AS m
               WHERE m.relnamespace = c.relnamespace AND m.relname = 'outbox_executable'),
       EXISTS (SELECT FROM pg_catalog.pg_index AS i
               WHERE i.indrelid = c.oid AND i.indisprimary AND NOT i.indimmediate),
       (SELECT pg_catalog.json_object_agg(a.attname, a.attnum) FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)::text,
       (SELECT pg_catalog.json_agg(a.attname ORDER BY a.attnum)
        FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_attribute AS a
             ON a.attrelid = i.indrelid AND a.attnum = ANY((i.indkey::smallint[])[:i.indnkeyatts - 1])
        WHERE i.indrelid = c.oid AND i.indisprimary)::text
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE pg_catalog.concat(n.nspname, '.', c.relname) = %(table)s::text
  AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
""",
    into=_Found,
)


# D-watch-5: Hidden columns are known by name and by number.
@dataclass(frozen=True, slots=True)
class _Table:
    oid: int
    by_row: bool
    hidden: str  # the numbers of its hidden columns, as the trigger has them


def _finding(table: str, without: tuple[str, ...]) -> Operation[_Table]:
    """Return a table that can be watched without these columns, or raise `ConfigurationError`."""
    of = shown(table)
    found = yield TABLE.at()(table=table)
    if not found:
        raise ConfigurationError(
            f"There is no table {of}. Give schema.table; names are case-sensitive and without quotes.",
            code="MR-table-cannot-be-watched",
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"Several tables are called {of}, since names of schemas and tables may have dots: rename one.",
            code="MR-table-cannot-be-watched",
        )
    [it] = TABLE.named(found)
    if reason := _refusal(table, it):
        raise ConfigurationError(f"{of} {reason}", code="MR-table-cannot-be-watched")
    columns = json.loads(it.columns)
    if missing := sorted(set(without) - set(columns)):
        raise ConfigurationError(
            f"{of} has no column {shown(missing[0])} to leave out. Names are case-sensitive.",
            code="MR-table-cannot-be-watched",
        )
    if keys := sorted(set(without) & set(json.loads(it.key))):
        raise ConfigurationError(
            f"Column {shown(keys[0])} of {of} is in the primary key, which every message has.",
            code="MR-table-cannot-be-watched",
        )
    return _Table(it.oid, it.by_row, f"{it.oid}:{','.join(map(str, sorted(columns[name] for name in without)))}")


def _refusal(table: str, it: _Found) -> str | None:
    if it.is_ours or table.startswith(("pg_", "information_schema.")):
        return f"is in a schema of {'Mailroom' if it.is_ours else 'PostgreSQL'}: give a table of your own."
    if it.kind not in ("r", "p"):
        return "is a view or a foreign table. Only a table can be watched: give the one behind it."
    if it.is_partition:
        return "is a partition: watch the table that it is a partition of."
    if it.inherits:
        return (
            "inherits from another table, or others inherit from it, so no key is unique in it. "
            "A partitioned table can be watched."
        )
    if it.key is None:
        return "has no primary key, which makes the keys of its messages: add one."
    if it.is_deferrable:
        return "has a deferrable primary key, under which rows may share a key for a while: make it one that is not."
    return None


# Their names come first in the order in which PostgreSQL fires triggers, so that what another trigger does to the same
# table is told later. They name the node, since several may watch a table.
#
# By row where statement triggers do not see all, or not in order: they miss what is written into a partition directly,
# and a MERGE that moves rows to another; and where a foreign key of the table cascades onto the table itself, they fire
# again later, so that a key that one statement frees and uses again would be told as freed last.
# D-watch-6: Row triggers only where statement triggers do not see all, or not in order.
TRIGGERS = {
    False: {
        "insert": "AFTER INSERT ON %s REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT",
        "update": "AFTER UPDATE ON %s REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT",
        "delete": "AFTER DELETE ON %s REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT",
        "truncate": "AFTER TRUNCATE ON %s FOR EACH STATEMENT",
    },
    True: {
        "row": "AFTER INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW",
        "truncate": "AFTER TRUNCATE ON %s FOR EACH STATEMENT",
    },
}
# PostgreSQL quotes the names and runs the statement itself: in a client's text, a driver might take a part of an odd
# name for a parameter.
DEFINE = Sql(
    """
SELECT pg_catalog.set_config('mailroom.statement', pg_catalog.format(
           'CREATE TRIGGER %%I %%s EXECUTE FUNCTION {schema}.watch(%%s)', %(name)s::text,
           pg_catalog.format(%(event)s::text, pg_catalog.format('%%I.%%I', n.nspname, c.relname)),
           (SELECT pg_catalog.string_agg(pg_catalog.quote_literal(a.value), ', ' ORDER BY a.nth)
            FROM pg_catalog.unnest(%(arguments)s::text[]) WITH ORDINALITY AS a (value, nth))), true)
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = %(table)s::bigint::oid
""",
    columns=("text",),
)
PREPARE = Sql(
    "SELECT current_setting('lock_timeout'), set_config('lock_timeout', '3s', true)", columns=("text", "text")
)
RESTORE = Sql("SELECT set_config('lock_timeout', %(before)s::text, true)", columns=("text",))
APPLY = Sql("DO $$ BEGIN EXECUTE pg_catalog.current_setting('mailroom.statement'); END $$")


def _watching(
    table: str,
    topic: str,
    *,
    key_prefix: str = "",
    without: str | Iterable[str] = (),
    schema: str = DEFAULT_SCHEMA,
    actor: str | None = None,
    why: str | None = None,
) -> Operation[None]:
    """Send a message for each row of a table that is inserted, updated or deleted from now on.

    `table` is schema.table, as in the catalog: case-sensitive and without quotes. The messages are events of the
    topics `<topic>.created`, `.updated` and `.deleted` (message type O; event type C, U, D) in the writer's
    transaction. The key is `key_prefix` (at most 992 bytes) and the row's primary key; a primary key of several columns
    is written as a JSON array. The value is `{"old": row, "new": row, "changed": [names of columns]}`; `old` is null
    for a new row, `new` for a deleted one, and `changed` is for updates. The columns `without` are in no message, and a
    row that changed in nothing else sends none. TRUNCATE sends one `<topic>.truncated`.

    If the table is watched already, these settings replace the earlier ones. Waits at most 3 s for the table's writers
    (and readers, if it is watched already), then raises the driver's error (55P03). Writers need no rights on
    Mailroom's schema; the caller must own the table or have TRIGGER on it, and EXECUTE on the functions `watch` and
    `watch_audit` of the schema: `actor` (user@host of this process) and `why` go into the table `audit`. In the
    caller's transaction, also for users' own migrations. Raises `ConfigurationError` if the table cannot be watched,
    and `InvalidMessage` for the topic, the prefix, `actor` or `why`.
    """
    schema, actor = schema_name(schema), checked_actor(actor, why)
    topic_name(f"{topic_name(topic)}.{LONGEST_WORD}")
    if (size := len(_text(key_prefix, "key_prefix"))) > MAX_PREFIX_BYTES:
        raise InvalidMessage(
            f"The key_prefix has {size} bytes; {MAX_PREFIX_BYTES} are allowed.", code="MR-invalid-argument"
        )
    columns = tuple(dict.fromkeys([without] if isinstance(without, str) else without))
    _text(table, "table")
    for column in columns:
        _text(column, "column")
    yield IN_TRANSACTION
    yield from checking(schema)
    found = yield from _finding(table, columns)
    arguments = [topic, key_prefix, found.hidden, *columns]
    before = [each for each in (yield from _watches(schema)) if each.table == table]
    [(lock_timeout, _)] = yield PREPARE.at()()
    if (yield DROP.at(schema=schema)(table=table)):  # it may have been watched by other triggers
        yield APPLY.at()()
    for name, event in TRIGGERS[found.by_row].items():
        yield DEFINE.at(schema=schema)(
            table=found.oid, name=f"0_{schema}_watch_{name}", event=event, arguments=arguments
        )
        yield APPLY.at()()
    yield RESTORE.at()(before=lock_timeout)
    told = changed(before, [Watched(table, topic, key_prefix, columns)])
    yield AUDIT.at(schema=schema)(act=WATCH.words, table=table, change=told, actor=actor, why=why)


AUDIT = Sql(
    """
SELECT {schema}.watch_audit(%(act)s::text, %(table)s::text, %(change)s::text, %(actor)s::text, %(why)s::text)::text
""",
    columns=("text",),
)


def _text(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidMessage(f"The {what} is text, not {type(text).__name__}.", code="MR-invalid-argument")
    return utf8(text, what)


DROP = Sql(
    """
SELECT pg_catalog.set_config('mailroom.statement', pg_catalog.string_agg(
           pg_catalog.format('DROP TRIGGER %%I ON %%I.%%I', t.tgname, n.nspname, c.relname), '; '), true)
FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE t.tgfoid = '{schema}.watch()'::regprocedure::oid AND t.tgparentid = 0::oid
  AND pg_catalog.concat(n.nspname, '.', c.relname) = %(table)s::text
HAVING pg_catalog.count(*) > 0
""",
    columns=("text",),
)


def _unwatching(
    table: str, *, schema: str = DEFAULT_SCHEMA, actor: str | None = None, why: str | None = None
) -> Operation[bool]:
    """Stop sending messages about a table; return whether it was watched. In the caller's transaction.

    Waits at most 3 s for those who use the table, then raises the driver's error (55P03). `actor` and `why` are those
    of `watch`.
    """
    schema, actor = schema_name(schema), checked_actor(actor, why)
    _text(table, "table")
    yield IN_TRANSACTION
    yield from checking(schema)
    before = [each for each in (yield from _watches(schema)) if each.table == table]
    if not (yield DROP.at(schema=schema)(table=table)):
        return False
    [(lock_timeout, _)] = yield PREPARE.at()()
    yield APPLY.at()()
    yield RESTORE.at()(before=lock_timeout)
    told = changed(before, [])
    yield AUDIT.at(schema=schema)(act=UNWATCH.words, table=table, change=told, actor=actor, why=why)
    return True


# tgargs holds the arguments in the database's encoding, each ended by a zero byte.
LIST = Sql(
    """
SELECT pg_catalog.concat(n.nspname, '.', c.relname), pg_catalog.bool_and(t.tgenabled IN ('O', 'A')),
       pg_catalog.json_agg(pg_catalog.regexp_replace(t.tgname::text, '^.*_', ''))::text,
       pg_catalog.json_agg((SELECT pg_catalog.json_agg(
           pg_catalog.convert_from(pg_catalog.decode(pg_catalog.replace(a.hex, ' ', ''), 'hex'),
                                   pg_catalog.getdatabaseencoding()) ORDER BY a.nth)
        FROM pg_catalog.string_to_table(
            pg_catalog.regexp_replace(pg_catalog.encode(t.tgargs, 'hex'), '(..)', '\\1 ', 'g'), '00 ')
            WITH ORDINALITY AS a (hex, nth)
        WHERE a.nth <= t.tgnargs))::text
FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE t.tgfoid = '{schema}.watch()'::regprocedure::oid AND t.tgparentid = 0::oid
GROUP BY c.oid, n.nspname, c.relname ORDER BY n.nspname, c.relname
""",
    columns=("text", "boolean", "text", "text"),
)


def _listing(*, schema: str = DEFAULT_SCHEMA) -> Operation[list[Watched]]:
    """Return the watched tables, ordered by name."""
    schema = schema_name(schema)
    yield from checking(schema)
    watched = []
    for table, is_enabled, names, arguments in (yield LIST.at(schema=schema)()):
        topic, key_prefix, hidden, *without = json.loads(arguments)[0]
        fault = yield from _fault(table, hidden, tuple(without), set(json.loads(names)), is_enabled)
        watched.append(Watched(table, topic, key_prefix, tuple(without), fault))
    return watched


def _watches(schema: str) -> Operation[list[Watched]]:
    """Return the watched tables without their faults: what they were told to send."""
    rows = yield LIST.at(schema=schema)()
    given = [(table, json.loads(arguments)[0]) for table, _, _, arguments in rows]
    return [Watched(table, topic, prefix, tuple(without)) for table, (topic, prefix, _, *without) in given]


def _fault(
    table: str, hidden: str, without: tuple[str, ...], triggers: set[str], is_enabled: bool
) -> Operation[str | None]:
    try:
        found = yield from _finding(table, without)
    except ConfigurationError as error:
        return str(error)
    if hidden != found.hidden and hidden.startswith(f"{found.oid}:"):
        return "A column that is left out is not the one that had its name: watch it again."
    if not is_enabled:
        return "Some of its triggers are disabled: watch it again, or enable them."
    if triggers != set(TRIGGERS[found.by_row]):
        return "It lacks the triggers that it needs: watch it again."
    return None


watch, watch_async = on_connections("watch", _watching)
unwatch, unwatch_async = on_connections("unwatch", _unwatching)
watched, watched_async = on_connections("watched", _listing)
