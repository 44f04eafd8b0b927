"""Bulk: move a large batch, staged in tables of the node's schema, into the outbox in chunks.

Moved at once, it would make all other messages queue behind it. So one transaction decides the batch: it
records which tables are to be moved, and in which order. Each chunk then moves in a transaction of its own, which
records the progress. A process that moves chunks may die at any time, and another one continues: each message is moved
once, and in order. Two such processes take turns.

Each row has its number in its table, from 1, and a chunk is a range of numbers. Where a row stands (its ctid) would not
do: a dump that is restored, a replica or a rewrite lays rows out anew.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from mailroom.errors import MailroomError
from mailroom.message.columns import CHAR, MESSAGE_ROW, written
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import shown
from mailroom.values.numbers import MAX_INT64
from mailroom.values.shell import quoted

# Other messages queue behind one chunk. A dispatcher delivers this much in a fraction of a second.
# D-spark-5: A large batch is decided at once and moves in chunks.
CHUNK_ROWS = 10_000
CHUNK_BYTES = 32 * 1024 * 1024

NTH = "mailroom_nth"  # the number of a row in its staging table, from 1: the order of its messages
# The columns of a message that such a table may have, and their types. Other columns are ignored.
STAGED = {name: {CHAR: "text", "bigint": "int8"}.get(kind, kind) for name, kind in written(MESSAGE_ROW)}
# What of a column goes into the outbox, where that is not just the column: a null has the outbox's own default, and a
# null `key` is the id, as a missing one is.
EXPRESSIONS = {
    column.name: f"{f'coalesce({column.name}, {column.default})' if column.default else column.name}::{CHAR}"
    for column in MESSAGE_ROW
    if column.type == CHAR
} | {"key": "coalesce(key, message_id::text)"}


class BulkLost(MailroomError):
    """A table has lost rows, or is not a plain table of messages. The transaction moves nothing of it.

    `token` is that of a table of which messages are lost for good, unless they are at another place.
    """

    code = "MR-bulk-lost"

    def __init__(self, text: str, token: UUID | None = None) -> None:
        super().__init__(text)
        self.token = token


def table(token: UUID) -> str:
    """Return the name of the staging table with this token."""
    return f"staging_{token.hex}"


def table_in(schema: str, token: UUID) -> str:
    """Return the name of that table with its schema, as SQL has it."""
    return f'"{schema}".{table(token)}'


# -- Moving -----------------------------------------------------------------------------------------------------------

# Until the transaction ends, a range of numbers is read by the index of `keeping`, if there is one. These
# tables are not analyzed, so the planner might choose to scan or to sort the whole table for each chunk.
BY_NUMBER = Sql(
    "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), "
    "set_config('enable_sort', 'off', true), set_config('max_parallel_workers_per_gather', '0', true)",
    columns=("text", "text", "text", "text"),
)
# The lock comes first, so that the table stays as the next statement finds it. The table's owner may have fewer rights
# than the role that moves it, so no code of the owner may run here: no view, no policy, no type of the owner's, and no
# expression of an index or of statistics, in which the planner computes what is constant. The lock keeps new ones away.
# D-spark-7: A mover runs no code of the staging table's owner.
HOLD = Sql("LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE")
OF_MESSAGES = ", ".join(
    f"('{name}'::name, 'pg_catalog.{kind}'::regtype::oid)" for name, kind in (STAGED | {NTH: "int8"}).items()
)
STAGED_COLUMNS = Sql(
    """
SELECT a.attname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
WHERE c.oid = to_regclass('{table}')::oid AND c.relkind = 'r' AND NOT c.relrowsecurity
  AND NOT c.relhassubclass AND a.attnum > 0 AND a.attgenerated = ''
  AND (a.attname, a.atttypid) IN ({of_messages})
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_index WHERE indrelid = c.oid AND coalesce(indexprs, indpred) IS NOT NULL)
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_statistic_ext WHERE stxrelid = c.oid)
""",
    columns=("text",),
    of_messages=OF_MESSAGES,
)
MOVE = Sql(
    """
WITH moved AS (
    INSERT INTO {schema}.outbox ({names}, source)
    SELECT {expressions}, %(source)s::text FROM {table}
    WHERE {nth} > %(after)s::bigint AND {nth} <= %(upto)s::bigint ORDER BY {nth}
    RETURNING position)
SELECT count(*), min(position), max(position) FROM moved
""",
    columns=("bigint", "bigint", "bigint"),
    nth=NTH,
)


@dataclass(frozen=True, slots=True)
class MovedRows:
    """How many messages were moved, the positions of the first and the last, and whether more are left (`more`)."""

    messages: int = 0
    first: int | None = None
    last: int | None = None
    more: bool = False

    def __add__(self, other: "MovedRows") -> "MovedRows":
        found = [position for each in (self, other) for position in (each.first, each.last) if position is not None]
        return MovedRows(self.messages + other.messages, min(found, default=None), max(found, default=None))


def holding(table: str) -> Operation[list[str]]:
    """Lock a table until the transaction ends, and return which columns of messages it has.

    Raises `BulkLost` if it is not a table of messages, and psycopg's `UndefinedTable` if there is no such table.
    """
    yield IN_TRANSACTION
    yield BY_NUMBER.at()()
    yield HOLD.at(table=table)()
    columns = [name for (name,) in (yield STAGED_COLUMNS.at(table=table)())]
    if not {"message_id", "value", NTH} <= set(columns):
        raise BulkLost(f"{table} is not a plain table of messages.")
    return [name for name in columns if name != NTH]


# The owner of a schema could rename it and have another one take its name, with a view in the table's place.
TRUSTED = Sql(
    """
SELECT pg_get_userbyid(c.relowner) = current_user OR s.nspowner = (
    SELECT n.nspowner FROM pg_catalog.pg_class AS o JOIN pg_catalog.pg_namespace AS n ON n.oid = o.relnamespace
    WHERE o.oid = to_regclass('{schema}.outbox')::oid)
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace
WHERE c.oid = to_regclass('{table}')::oid
""",
    columns=("boolean",),
)


def _trusting(schema: str, table: str) -> Operation[None]:
    """Raise `BulkLost` for another role's table in a schema that the owner of Mailroom's does not own."""
    if (yield TRUSTED.at(schema=schema, table=table)()) != [(True,)]:
        raise BulkLost(
            f"{table} is left to the role that made it: its schema has to belong to the owner of Mailroom's "
            "(ALTER SCHEMA ... OWNER TO)."
        )


def moving_rows(
    schema: str, table: str, columns: Sequence[str], constants: Mapping[str, str], source: str,
    after: int = 0, upto: int = MAX_INT64,
) -> Operation[MovedRows]:  # fmt: skip
    """Copy the rows of a locked table after the number `after`, up to `upto`, into the outbox, in their order.

    `constants` are values that all of them share: topic, kind, message_type, event_type.
    """
    expressions = {name: EXPRESSIONS.get(name, name) for name in columns}
    expressions["key"] = EXPRESSIONS["key"] if "key" in columns else "message_id::text"
    expressions |= {name: f"%({name})s::text" + ("" if name == "topic" else '::"char"') for name in constants}
    statement = MOVE.at(
        schema=schema, table=table, names=", ".join(expressions), expressions=", ".join(expressions.values())
    )
    [(messages, first, last)] = yield statement(**constants, source=source, after=after, upto=upto)
    return MovedRows(messages, first, last)


# -- Deciding ---------------------------------------------------------------------------------------------------------

LATER = Sql("SELECT set_config('synchronous_commit', 'off', true)", columns=("text",))
# A logged table survives a crash of the server. Each table is altered in a transaction of its own, since that takes
# several locks; the transaction that decides makes the change durable. The key finds the rows of a chunk.
KEEP = Sql("ALTER TABLE {table} SET LOGGED, ADD PRIMARY KEY ({nth})", nth=NTH)
# The dispatcher's role owns the outbox. Its housekeeping continues the batch if the process of the table's owner dies.
OWNER = Sql(
    "SELECT quote_ident(pg_get_userbyid(relowner)::text) FROM pg_catalog.pg_class "
    "WHERE oid = to_regclass('{schema}.outbox')::oid",
    columns=("text",),
)
LET_MOVE = Sql("GRANT SELECT, UPDATE ON {table} TO {role}")  # UPDATE is for the lock


def keeping(schema: str, table: str) -> Operation[None]:
    """Make a table survive a crash of the server: as its owner, in a transaction of its own.

    Raises psycopg's `UndefinedTable`.
    """
    yield IN_TRANSACTION
    yield LATER.at()()
    yield KEEP.at(table=table)()
    [(role,)] = yield OWNER.at(schema=schema)()
    yield LET_MOVE.at(table=table, role=role.replace("%", "%%"))()


# If another session is dropping one of the tables, this waits for it and then does not find that table's row.
TAKE = Sql(
    """
WITH taken AS (
    UPDATE {schema}.spark_staging AS s SET part = p.part, messages = p.messages
    FROM unnest(%(tokens)s::uuid[], %(parts)s::bigint[], %(messages)s::bigint[]) AS p (token, part, messages)
    WHERE s.token = p.token RETURNING true)
SELECT count(*) FROM taken
""",
    columns=("bigint",),
)
COUNT = Sql("SELECT count(*) FROM {table}", columns=("bigint",))
DECIDE = Sql(
    "INSERT INTO {schema}.spark_bulk (name, batch, source, constants, messages) VALUES (%(name)s::text, "
    "%(number)s::bigint, %(source)s::text, %(constants)s::text::jsonb, %(messages)s::bigint)"
)


def deciding(
    schema: str, staging: str, name: str, number: int, tables: Mapping[UUID, int], constants: Mapping[str, str],
    source: str,
) -> Operation[None]:  # fmt: skip
    """Record that tables of the schema `staging` are to be moved in this order; each value is a table's messages.

    Call `keeping` for each table before. Raises `BulkLost`, or psycopg's `UndefinedTable`, if rows or tables are gone.
    """
    yield IN_TRANSACTION
    tokens, messages = list(tables), list(tables.values())
    [(taken,)] = yield TAKE.at(schema=schema)(tokens=tokens, parts=list(range(len(tokens))), messages=messages)
    if taken != len(tokens):
        raise BulkLost("a table is gone")
    for token in tokens:
        [(found,)] = yield COUNT.at(table=table_in(staging, token))()
        if found != tables[token]:
            raise BulkLost("rows of a table are gone")
    yield DECIDE.at(schema=schema)(
        name=name, number=number, source=source, constants=json.dumps(dict(constants)), messages=sum(messages)
    )


# -- Continuing -------------------------------------------------------------------------------------------------------

UNFINISHED = Sql("SELECT EXISTS (SELECT FROM {schema}.spark_bulk WHERE name = %(name)s::text)", columns=("boolean",))
NEXT = Sql(
    """
SELECT batch, source, constants::text FROM {schema}.spark_bulk
WHERE name = %(name)s::text ORDER BY batch LIMIT 1 FOR UPDATE
""",
    columns=("bigint", "text", "text"),
)
PART = Sql(
    """
SELECT token, schema, messages, moved, to_regclass(pg_catalog.concat(
           coalesce(quote_ident(schema), '{schema}'), '.staging_', replace(token::text, '-', ''))) IS NOT NULL
FROM {schema}.spark_staging
WHERE name = %(name)s::text AND batch = %(number)s::bigint AND part IS NOT NULL ORDER BY part LIMIT 1
""",
    columns=("uuid", "text", "bigint", "bigint", "boolean"),
)
# How many rows a chunk has, and the bytes of their values. So many rows are mostly within the bytes, and then one sum
# will do. Else CHUNK finds by a running sum where the bytes end the chunk, which has at least one row. It takes three
# times as long, a tenth of the move.
# D-spark-6: Chunks move one after the other, in one session.
MEASURE = Sql(
    """
SELECT count(*), coalesce(pg_catalog.sum(octet_length(value)), 0::bigint)
FROM {table} WHERE {nth} > %(after)s::bigint AND {nth} <= %(upto)s::bigint
""",
    columns=("bigint", "bigint"),
    nth=NTH,
)
CHUNK = Sql(
    """
SELECT count(*), coalesce(pg_catalog.max(bytes), 0::numeric)::bigint
FROM (SELECT row_number() OVER staged AS nth,
             pg_catalog.sum(coalesce(octet_length(value), 0)) OVER staged AS bytes
      FROM {table} WHERE {nth} > %(after)s::bigint AND {nth} <= %(upto)s::bigint
      WINDOW staged AS (ORDER BY {nth} ROWS UNBOUNDED PRECEDING)) AS s
WHERE nth = 1 OR bytes <= %(bytes)s::bigint
""",
    columns=("bigint", "bigint"),
    nth=NTH,
)
# A chunk need not be durable at once: everything that depends on its messages comes later in the log. The transaction
# that finishes the batch commits synchronously, and makes all chunks before it durable too.
NOW = Sql("SELECT set_config('synchronous_commit', 'on', true)", columns=("text",))
# A table that is done gets no `part` any more, and is swept like every table whose batch is in the ledger.
ADVANCE = Sql(
    """
UPDATE {schema}.spark_staging SET moved = %(moved)s::bigint,
       part = CASE WHEN messages > %(moved)s::bigint THEN part END
WHERE token = %(token)s::uuid
"""
)
PROGRESS = Sql(
    """
UPDATE {schema}.spark_bulk SET moved = moved + %(moved)s::bigint, first = %(first)s::bigint, last = %(last)s::bigint,
       at = clock_timestamp()
WHERE name = %(name)s::text AND batch = %(number)s::bigint RETURNING moved < messages
""",
    columns=("boolean",),
)
# A trigger deletes what is marked: a right to DELETE would be one to lock the table.
FINISH = Sql("UPDATE {schema}.spark_bulk SET deleted = true WHERE name = %(name)s::text AND batch = %(number)s::bigint")


def is_unfinished(schema: str, name: str) -> Operation[bool]:
    """Return whether a batch of that name is decided and not completely moved."""
    [(unfinished,)] = yield UNFINISHED.at(schema=schema)(name=name)
    return bool(unfinished)


def _chunk(table: str, after: int, upto: int, max_bytes: int) -> Operation[tuple[int, int]]:
    """Return how many rows a chunk after the number `after` has, not beyond `upto`, and the bytes of their values."""
    [(count, size)] = yield MEASURE.at(table=table)(after=after, upto=upto)
    if count == upto - after > 1 and size > max_bytes:
        [(count, size)] = yield CHUNK.at(table=table)(after=after, upto=upto, bytes=max_bytes)
    return count, size


def advancing(
    schema: str, name: str, rows: int = CHUNK_ROWS, max_bytes: int = CHUNK_BYTES
) -> Operation[MovedRows | None]:
    """Move the next chunk of the oldest batch of that name: up to `rows` messages and `max_bytes` of values.

    A chunk has at least one message. Run this in a READ COMMITTED transaction of its own. Returns what was moved; None
    if there is no such batch. Raises `BulkLost` if a table has changed.
    """
    yield IN_TRANSACTION
    found = yield NEXT.at(schema=schema)(name=name)
    if not found:
        return None
    [(number, source, constants)] = found
    moved, bytes_left = MovedRows(), max_bytes
    while moved.messages < rows and bytes_left > 0:
        parts = yield PART.at(schema=schema)(name=name, number=number)
        if not parts:
            break
        yield LATER.at()()
        [(token, elsewhere, messages, before, is_there)] = parts
        staged = table_in(elsewhere or schema, token := UUID(str(token)))
        if not is_there:
            raise _stopped(name, f"{staged} is gone, with {messages - before} messages", token)
        columns = yield from holding(staged)
        if elsewhere is not None:
            yield from _trusting(schema, staged)
        upto = min(messages, before + rows - moved.messages)
        count, size = yield from _chunk(staged, before, upto, bytes_left)
        part = yield from moving_rows(schema, staged, columns, json.loads(constants), source, before, before + count)
        if not part.messages == count > 0:
            what = f"messages {before + 1} to {upto} of {staged} are not all there"
            raise _stopped(name, f"{what}, or a trigger or rule on the outbox takes messages away", token)
        yield ADVANCE.at(schema=schema)(token=token, moved=before + count)
        moved, bytes_left = moved + part, bytes_left - size
        if before + count < messages:
            break
    if not moved.messages:
        yield NOW.at()()
        yield FINISH.at(schema=schema)(name=name, number=number)
        return moved
    values = {"name": name, "number": number, "moved": moved.messages, "first": moved.first, "last": moved.last}
    [(more,)] = yield PROGRESS.at(schema=schema)(**values)
    return replace(moved, more=more)


def _stopped(name: str, what: str, token: UUID) -> BulkLost:
    return BulkLost(
        f"The batch {shown(name)} cannot go on: {what}. If they are at another place, such as the database that the "
        "node was moved from, copy the table from there. Else give up what is lost: "
        f"python -m spark_jobs.sweep --give-up {quoted(name)}.",
        token,
    )


# So much counts as moved from then on, and the table as done, which is dropped like others.
GIVE_UP = Sql(
    """
WITH lost AS (
    UPDATE {schema}.spark_staging SET part = NULL WHERE token = %(token)s::uuid AND part IS NOT NULL
    RETURNING name, batch, messages - moved AS messages)
UPDATE {schema}.spark_bulk AS b SET moved = b.moved + lost.messages, at = clock_timestamp()
FROM lost WHERE b.name = lost.name AND b.batch = lost.batch RETURNING lost.messages
""",
    columns=("bigint",),
)


def giving_up(schema: str, name: str, token: UUID) -> Operation[int]:
    """Give up what was not moved of a table, so that its batch goes on with the next one; return how many messages.

    The ledger goes on to have them: the audit says that they are missing.
    """
    yield IN_TRANSACTION
    yield NEXT.at(schema=schema)(name=name)  # locks as `advancing` does
    rows = yield GIVE_UP.at(schema=schema)(token=token)
    return sum(int(messages) for (messages,) in rows)


# -- Pacing -----------------------------------------------------------------------------------------------------------

OLDEST = Sql(
    """
SELECT position FROM {schema}.outbox WHERE position >= %(first)s::bigint AND position <= %(last)s::bigint
ORDER BY position LIMIT 1
""",
    columns=("bigint",),
)


def oldest(schema: str, first: int, last: int) -> Operation[int | None]:
    """Return the oldest position from `first` to `last` that still waits for a dispatcher; None if there is none."""
    found = yield OLDEST.at(schema=schema)(first=first, last=last)
    return int(found[0][0]) if found else None


ABANDONED = Sql(
    """
SELECT DISTINCT ON (name) name, first, CASE WHEN moved < messages THEN last END FROM {schema}.spark_bulk
WHERE name = ANY (%(names)s::text[]) OR at < clock_timestamp() - %(seconds)s::float8 * interval '1 second'
ORDER BY name, batch
""",
    columns=("text", "bigint", "bigint"),
)
ABANDONED_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Left:
    """The name of a batch that its driver abandoned, and whether its last chunk still waits for a dispatcher."""

    name: str
    waits: bool


def listing_left(
    schema: str, names: Collection[str], abandoned_after_s: float = ABANDONED_AFTER_S
) -> Operation[list[Left]]:
    """Return the unfinished batches of these names, and those that have not moved for `abandoned_after_s` seconds."""
    left = []
    for name, first, last in (yield ABANDONED.at(schema=schema)(names=list(names), seconds=abandoned_after_s)):
        waits = last is not None and (yield from oldest(schema, first, last)) is not None
        left.append(Left(str(name), waits))
    return left
