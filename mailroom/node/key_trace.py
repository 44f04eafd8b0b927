"""Where the messages of a key are: what people know is `order-42`, and not the id of a message.

Each place is one statement that reads a bounded number of rows. Inboxes, parked keys and the lanes of logs are read by
their indexes. No other table has an index by key, since that would cost every message: of them the rows at one end are
looked through. What was not looked at is told, with the reason.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from mailroom.figures.keys import FIELDS, IN_TROUBLE, IS_PARKED, NEXT_TRY
from mailroom.node.trace import DISCARDED, Location, Where, cause_id
from mailroom.order.traits import chosen
from mailroom.schema import checking
from mailroom.sql.locked import LockedTable, locked_inboxes, reading_locked
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.values import shell
from mailroom.values.names import DEFAULT_SCHEMA, Key, key_text, schema_name
from mailroom.values.numbers import count
from mailroom.values.readable import ReadableRepr

__all__ = ["KeyPlaces", "KeyStanding", "LogUnread", "Unseen", "trace_key", "trace_key_async"]

SHOWN = 20  # messages of each inbox, log, link and table
LOOKED = 10_000  # rows that are looked through where no index knows the key
# Of the archive and of logs, of which there may be many: of all inboxes or logs together, and of each at least.
LOOKED_OF_ALL, LOOKED_OF_EACH = 20_000, 100


@dataclass(frozen=True, slots=True, repr=False)
class KeyStanding(ReadableRepr):
    """How a key stands in an inbox where it is failing, parked or paused, which `state` says.

    The key '' is the whole of a total inbox. `since` is when it was parked or paused, `retry_at` when a failing one is
    tried next. `error` is its last failure, and `paused_by` says who paused it, and why.
    """

    inbox: str
    key: str
    state: str
    attempts: int
    since: datetime | None
    retry_at: datetime | None
    error: str | None
    paused_by: str | None


@dataclass(frozen=True, slots=True)
class LogUnread:
    """What an inbox has yet to read of a key in a log: `unread` messages, the first of them with the clock `first`.

    The key's messages stand in `lane`, which the inbox has read up to `clock`.
    """

    inbox: str
    log: str
    lane: int
    clock: int
    unread: int
    first: int | None


@dataclass(frozen=True, slots=True)
class Unseen:
    """What was not looked at: of which place, and why."""

    place: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class KeyPlaces(ReadableRepr):
    """A key: where it is in trouble, where its messages are, what inboxes have yet to read of it, what was not seen."""

    key: str
    states: tuple[KeyStanding, ...]
    places: tuple[Location, ...]
    unread: tuple[LogUnread, ...]
    unseen: tuple[Unseen, ...]

    @property
    def is_nowhere(self) -> bool:
        """Whether nothing was found."""
        return not (self.states or self.places)


class FoundOfKey(NamedTuple):
    """A message of the key, in an inbox, log or link `of` a place; `looked` counts the rows that were read of that.

    If none was found there, the id and all other fields are None, whatever their type says.
    """

    of: str | None
    looked: int
    topic: str
    sent_at: datetime
    since: datetime
    clock: int | None
    attempts: int | None
    retry_at: datetime | None
    reason: str | None
    is_parked: bool | None
    is_one_queue: bool | None
    id: UUID | None
    causation: str | None


# A place is a source of rows, `looked`: those of the key, or those among which the key's are looked for.
FIND = """
WITH looked AS MATERIALIZED ({source}),
counted AS MATERIALIZED (SELECT of, count(*) AS looked FROM looked GROUP BY of)
SELECT c.of, c.looked, f.topic, f.sent_at, f.since, f.clock, f.attempts, f.retry_at, f.reason, f.is_parked,
       f.is_one_queue, f.message_id, f.causation
FROM counted AS c LEFT JOIN LATERAL (
    SELECT * FROM looked AS l WHERE l.of IS NOT DISTINCT FROM c.of AND l.key = %(key)s::text LIMIT {rows}) AS f ON true
ORDER BY c.of, f.since
"""
ROW = """{of}::text AS of, {topic} AS topic, sent_at, {since} AS since, {clock}::bigint AS clock,
       {attempts}::bigint AS attempts, NULL::timestamptz AS retry_at, {reason}::text AS reason, false AS is_parked,
       false AS is_one_queue, message_id, headers ->> 'causation'::text AS causation, key"""


def _row(
    of: str = "NULL", topic: str = "topic", since: str = "sent_at", clock: str = "NULL", attempts: str = "NULL",
    reason: str = "NULL",
) -> str:  # fmt: skip
    return filled(ROW, of=of, topic=topic, since=since, clock=clock, attempts=attempts, reason=reason)


def _place(source: str) -> Sql:
    return Sql(FIND, into=FoundOfKey, source=source)


OUTBOX = _place(f"SELECT {_row()} FROM {{schema}}.outbox ORDER BY position LIMIT {{most}}")
FAN_OUT = _place(f"SELECT {_row()} FROM {{schema}}.fan_out AS w ORDER BY w.clock LIMIT {{most}}")
OPERATION = "target || '.'::text || operation"
EXECUTABLES = _place(
    f"SELECT {_row(topic=OPERATION)} FROM {{schema}}.outbox_executable ORDER BY position LIMIT {{most}}"
)
SCHEDULED = _place(
    f"SELECT {_row(since='deliver_at')} FROM {{schema}}.scheduled ORDER BY deliver_at, position LIMIT {{most}}"
)
DEAD = _place(
    f"SELECT {_row('inbox', since='failed_at', clock='clock', attempts='attempts', reason='reason')} "
    "FROM {schema}.dead_letter ORDER BY id DESC LIMIT {most}"
)
TRANSIT = _place(
    f"""SELECT t.* FROM {{schema}}.link AS k CROSS JOIN LATERAL (
    SELECT {_row("k.name", since="stamped_at", clock="sent_clock")}
    FROM {{schema}}.transit WHERE link = k.number AND seq > k.acked ORDER BY seq LIMIT {{most}}) AS t"""
)
# Of each inbox by the index on (key, clock), and of what was moved aside by that on (inbox, key, clock). Inboxes that
# are not to be read stand in the text, so that the plan does not lock their tables. All messages of a parked key count
# as parked, and so do those of a total inbox that is parked, which is noted under the key ''.
INBOXES = _place(
    """SELECT r.name AS of, h.topic, h.sent_at, coalesce(k.parked_at, h.delivered_at) AS since, h.clock,
       k.attempts::bigint AS attempts, {next_try} AS retry_at, k.last_error AS reason, {is_parked} AS is_parked,
       coalesce({is_one_queue}, false) AS is_one_queue, h.message_id, h.headers ->> 'causation'::text AS causation,
       h.key
FROM {schema}.inbox_registry AS r CROSS JOIN LATERAL (
    (SELECT clock, topic, key, sent_at, delivered_at, message_id, headers FROM {schema}.inbox
     WHERE inbox = r.name AND inbox NOT IN ('{but}') AND key = %(key)s::text ORDER BY clock LIMIT {rows})
    UNION ALL
    (SELECT clock, topic, key, sent_at, delivered_at, message_id, headers FROM {schema}.parked
     WHERE inbox = r.name AND key = %(key)s::text ORDER BY clock LIMIT {rows})
    ORDER BY clock LIMIT {rows}) AS h
LEFT JOIN {schema}.key_state AS k ON k.inbox = r.name AND k.key IN (h.key, '')""".replace(
        "{next_try}", filled(NEXT_TRY, row="k")
    )
    .replace("{is_parked}", filled(IS_PARKED, row="k"))
    .replace("{is_one_queue}", chosen("r", parks_one=False))
)
REAPED = _place(
    f"""SELECT t.* FROM {{schema}}.inbox_registry AS r CROSS JOIN LATERAL (
    SELECT {_row("r.name", since="reaped_at", clock="clock", reason=DISCARDED)}
    FROM {{schema}}.reaped WHERE inbox = r.name ORDER BY reaped_at DESC, clock DESC LIMIT {{most}}) AS t
WHERE r.keep_reaped_days IS NOT NULL"""
)
# A key has one lane, and each segment an index by lane and clock.
LOGS = _place(
    f"""SELECT t.* FROM {{schema}}.log_registry AS r CROSS JOIN LATERAL (
    SELECT {_row("r.name", since="delivered_at", clock="clock")}
    FROM {{schema}}.log WHERE log = r.name AND lane = {{schema}}.lane_of(%(key)s::text, r.lanes)
    ORDER BY clock DESC LIMIT {{most}}) AS t"""
)
STATES = Sql(
    """
SELECT {fields}, last_error, paused_by FROM (
    SELECT s.inbox, s.key, s.attempts, s.retry_at, s.parked_at, s.paused_at, s.last_error, s.paused_by
    FROM {schema}.inbox_registry AS r JOIN {schema}.key_state AS s ON s.inbox = r.name
    WHERE s.key IN (%(key)s::text, '') AND {in_trouble}) AS k
ORDER BY inbox, key
""",
    into=KeyStanding,
    fields=FIELDS,
    in_trouble=filled(IN_TROUBLE, row="s"),
)


class UnreadOfLane(NamedTuple):
    """A row of `UNREAD`: what a `LogUnread` has, and how many rows of the lane were read."""

    inbox: str
    log: str
    lane: int
    clock: int
    unread: int
    first: int | None
    looked: int


# Above the newest receipt of the lane, as a claim of the inbox would go on.
UNREAD = Sql(
    """
SELECT r.name, l.name, n.lane::bigint, a.clock, u.unread, u.first, u.looked
FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log
CROSS JOIN LATERAL (SELECT {schema}.lane_of(%(key)s::text, l.lanes) AS lane) AS n
CROSS JOIN LATERAL (SELECT clock FROM {schema}.log_receipt AS e WHERE e.inbox = r.name AND e.lane = n.lane
                    ORDER BY epoch DESC, clock DESC LIMIT 1) AS a
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE key = %(key)s::text) AS unread,
           min(clock) FILTER (WHERE key = %(key)s::text) AS first, count(*) AS looked
    FROM (SELECT key, clock FROM {schema}.log AS o
          WHERE o.log = l.name AND o.lane = n.lane AND o.clock > a.clock ORDER BY clock LIMIT {most}) AS o) AS u
ORDER BY r.name
""",
    into=UnreadOfLane,
)
MANY = Sql(
    """
SELECT (SELECT count(*) FROM {schema}.inbox_registry WHERE keep_reaped_days IS NOT NULL),
       (SELECT count(*) FROM {schema}.log_registry),
       (SELECT count(*) FROM {schema}.inbox_registry WHERE log IS NOT NULL)
""",
    columns=("bigint", "bigint", "bigint"),
)
# Which tables this role may not read what is needed of.
DENIED = Sql(
    """
SELECT DISTINCT n.of FROM unnest(%(tables)s::text[], %(columns)s::text[]) AS n (of, name)
WHERE NOT pg_catalog.has_column_privilege('{schema}.' || n.of, n.name, 'SELECT'::text) ORDER BY 1
""",
    columns=("text",),
)


@dataclass(frozen=True, slots=True, repr=False)
class KeyPlace(ReadableRepr):
    """Where messages of a key may be: the tables that are read, the columns of each, and what a reader is told."""

    where: Where
    name: str
    find: Sql
    needs: dict[str, str]
    end: str = ""  # which rows are looked through; empty if an index finds those of the key


MESSAGE = "topic key sent_at message_id headers "
PLACES = (
    KeyPlace("inbox", "inbox", INBOXES, {
        "inbox_registry": "name order", "key_state": "inbox key attempts retry_at parked_at last_error",
        "inbox": MESSAGE + "inbox clock delivered_at", "parked": MESSAGE + "inbox clock delivered_at",
    }),
    KeyPlace("outbox", "the outbox", OUTBOX, {"outbox": MESSAGE + "position"}, "oldest"),
    KeyPlace("outbox", "what is fanned out", FAN_OUT, {"fan_out": MESSAGE + "clock"}, "oldest"),
    KeyPlace("outbox_executable", "the outbox of executables", EXECUTABLES, {
        "outbox_executable": "key sent_at message_id headers target operation position",
    }, "oldest"),
    KeyPlace("scheduled", "what is scheduled", SCHEDULED, {"scheduled": MESSAGE + "deliver_at position"}, "next due"),
    KeyPlace("transit", "link", TRANSIT, {
        "link": "name number acked", "transit": MESSAGE + "link seq stamped_at sent_clock",
    }, "oldest"),
    KeyPlace("dead_letter", "dead letters", DEAD, {
        "dead_letter": MESSAGE + "id inbox clock failed_at attempts reason",
    }, "newest"),
    KeyPlace("log", "log", LOGS, {
        "log_registry": "name lanes", "log": MESSAGE + "log lane clock delivered_at"
    }, "newest"),
    KeyPlace("reaped", "the archive of inbox", REAPED, {
        "inbox_registry": "name keep_reaped_days", "reaped": MESSAGE + "inbox clock reaped_at discarded",
    }, "newest"),
)  # fmt: skip
STATES_NEED = {
    "inbox_registry": "name",
    "key_state": "inbox key attempts retry_at parked_at paused_at last_error paused_by",
}
UNREAD_NEEDS = {
    "inbox_registry": "name log", "log_registry": "name lanes", "log": "log lane clock key",
    "log_receipt": "inbox lane epoch clock",
}  # fmt: skip


def tracing_key(key: Key, *, limit: int = SHOWN, schema: str = DEFAULT_SCHEMA) -> Operation[KeyPlaces]:
    """Return where the messages of a key are, and in which inboxes the key is failing, parked or paused.

    At most `limit` messages of each inbox, log, link and table are returned. An outbox, scheduled messages, dead
    letters, what is on its way and the archive have no index by key: of each 10,000 rows are looked through, of all
    archives together 20,000. What was not looked at stands in `unseen`, also because a table is locked, or since this
    role may not read it. Waits for no lock.
    """
    return _tracing_key(schema_name(schema), key_text(key), count(limit, "limit"))


def _tracing_key(schema: str, key: str, limit: int) -> Operation[KeyPlaces]:
    yield from checking(schema)
    locked = yield from reading_locked(schema)
    denied = yield from _denied(schema)
    unseen: list[Unseen] = [Unseen(each.table, f"{each}") for each in locked]

    def may_read(what: str, needs: dict[str, str]) -> bool:
        kept = [table for table in needs if table in denied]
        if kept:
            unseen.append(Unseen(what, f"this role may not read the table {kept[0]}"))
        return not kept and not _keeps_out(locked, needs)

    states: list[KeyStanding] = []
    if may_read("states of keys", STATES_NEED):
        states = STATES.named((yield STATES.at(schema=schema)(key=key)))
    many = (0, 0, 0)
    if "inbox_registry" not in denied and "log_registry" not in denied:
        [many] = yield MANY.at(schema=schema)()
    places: list[Location] = []
    for place in PLACES:
        if not may_read(place.name, place.needs):
            continue
        most = {"reaped": _of_each(many[0]), "log": _of_each(many[1])}.get(place.where, LOOKED)
        names = {"schema": schema, "rows": str(limit + 1), "most": str(most + 1)}
        if place.find is INBOXES:
            names["but"] = "', '".join(sorted(locked_inboxes(locked)))
        rows: list[FoundOfKey] = place.find.named((yield place.find.at(**names)(key=key)))
        places += _kept(place, rows, key, limit)
        unseen += _beyond(schema, place, rows, key, limit, most)
    unread: list[LogUnread] = []
    if many[2] and may_read("what inboxes have yet to read of logs", UNREAD_NEEDS):
        most = _of_each(many[2])
        found: list[UnreadOfLane] = UNREAD.named((yield UNREAD.at(schema=schema, most=str(most + 1))(key=key)))
        unread = [LogUnread(*row[:-1]) for row in found]
        unseen += [
            Unseen(f"log {row.log}", f"inbox {row.inbox} has more than {most:,} messages of lane {row.lane} to read")
            for row in found if row.looked > most
        ]  # fmt: skip
    return KeyPlaces(key, tuple(states), tuple(places), tuple(unread), tuple(unseen))


def _of_each(number: int) -> int:
    return max(LOOKED_OF_EACH, min(LOOKED, LOOKED_OF_ALL // max(number, 1)))


def _denied(schema: str) -> Operation[set[str]]:
    needs = [each.needs for each in PLACES] + [STATES_NEED, UNREAD_NEEDS]
    pairs = sorted({(table, name) for need in needs for table, names in need.items() for name in names.split()})
    tables, columns = map(list, zip(*pairs, strict=True))
    return {table for (table,) in (yield DENIED.at(schema=schema)(tables=tables, columns=columns))}


def _keeps_out(locked: Iterable[LockedTable], tables: Iterable[str]) -> bool:
    """Return whether one of the tables is locked, or a day of the archive or a segment of a log, which it has."""
    return any(
        each.table == table or (table in ("reaped", "log", "log_receipt") and each.table.startswith(_part_of(table)))
        for each in locked for table in tables
    )  # fmt: skip


def _part_of(table: str) -> str:
    return "receipts_" if table == "log_receipt" else f"{table}_"


def _kept(place: KeyPlace, rows: Iterable[FoundOfKey], key: str, limit: int) -> Iterator[Location]:
    shown: Counter[str | None] = Counter()
    for row in rows:
        shown[row.of] += 1
        if row.id is None or shown[row.of] > limit:
            continue
        where: Where = "parked" if row.is_parked else place.where
        inbox, link = (None, row.of) if where == "transit" else (row.of, None)
        yield Location(
            where, inbox, row.topic, key, row.sent_at, row.since, row.clock, None, row.attempts, row.retry_at,
            row.reason, row.id, cause_id(row.causation), link, bool(row.is_one_queue),
        )  # fmt: skip


def _beyond(schema: str, place: KeyPlace, rows: list[FoundOfKey], key: str, limit: int, most: int) -> Iterator[Unseen]:
    parts: dict[str | None, list[FoundOfKey]] = {}
    for row in rows:
        # A dead letter names its inbox, but all of them are one place.
        parts.setdefault(None if place.where == "dead_letter" else row.of, []).append(row)
    for of, mine in parts.items():
        name = place.name if of is None else f"{place.name} {of}"
        counts = Counter(row.of for row in mine)
        if max(counts.values()) > limit:
            yield Unseen(name, f"it has more than {limit:,} messages of the key")
        if place.end and sum({row.of: row.looked for row in mine}.values()) > most:
            more = ""
            if place.where == "reaped":
                more = f": {shell.command('archive', 'list', of or '', '--key', key, schema=schema)}"
            yield Unseen(name, f"it has no index by key, and only its {most:,} {place.end} rows were looked at{more}")


# What users call: on a sync and on an async connection.
trace_key, trace_key_async = on_connections("trace_key", tracing_key)
