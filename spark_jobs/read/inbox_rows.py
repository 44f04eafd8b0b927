"""Rows of an inbox as Arrow batches: a range of clocks, page by page, with nothing locked and nothing held between."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from inbox.by_key.claim import PIN
from mailroom.errors import ConfigurationError
from mailroom.message.message import COLUMNS, EXPRESSIONS
from mailroom.order.expressions import BY_CLOCK
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.sql.runner import run
from spark_jobs.arrow import message_rows
from spark_jobs.arrow.gathered import arrays, gathered, sent
from spark_jobs.node import Node
from spark_jobs.read.numbers import taking_number
from spark_jobs.seen import Seen

IN_ONE = 50_000  # messages, where the number of ranges is not given
FIRST_ROWS = 100  # of the first page; each later one reads at most twice as many as the one before returned
PAGE_ROWS = 10_000
PAGE_BYTES = 8 * 1024 * 1024  # of values and headers, as they are sent; the message that reaches it is the page's last


@dataclass(frozen=True, slots=True)
class Planned:
    """What a task of a stream has to read: its batch's checkpoint and number, how many messages, and their digest."""

    checkpoint: str
    batch: int
    messages: int
    digest: int


@dataclass(frozen=True)
class Range(InputPartition):
    """The clocks of one task: above `above`, up to `upto`.

    `seen` is what the driver saw of the node that it planned with, and `planned`, in a stream, what it found there.
    """

    above: int
    upto: int
    seen: Seen | None = None
    planned: Planned | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which messages of a range are wanted: those of a key, or of a topic; None for all. And which of their columns."""

    key: str | None = None
    topic: str | None = None
    columns: tuple[str, ...] = tuple(COLUMNS)

    @property
    def schema(self) -> pa.Schema:
        """The columns in Arrow."""
        return pa.schema([message_rows.ROW_COLUMNS.field(name) for name in self.columns])


ALL = Chosen()

# Of a message: which one it is, and where.
DIGESTED = "uuid_hash_extended(message_id, clock)"
# What has no near bound of its own. Not as stored: JSON is compressed there, and a number such as 1e9999 has far
# more digits than bytes. Of text, which JSON may be already, the cast is nothing.
SIZES = {
    "value": "coalesce(octet_length(value), 0)",
    "value_json": "coalesce(octet_length(value_json::text), 0)",
    "headers": "coalesce(octet_length(headers::text), 0)",
}
# A page is one row, with what the server has gathered of each column. `first_large` is the clock of the first message
# with more than its share. The OFFSET keeps the subquery as it is, so each value is made into what is sent once.
# D-spark-18: The server gathers the columns of a page.
GATHERED = """
SELECT count(*), max(at), {first_large}, {digest}, {gathered} FROM ({rows} OFFSET 0) AS sent"""
# A page in which each message has at most its share of the bytes needs no running sum, which costs up to a third of the
# server's time. Of a message with more, nothing large is sent. The subquery's LIMIT keeps it as it is, so JSON becomes
# text once, and is measured as text.
# D-spark-11: A page of a read bounds its bytes without a running sum.
SHARE = "%(bytes)s::bigint / %(rows)s::bigint"
EVEN = """
SELECT {sent}, {size} > {share} AS large FROM (
    SELECT {named} FROM {schema}.{table}
    WHERE {range} AND (%(topic)s::text IS NULL OR topic = %(topic)s::text)
    ORDER BY {order} LIMIT %(rows)s::bigint) AS i"""
# `before` is the size of the page's earlier messages, so the first one comes however large it is. The window's order is
# that of the index, which is read no further than the limit.
PAGE = """
SELECT {sent} FROM (
    SELECT *, coalesce(sum({size}) OVER (
               ORDER BY {order} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
    FROM {schema}.{table}
    WHERE {range} AND (%(topic)s::text IS NULL OR topic = %(topic)s::text)
    ORDER BY {order} LIMIT %(rows)s::bigint) AS i
WHERE before < %(bytes)s::bigint"""
UNBOUNDED = """
SELECT {sent} FROM (
    SELECT * FROM {schema}.{table}
    WHERE {range} AND (%(topic)s::text IS NULL OR topic = %(topic)s::text)
    ORDER BY {order} LIMIT %(rows)s::bigint) AS i"""
BY_RANGE = f"{BY_CLOCK} > %(above)s::bigint AND {BY_CLOCK} <= %(upto)s::bigint"
BY_KEY = "key = %(key)s::text AND clock > %(above)s::bigint AND clock <= %(upto)s::bigint"
OF_INBOX = {"table": "inbox_{inbox}", "order": BY_CLOCK, "range": BY_RANGE}
OF_KEY = OF_INBOX | {"order": "clock", "range": BY_KEY}
# One segment of one lane, whose index has the clocks in order.
OF_LANE = {
    "table": "log_{log}",
    "order": "clock",
    "range": (
        "segment = {segment} AND lane = %(lane)s::bigint::smallint AND clock > %(above)s::bigint "
        "AND clock <= %(upto)s::bigint AND (%(key)s::text IS NULL OR key = %(key)s::text)"
    ),
}


@cache
def _page(columns: tuple[str, ...], *, is_of_key: bool, is_of_lane: bool, is_digested: bool, is_even: bool) -> Sql:
    """Return the statement of a page of these columns; what they weigh bounds it, if one has no near bound."""
    behind = {"at": "clock"} | ({"digested": DIGESTED} if is_digested else {})
    parts = OF_LANE if is_of_lane else OF_KEY if is_of_key else OF_INBOX
    sizes = {name: SIZES[name] for name in columns if name in SIZES}
    size = f"({' + '.join(sizes.values())})"
    is_even = is_even and bool(sizes)
    if is_even:
        named = {name: EXPRESSIONS[name] for name in columns} | behind
        parts = parts | {"named": _as(named), "size": size, "share": SHARE}
        shared = {name: f"CASE WHEN {size} <= {SHARE} THEN {name} END" if name in sizes else name for name in columns}
        given, behind = [sent(name, value) for name, value in shared.items()], {name: name for name in behind}
    else:
        given = [sent(name) for name in columns]
        parts = parts | ({"size": size} if sizes else {})
    rows = filled(EVEN if is_even else PAGE if sizes else UNBOUNDED, **parts, sent=", ".join([*given, _as(behind)]))
    pieces = gathered(columns)
    return Sql(
        GATHERED,
        [*["bigint"] * 4, *(kind for _, kind in pieces)],
        first_large="min(at) FILTER (WHERE large)" if is_even else "NULL::bigint",
        digest="bit_xor(digested)" if is_digested else "NULL::bigint",
        gathered=", ".join(piece for piece, _ in pieces),
        rows=rows,
    )


def _as(expressions: Mapping[str, str]) -> str:
    return ", ".join(f"{expression} AS {name}" for name, expression in expressions.items())


WALKED = 20_000  # messages that are counted one by one
SAMPLED_BYTES = 8 * 1024 * 1024
# Each n-th message, by its clock. The distance of two clocks says nothing: those between may be of other inboxes, or of
# a backlog that is gone. Few messages are counted one by one, which is exact; many are estimated by a sample of blocks.
# D-spark-17: Offsets are clocks, and a read is cut by counting messages.
CUT = Sql(
    """
WITH walked AS MATERIALIZED (
    SELECT clock FROM {schema}.inbox_{inbox} WHERE {by_range} ORDER BY {by_clock} LIMIT {walked}),
sample AS MATERIALIZED (
    SELECT least(100, {sampled_bytes} * 100.0 / pg_relation_size('{schema}.inbox_{inbox}'))::float4 AS percent
    FROM walked HAVING count(*) = {walked}),
chosen AS (
    SELECT clock FROM walked WHERE NOT EXISTS (SELECT FROM sample)
    UNION ALL
    SELECT clock FROM {schema}.inbox_{inbox}
        TABLESAMPLE SYSTEM (coalesce((SELECT percent FROM sample), 0)) REPEATABLE (0)
    WHERE clock > %(above)s::bigint AND clock <= %(upto)s::bigint),
numbered AS MATERIALIZED (
    SELECT clock, row_number() OVER (ORDER BY clock) AS nth, count(*) OVER () AS total FROM chosen)
SELECT clock FROM numbered, LATERAL (
    SELECT coalesce(%(number)s::bigint, least(8, greatest(1, round(
        total * 100.0 / coalesce((SELECT percent FROM sample), 100) / {in_one})::bigint))) AS number) AS n
WHERE nth * number / total > (nth - 1) * number / total ORDER BY nth
""",
    columns=("bigint",),
    by_range=BY_RANGE,
    by_clock=BY_CLOCK,
    walked=WALKED,
    sampled_bytes=SAMPLED_BYTES,
    in_one=IN_ONE,
)


def cutting(schema: str, inbox: str, above: int, upto: int, number: int | None) -> Operation[list[Range]]:
    """Cut the clocks above `above` and up to `upto` into at most `number` ranges of about as many messages each.

    None stands for one range in 50,000 messages, and 8 at most: a range costs a task and a connection.
    """
    if upto <= above:
        return []
    yield PIN.at()()
    rows = yield CUT.at(schema=schema, inbox=inbox)(above=above, upto=upto, number=number)
    edges = [above, *(clock for (clock,) in rows[:-1]), upto]
    return [Range(low, high) for low, high in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Page:
    """The messages of a page, the clock of the last one, and their digest if it is wanted, which is 0 of none.

    It `is_even` if no message had more than its share of the page's bytes, and `is_last` if no other page follows.
    """

    messages: int
    last: int | None
    digest: int
    batch: pa.RecordBatch | None
    is_even: bool
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where the messages of a page are: in an inbox, or in a segment of a log, in one of its lanes."""

    names: Mapping[str, str]
    lane: int | None = None


def paging(
    schema: str, inbox: str | PagePlace, above: int, upto: int, chosen: Chosen, rows: int, *, digested: bool = True,
    even: bool = True,
) -> Operation[Page]:  # fmt: skip
    """Read the first messages above a clock and up to another, at most that many: a page.

    If it should be `even`, it ends before a message with more than its share, unless that is the first one.
    """
    place = PagePlace({"inbox": inbox}) if isinstance(inbox, str) else inbox
    names = {"schema": schema, **place.names}
    kind = {"is_of_key": chosen.key is not None, "is_of_lane": place.lane is not None, "is_digested": digested}
    wanted: dict[str, object] = {"above": above, "upto": upto, "topic": chosen.topic, "rows": rows, "bytes": PAGE_BYTES}
    wanted |= {"key": chosen.key, "lane": place.lane}
    yield PIN.at()()
    if even and not SIZES.keys().isdisjoint(chosen.columns):
        statement = _page(chosen.columns, **kind, is_even=True).at(**names)
        [(count, last, first_large, digest, *pieces)] = yield statement(**wanted)
        if first_large is None:
            return _the_page(chosen, count, last, digest, pieces, is_even=True, is_last=count < rows)
        [(count, last, _, digest, *pieces)] = yield statement(**wanted | {"upto": first_large - 1})
        if count:
            return _the_page(chosen, count, last, digest, pieces, is_even=False)
    statement = _page(chosen.columns, **kind, is_even=False).at(**names)
    [(count, last, _, digest, *pieces)] = yield statement(**wanted)
    return _the_page(chosen, count, last, digest, pieces, is_even=False, is_last=not count)


def _the_page(
    chosen: Chosen, count: int, last: int | None, digest: int | None, pieces: Sequence[Any], *, is_even: bool,
    is_last: bool = False,
) -> Page:  # fmt: skip
    batch = None
    if count:
        batch = pa.RecordBatch.from_arrays([*arrays(chosen.columns, count, pieces)], schema=chosen.schema)
    return Page(count, last, digest or 0, batch, is_even, is_last)


def batches(
    node: Node, inbox: str, wanted: Range, chosen: Chosen = ALL, number: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Read the messages of a range over a connection of its own; those that are reaped meanwhile may be missing.

    Not in a stream: there it is all that was `planned`, which is then reported, or `ConfigurationError`; `number` is
    Spark's number of that micro-batch. Each page is a
    transaction, READ ONLY, so that no snapshot and no lock is held however slowly Spark takes them.
    """
    with replace(node, seen=wanted.seen or node.seen).connect(f"read {inbox}", autocommit=True) as connection:
        if wanted.planned is not None and number is not None:
            planned = wanted.planned
            with connection.transaction():
                run(connection, taking_number(node.schema, inbox, planned.checkpoint, planned.batch, number))
        connection.read_only = True
        read = Read()
        is_digested = wanted.planned is not None
        yield from pages(
            connection, node.schema, PagePlace({"inbox": inbox}), wanted, chosen, read, digested=is_digested
        )
        if wanted.planned is not None:
            demand_all(inbox, wanted.planned, read)
            connection.read_only = False
            with connection.transaction():
                run(connection, reporting(node.schema, inbox, wanted, wanted.planned))


@dataclass(slots=True)
class Read:
    """What a task has read: how many messages, and their digest if it is wanted; and how it goes on."""

    messages: int = 0
    digest: int = 0
    limit: int = 0
    even: bool = True


class Clocks(Protocol):
    """Clocks above one, up to another."""

    @property
    def above(self) -> int:
        """The clock above which they begin."""

    @property
    def upto(self) -> int:
        """The last one."""


def pages(
    connection: psycopg.Connection, schema: str, place: PagePlace, clocks: Clocks, chosen: Chosen, read: Read,
    *, digested: bool,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Read the messages of a place page by page, each in a transaction of its own; count them in `read`."""
    # The size of a row costs as much as the row, so a page reads few more than will fit. And pages are even until
    # one is not, or could not be: where there is one large message there are more, each of which would end a page.
    above = clocks.above
    read.limit = max(read.limit, FIRST_ROWS)
    while True:
        with connection.transaction():
            page = run(
                connection,
                paging(schema, place, above, clocks.upto, chosen, read.limit, digested=digested, even=read.even),
            )
        if page.batch is None or page.last is None:
            break
        read.messages += page.messages
        read.digest ^= page.digest
        above, read.limit = page.last, min(2 * page.messages, PAGE_ROWS)
        read.even = page.is_even and _average(page.batch) <= PAGE_BYTES / read.limit
        yield page.batch
        # In a log a task has many places, with few messages each.
        if page.is_last and place.lane is not None:
            break


def _average(batch: pa.RecordBatch) -> float:
    """Return about how many bytes a message of a page has in the columns without a near bound."""
    sized = SIZES.keys() & set(batch.schema.names)
    return float(sum(batch.column(name).nbytes for name in sized) / batch.num_rows)


def demand_all(inbox: str, planned: Planned, read: Read) -> None:
    """Raise `ConfigurationError` unless a task has read what was planned."""
    messages, digest = read.messages, read.digest
    if (messages, digest) != (planned.messages, planned.digest):
        raise ConfigurationError(
            f"A task of batch {planned.batch} of the stream of inbox {inbox!r} read {messages} messages, and "
            f"{planned.messages} were planned. Either another consumer took some since, or this executor reads another "
            "database than the driver, or a standby that is late. Nothing was deleted. Stop the other consumer, or "
            "correct the connection string of the executor, and start the query again: if messages are gone, it says "
            "how to go on.",
            code="MR-spark-messages-gone",
        )


# Tasks of one batch wait here for one another, for the time of this statement.
REPORT = Sql(
    """
UPDATE {schema}.my_spark_stream SET read = read + int8multirange(int8range(%(above)s::bigint, %(upto)s::bigint, '(]'))
WHERE inbox = %(inbox)s::text AND checkpoint = %(checkpoint)s::text AND batch = %(batch)s::bigint RETURNING true
""",
    columns=("boolean",),
)


def reporting(schema: str, inbox: str, read: Clocks, planned: Planned) -> Operation[None]:
    """Report a range as read: only what was reported is deleted. Raises `ConfigurationError` if it is not wanted."""
    reported = yield REPORT.at(schema=schema)(
        inbox=inbox, checkpoint=planned.checkpoint, batch=planned.batch, above=read.above, upto=read.upto
    )
    if not reported:
        raise ConfigurationError(
            f"Batch {planned.batch} of the stream of inbox {inbox!r} is not under way any more: it was committed, or "
            "another checkpoint reads the inbox now.",
            code="MR-spark-batch-over",
        )
