"""`mailroom tail`."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from uuid import UUID

import click
import psycopg
from psycopg import sql

from inbox.cli.tail_log import reading_log, starting_in_log
from mailroom.cli.call import Call, pass_call
from mailroom.cli.failures import drop_output
from mailroom.cli.messages import content_lines, message_json
from mailroom.cli.output import as_json, duration, json_text, printable, shown, wrapped
from mailroom.cli.parameters import INBOX, LIMIT, seconds, seconds_above_0
from mailroom.logs.readers import LOG
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.expressions import BY_CLOCK
from mailroom.schema import finding
from mailroom.session import settings
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run

POLL_INTERVAL_S = 1.0
# Read at a time. Values may be large.
PAGE, PAGE_OF_VALUES = 100, 10
# A session that listens and is not read, behind a pager for example, holds back the notifications of all others, so the
# server ends it: a live one is never idle for so long.
SESSION = settings.SESSION | {"idle_session_timeout": "60s"}

START = Sql(
    """
SELECT coalesce((SELECT {by_clock} FROM {schema}.inbox_{inbox}
                 WHERE %(since_s)s::float8 IS NULL
                    OR delivered_at < clock_timestamp() - interval '1 s' * %(since_s)s::float8
                 ORDER BY {by_clock} DESC LIMIT 1), 0), {channel}
FROM (SELECT '{schema}.inbox_{inbox}'::regclass AS t) AS named
""",
    columns=("bigint", "text"),
    by_clock=BY_CLOCK,
    channel=locks.channel("t"),
)
# Clocks rise from delivery to delivery, so what is new stands at one end of the index, however much waits before it.
NEXT = """
SELECT {selected}, extract(epoch FROM clock_timestamp() - sent_at)::float8,
       coalesce(octet_length(value), octet_length(value_json::text))::bigint
FROM {schema}.inbox_{inbox}
WHERE {by_clock} > %(clock)s::bigint ORDER BY {by_clock} LIMIT %(limit)s::bigint
"""
SHORT = Sql(
    NEXT,
    columns=("bigint", "timestamp", "text", "text", "uuid", "float8", "bigint"),
    selected="clock, delivered_at AT TIME ZONE 'UTC', topic, key, message_id",
    by_clock=BY_CLOCK,
)
WHOLE = Sql(
    NEXT, columns=(*COLUMNS.values(), "float8", "bigint"), selected=SELECTED, by_clock=BY_CLOCK,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """A delivered message: how many seconds ago it was sent, and the size of its value in bytes."""

    delivered_at: datetime
    topic: str
    key: str
    id: UUID
    clock: int
    age_s: float
    size: int


def _starting(schema: str, inbox: str, since_s: float | None) -> Operation[tuple[int, str, str | None]]:
    """Return the clock after which to begin, the channel to listen on, and the log that the inbox reads, if it does.

    Raises `UnknownInbox`.
    """
    yield from finding(schema, inbox)
    for log, _ in (yield LOG.at(schema=schema, inbox=inbox)()):
        return *(yield from starting_in_log(schema, log, since_s)), log
    [(clock, channel)] = yield START.at(schema=schema, inbox=inbox)(since_s=since_s)
    return clock, channel, None


def _reading(
    schema: str, inbox: str, log: str | None, clock: int, whole: bool
) -> Operation[tuple[list[tuple[Line, Message | None]], int]]:
    """Return the next messages after a clock, with their content if `whole`, and the clock to go on after."""
    limit = PAGE_OF_VALUES if whole else PAGE
    if log is None:
        rows = yield (WHOLE if whole else SHORT).at(schema=schema, inbox=inbox)(clock=clock, limit=limit)
        upto = rows[-1][0] if rows else clock
    else:
        rows, upto = yield from reading_log(schema, inbox, log, clock, limit, whole)
    if not whole:
        return [(_seen(*row), None) for row in rows], upto
    found = [
        (Line(message.delivered_at, message.topic, message.key, message.id, message.clock, *row[-2:]), message)
        for row, message in zip(rows, messages(rows), strict=True)
    ]
    return [*found], upto


def _seen(clock: int, at: datetime, topic: str, key: str, id: UUID, age_s: float, size: int) -> Line:
    return Line(at.replace(tzinfo=UTC), topic, key, id, clock, age_s, size)


def following(
    connection: psycopg.Connection,
    schema: str,
    inbox: str,
    *,
    since_s: float | None = None,
    whole: bool = False,
    poll_interval_s: float = POLL_INTERVAL_S,
) -> Iterator[tuple[Line, Message | None]]:
    """Give what is delivered into an inbox, or into its log, for ever; the connection is an autocommit one.

    Each look is a statement by itself, and waits in no transaction.
    """
    clock, channel, log = run(connection, _starting(schema, inbox, since_s))
    if not is_pooled(connection):
        connection.execute(settings.READ_ONLY)
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    while True:
        before = clock
        found, clock = run(connection, _reading(schema, inbox, log, before, whole))
        yield from found
        if clock > before:
            continue
        if is_pooled(connection):
            time.sleep(poll_interval_s)
        else:
            # A delivery notifies only while a worker sleeps: what is delivered to busy ones is seen by the poll.
            for _ in connection.notifies(timeout=poll_interval_s, stop_after=1):
                pass


@click.command()
@click.argument("inbox", type=INBOX)
@click.option("--since", "since_s", metavar="S", type=seconds, help="Begin with what came in the last S seconds. [now]")
@click.option("--limit", type=LIMIT, help="End after this many messages. [run until Ctrl-C]")
@click.option("--values", "whole", is_flag=True, help="Show headers and values, too.")
@click.option(
    "--poll-interval-s", type=seconds_above_0, default=POLL_INTERVAL_S, show_default=True, help="How often to look."
)
@pass_call
def tail(call: Call, inbox: str, since_s: float | None, limit: int | None, whole: bool, poll_interval_s: float) -> None:
    """Show messages as they are delivered into an inbox, without taking them, until Ctrl-C.

    One line each: when it was delivered, topic, key, id, how long ago it was sent, and the size of its value. With
    --json each line is one object.

    It looks at the inbox again and again. It misses a message that is reaped before it looks, as a worker that keeps up
    does within milliseconds; messages that were replayed are not shown again. Of an inbox that reads a log it shows all
    that the inbox wants of what is delivered into the log, wherever the inbox reads. It locks nothing and holds no
    snapshot. If its output is not read for a minute, the server ends it.

    \b
    Examples:
      mailroom tail shipping
      mailroom tail shipping --since 600 --limit 100
      mailroom tail shipping --values --json | jq .value
    """
    try:
        with call.connection("tail", SESSION, autocommit=True) as connection:
            found = following(
                connection, call.schema, inbox, since_s=since_s, whole=whole, poll_interval_s=poll_interval_s
            )
            for seen, message in islice(found, limit):
                sys.stdout.write((_json(seen, message) if call.json else _for_people(seen, message)) + "\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        drop_output()  # `head` has seen enough


def _json(seen: Line, message: Message | None) -> str:
    content = {} if message is None else message_json(message)
    return json_text(content | as_json(seen))


def _for_people(seen: Line, message: Message | None) -> str:
    heading = wrapped(
        f"{shown(seen.delivered_at)}  {seen.topic}  key {seen.key}  {seen.id}  {duration(max(seen.age_s, 0))}  "
        f"{seen.size:,} bytes"
    )
    return printable("\n".join([heading, *([] if message is None else content_lines(message))]))
