"""What only reading rows can tell of a node: how long its oldest messages wait, and for whom.

That is too much for each scrape. So the process whose dispatcher leads samples it on a clock of its own, over a session
of its own, and gives out the last sample. Each cause of a wait has a metric: the outbox waits for the dispatcher, an
inbox for its workers, and what failed waits for its time or for an operator and counts as keys.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import get_args

import psycopg

from mailroom.figures.keys import counting_keys
from mailroom.figures.logs import reading_logs, reading_readers
from mailroom.figures.statistics import EXACT, estimated
from mailroom.figures.waiting import (
    reading_bridge_lags,
    reading_late,
    reading_link_lags,
    reading_names,
    reading_oldest,
    reading_outside,
)
from mailroom.logs.segments import listing_readers
from mailroom.metrics.failing import INBOX_FAILING, Failing
from mailroom.metrics.family import Family, Samples, of_rows
from mailroom.node.dead_letter import Stage
from mailroom.roles.advice import advise
from mailroom.session import backoff, settings
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run_async
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

log = logging.getLogger("mailroom.metrics")

INTERVAL_S = 5.0
SHARE = 100  # a sample costs the server at most a hundredth of one session's time
LONGEST_PAUSE_S = 60.0
SAMPLER_SESSION = settings.UNATTENDED | {"statement_timeout": "10s", "lock_timeout": "500ms"}
# D-metrics-4: The sampler catches every error.
WINDOW = 1_000  # numbers of dead letters below the highest that may still commit

OUTBOX_OLDEST = Family(
    "outbox_oldest_seconds",
    "gauge",
    "How long ago the first message in the outbox was sent: it waits for a dispatcher.",
    column="outbox_s",
)
INBOX_OLDEST = Family(
    "inbox_oldest_seconds",
    "gauge",
    "How long an inbox waits for a worker: since the delivery of its oldest message whose key does not fail, in its "
    "table or unread in its log, or since a failing key may be tried again. What waits for that time, is parked, or is "
    "paused with its key, does not count.",
    ("inbox",),
)
INBOX_KEYS = Family(
    "inbox_keys",
    "gauge",
    "Failing keys: waiting for their next attempt, or parked until an operator acts. Paused ones are neither.",
    ("inbox", "state"),
)
INBOX_UNREAD = Family(
    "inbox_unread_messages",
    "gauge",
    f"What an inbox has yet to read of its log: above {EXACT:,} an estimate.",
    ("inbox",),
    column="unread",
)
INBOX_LANE_BEHIND = Family(
    "inbox_lane_behind_seconds",
    "gauge",
    "How much further another lane of its log was read than the one with the oldest unread message: 0 where all wait "
    "alike. A failing key holds no lane up.",
    ("inbox",),
    column="behind_s",
)
INBOX_HELD = Family(
    "inbox_held_bytes",
    "gauge",
    "Disk that stays because this inbox has not read what is older than its log keeps.",
    ("inbox",),
    column="held_bytes",
)
INBOX_LOST = Family(
    "inbox_lost_total",
    "counter",
    "Messages that its log dropped before the inbox had read them (`--drop-unread`).",
    ("inbox",),
    column="lost",
)
LOG_BYTES = Family("log_bytes", "gauge", "The size of a log on disk.", ("log",), column="bytes")
LOG_SEGMENTS = Family(
    "log_segments", "gauge", "The segments of a log that are not emptied, one a day.", ("log",), column="segments"
)
SCHEDULED = Family(
    "scheduled_messages",
    "gauge",
    f"Messages that are not yet due: above {EXACT:,} an estimate from statistics.",
    column="scheduled",
)
EXECUTABLES_OLDEST = Family(
    "executables_oldest_seconds",
    "gauge",
    "The same as outbox_oldest_seconds for executables and their executor.",
    column="executables_s",
)
LINK_LAG = Family(
    "link_lag_seconds",
    "gauge",
    "How far this node is behind one that it reads: since when that is not read, or how old its newest rows were when "
    "they came. A node that is excluded by hand is left out.",
    ("origin",),
    column="lag_s",
)
BRIDGE_LAG = Family(
    "bridge_lag_seconds",
    "gauge",
    "How long a bridge out of this node waits for its broker: since the oldest message that it has not acknowledged "
    "was stamped. One that is cut is left out.",
    ("bridge",),
    column="lag_s",
)
PERIODIC_LATE = Family(
    "periodic_late_seconds",
    "gauge",
    "How long a periodic message has been due and is not sent. Paused ones are left out.",
    ("periodic",),
    column="late_s",
)
DEAD_LETTERS_ADDED = Family(
    "dead_letters_added_total",
    "counter",
    "Dead letters that were added since this process leads, by where the message failed.",
    ("stage",),
)
SAMPLE_AGE = Family("sample_age_seconds", "gauge", "How old all that the leader samples is.")

HIGHEST = Sql("SELECT coalesce(max(id), 0::bigint) FROM {schema}.dead_letter", columns=("bigint",))
# Numbers are drawn before their transactions commit, so one may appear below others that were counted. `seen` are
# those that were, in as few ranges as there are gaps.
# D-metrics-3: Dead letters are counted by their numbers, as ranges of those that were seen.
ADDED = Sql(
    """
WITH new AS MATERIALIZED (
    SELECT id, stage FROM {schema}.dead_letter
    WHERE id > %(floor)s::bigint
      AND NOT pg_catalog.multirange_contains_elem(%(seen)s::text::int8multirange, id))
SELECT stage, count(*), max(id), pg_catalog.range_agg(pg_catalog.int8range(id, id, '[]'))::text
FROM new GROUP BY stage
""",
    columns=("text", "bigint", "bigint", "text"),
)
TRIMMED = Sql(
    """
SELECT pg_catalog.multirange_intersect(
           pg_catalog.range_agg(r), pg_catalog.int8multirange(pg_catalog.int8range(%(floor)s::bigint, NULL)))::text
FROM pg_catalog.unnest(%(seen)s::text[]) AS t (seen), pg_catalog.unnest(t.seen::int8multirange) AS u (r)
""",
    columns=("text",),
)


class Added:
    """Counts the dead letters of one node that are added from its first look on, each once, in whatever order."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._floor: int | None = None
        self._seen = "{}"
        self.counts: dict[str, int] = dict.fromkeys(get_args(Stage), 0)

    def counting(self) -> Operation[None]:
        """Count what was added since the last look. Those that were there at the first look do not count."""
        floor = self._floor
        if floor is None:
            [(highest,)] = yield HIGHEST.at(schema=self._schema)()
            floor = highest - WINDOW
        new = yield ADDED.at(schema=self._schema)(floor=floor, seen=self._seen)
        if self._floor is not None:
            for stage, number, _, _ in new:
                self.counts[stage] += number
        if new:
            floor = max(floor, max(highest for _, _, highest, _ in new) - WINDOW)
            [(self._seen,)] = yield TRIMMED.at()(floor=floor, seen=[self._seen, *(ids for *_, ids in new)])
        self._floor = floor


def sampling(
    schema: str, added: Added, failing: Failing | None = None, *, now: datetime | None = None
) -> Operation[dict[Family, Samples]]:
    """Return a sample of the node `schema`. `now` is when it is taken; None is the database's clock.

    `added` and `failing` are what was seen at earlier samples; None for nothing yet.

    In autocommit it holds no snapshot for longer than one statement takes, which reads few rows.
    """
    outside = yield from reading_outside(schema, now)
    names = yield from reading_names(schema)
    inboxes = [each.inbox for each in names]
    # One that cannot be read now costs no other its figures, and has none itself: no 0, which would be a promise.
    tables = yield from reading_locked(schema)
    locked = locked_inboxes(tables)
    keys = {(name, state): 0 for name in inboxes for state in ("waiting", "parked")}
    oldest = dict.fromkeys(inboxes, 0.0)
    fail = dict.fromkeys(inboxes, 0)
    for each in (yield from counting_keys(schema, now)):
        if each.inbox in oldest:
            keys[each.inbox, "waiting"], keys[each.inbox, "parked"] = each.waiting, each.parked
            oldest[each.inbox], fail[each.inbox] = each.due_s or 0.0, each.tried
    failing_s = yield from (failing or Failing()).looking(schema, fail, outside.at)
    delivered = yield from reading_oldest(schema, names, locked, now)
    logs, reading = (yield from reading_logs(schema, tables)), (yield from listing_readers(schema))
    readers = (yield from reading_readers(schema, tables, now)) if reading else []
    for reader in readers:
        delivered[reader.inbox] = max(delivered.get(reader.inbox, 0.0), reader.oldest_s)
    locked |= set(reading) - {each.inbox for each in readers}
    oldest = {name: max(due_s, delivered.get(name, 0.0)) for name, due_s in oldest.items() if name not in locked}
    links = yield from reading_link_lags(schema, now)
    bridges = yield from reading_bridge_lags(schema, now)
    periodic = yield from reading_late(schema, now)
    yield from added.counting()
    outside = outside._replace(scheduled=estimated(outside.scheduled, outside.live))
    return {
        **of_rows([outside], OUTBOX_OLDEST, EXECUTABLES_OLDEST, SCHEDULED),
        INBOX_OLDEST: [((name,), seconds) for name, seconds in oldest.items()],
        INBOX_KEYS: list(keys.items()),
        **of_rows(readers, INBOX_UNREAD, INBOX_LANE_BEHIND, INBOX_HELD, INBOX_LOST),
        **of_rows(logs, LOG_BYTES, LOG_SEGMENTS),
        INBOX_FAILING: [((name,), seconds) for name, seconds in failing_s.items()],
        **of_rows(links, LINK_LAG),
        **of_rows(bridges, BRIDGE_LAG),
        **of_rows(periodic, PERIODIC_LATE),
        DEAD_LETTERS_ADDED: [((stage,), number) for stage, number in added.counts.items()],
    }


class LeaderSamples:
    """Samples a node while its process leads, and gives out the last sample. Threads may share it.

    `monotonic` is its clock, in seconds.
    """

    def __init__(
        self, home: Home, *, schema: str = DEFAULT_SCHEMA, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home
        self._schema = schema_name(schema)
        self._monotonic = monotonic
        self._repeats = Repeats()
        self._leading: asyncio.Event | None = None
        self._last: tuple[float, dict[Family, Samples]] | None = None

    def families(self) -> dict[Family, Samples]:
        """Return the last sample and its age; nothing while another process leads, or before the first one."""
        last = self._last
        if last is None or self._leading is None or not self._leading.is_set():
            return {}
        return last[1] | {SAMPLE_AGE: [((), max(self._monotonic() - last[0], 0.0))]}

    async def run(self, leading: asyncio.Event) -> None:
        """Sample while `leading` is set, and reconnect whenever that fails, until cancelled. It raises no error."""
        self._leading = leading
        failures = 0
        while True:
            await leading.wait()
            try:
                async with await self._home.connect_async("dispatcher metrics", SAMPLER_SESSION) as session:
                    added, failing = Added(self._schema), Failing()
                    while leading.is_set():
                        pause_s = await self.sample(session, added, failing)
                        failures = 0
                        self._repeats.over()
                        await asyncio.sleep(pause_s)
                    self._last = None
            except Exception as error:  # whatever it is, the lane goes on, and the sample's age tells of it
                failures += 1
                why = cause(error)
                advised = advise(error, "dispatcher", schema=self._schema)
                if (again := self._repeats.struck(why)) is not None:
                    then = f". {advised}" if advised else ""
                    log.warning("dispatcher metrics: failed (%s), trying again%s%s", why, again, then)
                await asyncio.sleep(backoff.pause_s(failures, LONGEST_PAUSE_S))

    async def sample(self, session: psycopg.AsyncConnection, added: Added, failing: Failing) -> float:
        """Take a sample over an autocommit session, and return for how many seconds to pause after it."""
        began = self._monotonic()
        self._last = began, await run_async(session, sampling(self._schema, added, failing))
        return max(INTERVAL_S, SHARE * (self._monotonic() - began))
