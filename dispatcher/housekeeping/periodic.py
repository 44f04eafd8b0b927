"""Periodic messages: sends those that are due, each in the transaction that moves its row on to the next time.

So one message is sent for each time, by whichever daemon. Several daemons, such as an old leader and the next one,
share the rows out by their locks. A row whose message the database refuses stops no other: it is tried again a while
later.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg

from dispatcher.delivery.sift import reason_of
from mailroom.errors import MailroomError
from mailroom.session.settings import refusal
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async, run_in_transaction
from mailroom.sql.sqlstate import Meaning, meaning
from outbox.periodic.schedule import Schedule, due_text, message_id

log = logging.getLogger("mailroom.dispatcher")

DUE_ROWS = 20  # in one transaction
STEPS = 10  # transactions in one round of the janitor
LOOK_INTERVAL_S = 1.0  # a row that was added, changed or resumed is seen as soon as this
HELD_S = 10.0  # how long a row rests whose message was refused

LOOK = Sql(
    """
SELECT extract(epoch FROM next_at - coalesce(%(now)s::timestamptz, clock_timestamp()))::float8
FROM {schema}.periodic WHERE NOT paused AND name <> ALL (%(held)s::text[]) ORDER BY next_at LIMIT 1
""",
    columns=("float8",),
)


def looking(schema: str, held: list[str], now: datetime | None = None) -> Operation[float | None]:
    """Return in how many seconds a message is to be sent, 0 or less if one is late; None if there is none."""
    rows = yield LOOK.at(schema=schema)(held=held, now=now)
    return float(rows[0][0]) if rows else None


DUE = Sql(
    """
SELECT name FROM {schema}.periodic, (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now OFFSET 0) AS m
WHERE NOT paused AND next_at <= now AND name <> ALL (%(held)s::text[]) ORDER BY next_at LIMIT %(rows)s::bigint
""",
    columns=("text",),
)


def listing_due(schema: str, rows: int, held: list[str], now: datetime | None = None) -> Operation[list[str]]:
    """Return the names of the first `rows` that are due."""
    return [name for (name,) in (yield DUE.at(schema=schema)(rows=rows, held=held, now=now))]


# A row that another session has locked is being sent by it, or changed by an operator. Of one that was sent meanwhile
# PostgreSQL reads the conditions again, and leaves it out.
# D-daemon-4: The next time of a periodic message is stored.
TAKE = Sql(
    """
SELECT p.name, cron, time_zone, missed, jitter_s, due_at, n.id, m.now
FROM {schema}.periodic AS p, {schema}.node AS n,
     (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now OFFSET 0) AS m
WHERE NOT paused AND next_at <= m.now AND p.name <> ALL (%(held)s::text[])
  AND (%(only)s::text IS NULL OR p.name = %(only)s::text)
ORDER BY next_at LIMIT %(rows)s::bigint FOR UPDATE OF p SKIP LOCKED
""",
    columns={
        "name": "text",
        "cron": "text",
        "time_zone": "text",
        "missed": "text",
        "jitter_s": "float8",
        "due_at": "timestamptz",
        "node": "uuid",
        "now": "timestamptz",
    },
)
SEND = Sql(
    """
INSERT INTO {schema}.outbox (message_id, topic, key, kind, value, headers)
SELECT s.id, p.topic, coalesce(p.key, s.id::text), p.kind, p.value,
       coalesce(p.headers, '{}'::jsonb) || pg_catalog.jsonb_build_object('periodic', p.name, 'due', s.due)
FROM unnest(%(names)s::text[], %(ids)s::uuid[], %(dues)s::text[]) WITH ORDINALITY AS s (name, id, due, nth)
JOIN {schema}.periodic AS p ON p.name = s.name ORDER BY s.nth
"""
)
MOVE = Sql(
    """
UPDATE {schema}.periodic AS p
SET due_at = m.due_at, next_at = m.next_at, last_at = coalesce(m.last_at, p.last_at), last_error = NULL
FROM unnest(%(names)s::text[], %(due_at)s::timestamptz[], %(next_at)s::timestamptz[], %(last_at)s::timestamptz[])
     AS m (name, due_at, next_at, last_at)
WHERE p.name = m.name
"""
)


@dataclass(frozen=True, slots=True)
class Sent:
    """How many messages were sent, and whether there may be more to send now."""

    messages: int
    more: bool


def sending_due(
    schema: str, *, rows: int = DUE_ROWS, held: list[str] | None = None, only: str | None = None,
    now: datetime | None = None,
) -> Operation[Sent]:  # fmt: skip
    """Send the messages of up to `rows` periodic messages that are due, or of `only` one, and move these on.

    In a READ COMMITTED transaction. Of one that was missed many times not all may be sent, and it stays due.
    """
    taken = TAKE.named((yield TAKE.at(schema=schema)(rows=rows, held=held or [], only=only, now=now)))
    names: list[str] = []
    ids: list[UUID] = []
    dues: list[str] = []
    moved = []
    more = len(taken) == rows
    for each in taken:
        schedule = Schedule(each.name, each.cron, each.time_zone, each.missed, each.jitter_s)
        found, next_due = schedule.by(each.due_at, each.now)
        next_at = schedule.sent_at(next_due)
        more = more or next_at <= each.now
        names += [each.name] * len(found)
        dues += map(due_text, found)
        ids += [message_id(each.node, each.name, due) for due in found]
        moved.append((each.name, next_due, next_at, found[-1] if found else None))
    if names:
        yield SEND.at(schema=schema)(names=names, ids=ids, dues=dues)
    if moved:
        given = zip(("names", "due_at", "next_at", "last_at"), map(list, zip(*moved, strict=True)), strict=True)
        yield MOVE.at(schema=schema)(**dict(given))
    return Sent(len(names), more)


FAIL = Sql(
    """
UPDATE {schema}.periodic SET last_error = %(reason)s::text WHERE name = (
    SELECT name FROM {schema}.periodic WHERE name = %(name)s::text FOR UPDATE SKIP LOCKED)
"""
)


def failing(schema: str, name: str, reason: str) -> Operation[None]:
    """Record why the message was refused, unless another session has the row."""
    yield FAIL.at(schema=schema)(name=name, reason=reason)


class PeriodicSends:
    """Sends what is due over one of our autocommit connections; `monotonic` is its clock for pauses, in seconds.

    Between two looks it asks the database nothing.
    """

    def __init__(self, schema: str, monotonic: Callable[[], float]) -> None:
        self._schema = schema
        self._monotonic = monotonic
        self._look_at = float("-inf")
        self._held: dict[str, float] = {}  # rows whose message was refused, and until when they rest
        self._told: dict[str, str] = {}  # what was logged of them

    async def send_due(self, connection: psycopg.AsyncConnection, now: datetime | None = None) -> bool:
        """Send what is due; return whether there may be more. `now` is the time, None for the database's clock.

        Raises the database's errors, but for those of single messages.
        """
        moment = self._monotonic()
        if now is None and moment < self._look_at:
            return False
        self._held = {name: until for name, until in self._held.items() if until > moment}
        due_in_s = await run_async(connection, looking(self._schema, [*self._held], now))
        if due_in_s is None or due_in_s > 0:
            self._look_at = moment + min(due_in_s or LOOK_INTERVAL_S, LOOK_INTERVAL_S)
            return False
        for _ in range(STEPS):
            if not await self._step(connection, now):
                return False
        return True

    async def _step(self, connection: psycopg.AsyncConnection, now: datetime | None) -> bool:
        held = [*self._held]
        try:
            return (await run_in_transaction(connection, sending_due(self._schema, held=held, now=now))).more
        except (psycopg.Error, MailroomError) as error:
            if _is_of_the_session(error, connection):
                raise
        names = await run_async(connection, listing_due(self._schema, DUE_ROWS, held, now))
        for name in names:
            await self._send_alone(connection, name, now)
        return len(names) == DUE_ROWS

    async def _send_alone(self, connection: psycopg.AsyncConnection, name: str, now: datetime | None) -> None:
        try:
            await run_in_transaction(connection, sending_due(self._schema, only=name, now=now))
        except (psycopg.Error, MailroomError) as error:
            if _is_of_the_session(error, connection):
                raise
            reason = _reason(error)
        else:
            self._told.pop(name, None)
            return
        self._held[name] = self._monotonic() + HELD_S
        if self._told.get(name) != reason:
            self._told[name] = reason
            log.error(
                "the periodic message %s is not sent: %s. It is tried again; to see it: mailroom periodic list",
                name, reason,
            )  # fmt: skip
        await run_async(connection, failing(self._schema, name, reason))


def _is_of_the_session(error: BaseException, connection: psycopg.AsyncConnection) -> bool:
    return meaning(error, connection) in (Meaning.LOST, Meaning.READ_ONLY)


def _reason(error: psycopg.Error | MailroomError) -> str:
    """Return why a message was refused, without anything of the message."""
    if not isinstance(error, psycopg.Error):
        return str(error)
    found = error.diag
    return refusal(error) or reason_of(error.sqlstate or "", found.constraint_name, found.table_name, found.column_name)
