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

from mailroom.dead_letter import Stage
from mailroom.figures.keys import counting_keys
from mailroom.figures.leaders import LEASE_OF
from mailroom.metrics.catalog import EXACT, estimated
from mailroom.metrics.failing import INBOX_FAILING, Failing
from mailroom.metrics.family import Family, Samples
from mailroom.names import DEFAULT_SCHEMA, schema_name
from mailroom.order.expressions import BY_CLOCK
from mailroom.roles.advice import advise
from mailroom.schema.partitions import PARTITIONS
from mailroom.session import backoff, settings
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.sql.runner import run_async

log = logging.getLogger("mailroom.metrics")

INTERVAL_S = 5.0
SHARE = 100  # a sample costs the server at most a hundredth of one session's time
LONGEST_PAUSE_S = 60.0
SESSION = settings.UNATTENDED | {"statement_timeout": "10s", "lock_timeout": "500ms"}
AT_ONCE = 50  # inboxes of one statement, which holds a snapshot and their locks
RECENT_S = 60
# D-metrics-4: The sampler catches every error.
WINDOW = 1_000  # numbers of dead letters below the highest that may still commit

OUTBOX_OLDEST = Family(
    "outbox_oldest_seconds",
    "gauge",
    "How long ago the first message in the outbox was sent: it waits for a dispatcher.",
)
INBOX_OLDEST = Family(
    "inbox_oldest_seconds",
    "gauge",
    "How long an inbox waits for a worker: since the delivery of its oldest message whose key does not fail, or since "
    "a failing key may be tried again. What waits for that time, is parked, or is paused with its key, does not count.",
    ("inbox",),
)
INBOX_KEYS = Family(
    "inbox_keys",
    "gauge",
    "Failing keys: waiting for their next attempt, or parked until an operator acts. Paused ones are neither.",
    ("inbox", "state"),
)
SCHEDULED = Family(
    "scheduled_messages", "gauge", f"Messages that are not yet due: above {EXACT:,} an estimate from statistics."
)
EXECUTABLES_OLDEST = Family(
    "executables_oldest_seconds", "gauge", "The same as outbox_oldest_seconds for executables and their executor."
)
LINK_LAG = Family(
    "link_lag_seconds",
    "gauge",
    "How far this node is behind one that it reads: since when that is not read, or how old its newest rows were when "
    "they came. A node that is excluded by hand is left out.",
    ("origin",),
)
BRIDGE_LAG = Family(
    "bridge_lag_seconds",
    "gauge",
    "How long a bridge out of this node waits for its broker: since the oldest message that it has not acknowledged "
    "was stamped. One that is cut is left out.",
    ("bridge",),
)
PERIODIC_LATE = Family(
    "periodic_late_seconds",
    "gauge",
    "How long a periodic message has been due and is not sent. Paused ones are left out.",
    ("periodic",),
)
DEAD_LETTERS_ADDED = Family(
    "dead_letters_added_total",
    "counter",
    "Dead letters that were added since this process leads, by where the message failed.",
    ("stage",),
)
SAMPLE_AGE = Family("sample_age_seconds", "gauge", "How old all that the leader samples is.")

# By the primary keys: what is first in the outbox is next, whatever its sent_at.
NODE = Sql(
    """
SELECT extract(epoch FROM at.now - (SELECT sent_at FROM {schema}.outbox ORDER BY position LIMIT 1))::float8,
       extract(epoch FROM at.now - (SELECT sent_at FROM {schema}.outbox_executable ORDER BY position LIMIT 1))::float8,
       (SELECT count(*) FROM (SELECT FROM {schema}.scheduled LIMIT {most}) AS few),
       pg_catalog.pg_stat_get_live_tuples('{schema}.scheduled'::regclass), at.now
FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp())) AS at (now)
""",
    columns=("float8", "float8", "bigint", "bigint", "timestamptz"),
    most=EXACT + 1,
)
# Whether this role may read the inbox by itself: an inbox that was made after its grants it may not.
NAMES = Sql(
    """
SELECT name, {partitions}, coalesce(pg_catalog.has_table_privilege(
           pg_catalog.to_regclass(pg_catalog.concat('{schema}.inbox_', name))::oid, 'SELECT'), false)
FROM {schema}.inbox_registry ORDER BY name
""",
    columns=("text", "bigint", "boolean"),
    partitions=PARTITIONS,
)
# Above the healthy floor there are hardly any messages of failing keys, or none; below it there are no others.
# OFFSET 0: row by row until a key is healthy, which is mostly the first one; in one piece, the keys of all messages are
# looked up. The inboxes stand in the text, in the same portions each time, so the server soon plans none of them any
# more: for 1,000 inboxes planning took most of the time. (SELECT ...) IS NULL stays an index probe, as in a claim.
# D-metrics-2: The oldest message is looked for in each inbox.
OLDEST_WHERE = filled(
    """(
    SELECT '{inbox}'::text, i.delivered_at FROM (
        SELECT key, delivered_at, {by_clock} AS clock FROM {schema}.{messages}
        WHERE {chosen}{by_clock} > (
            SELECT greatest(floor, healthy_floor) FROM {schema}.inbox_registry WHERE name = '{inbox}')
        ORDER BY {by_clock} OFFSET 0) AS i
    WHERE (SELECT s.clock FROM {schema}.key_state AS s WHERE s.inbox = '{inbox}' AND s.key = i.key) IS NULL
    ORDER BY i.clock LIMIT 1)""",
    by_clock=BY_CLOCK,
)
OLDEST_OF = filled(OLDEST_WHERE, messages="inbox_{inbox}", chosen="")
# It takes longer, but no right to each inbox: for what this role may read only as a part of all inboxes.
# D-metrics-7: `mailroom top` finds the oldest messages through the table of all inboxes.
OLDEST_THROUGH_PARENT = filled(OLDEST_WHERE, messages="inbox", chosen="inbox = '{inbox}' AND ")
OLDEST = Sql(
    """
SELECT inbox, extract(epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - delivered_at)::float8
FROM ({each}) AS oldest (inbox, delivered_at)
""",
    columns=("text", "float8"),
)
# A reader notes on its link since when it does not read, but may be gone itself. A batch that came a while
# ago says nothing of now: had something waited, it would have come since.
LINKS = Sql(
    """
SELECT o.name, greatest(
           extract(epoch FROM at.now - o.since)::float8,
           extract(epoch FROM at.now - coalesce(l.until, o.created_at))::float8,
           extract(epoch FROM r.received_at - r.stamped_at)::float8, 0::float8)
FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp())) AS at (now) CROSS JOIN {schema}.origin AS o
{lease}
LEFT JOIN LATERAL (
    SELECT received_at, stamped_at FROM {schema}.receipt WHERE origin = o.number ORDER BY last DESC LIMIT 1) AS r
    ON r.received_at > at.now - {recent_s}::float8 * interval '1 s'
WHERE o.state <> 'excluded'
""",
    columns=("text", "float8"),
    lease=filled(LEASE_OF, role="'links'"),
    recent_s=RECENT_S,
)
BRIDGES = Sql(
    """
SELECT l.name, coalesce(greatest(extract(
           epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - t.stamped_at)::float8, 0::float8), 0::float8)
FROM {schema}.bridge_out AS b JOIN {schema}.link AS l ON l.number = b.link LEFT JOIN LATERAL (
    SELECT stamped_at FROM {schema}.transit WHERE link = l.number AND seq > l.acked ORDER BY seq LIMIT 1) AS t ON true
WHERE l.state = 'open'
""",
    columns=("text", "float8"),
)
PERIODIC = Sql(
    """
SELECT name, greatest(
           extract(epoch FROM coalesce(%(now)s::timestamptz, clock_timestamp()) - next_at)::float8, 0::float8)
FROM {schema}.periodic WHERE NOT paused
""",
    columns=("text", "float8"),
)
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
    [(outbox_s, executables_s, scheduled, live, at)] = yield NODE.at(schema=schema)(now=now)
    names = yield NAMES.at(schema=schema)(partitions=None)
    inboxes = [name for name, *_ in names]
    # One that cannot be read now costs no other its figures, and has none itself: no 0, which would be a promise.
    locked = locked_inboxes((yield from reading_locked(schema)))
    oldest_of = {name: OLDEST_OF if may_read else OLDEST_THROUGH_PARENT for name, _, may_read in names}
    keys = {(name, state): 0 for name in inboxes for state in ("waiting", "parked")}
    oldest = dict.fromkeys(inboxes, 0.0)
    fail = dict.fromkeys(inboxes, 0)
    for each in (yield from counting_keys(schema, now)):
        if each.inbox in oldest:
            keys[each.inbox, "waiting"], keys[each.inbox, "parked"] = each.waiting, each.parked
            oldest[each.inbox], fail[each.inbox] = each.due_s or 0.0, each.tried
    failing_s = yield from (failing or Failing()).looking(schema, fail, at)
    at_once = min(AT_ONCE, names[0][1]) if names else AT_ONCE
    readable = [name for name in inboxes if name not in locked]
    oldest = {name: oldest[name] for name in readable}
    for first in range(0, len(readable), at_once):
        parts = "\nUNION ALL\n".join(filled(oldest_of[name], inbox=name) for name in readable[first : first + at_once])
        for inbox, delivered_s in (yield OLDEST.at(each=parts, schema=schema)(now=now)):
            oldest[inbox] = max(oldest[inbox], delivered_s)
    links = yield LINKS.at(schema=schema)(now=now)
    bridges = yield BRIDGES.at(schema=schema)(now=now)
    periodic = yield PERIODIC.at(schema=schema)(now=now)
    yield from added.counting()
    return {
        # A sender may have given a sent_at in the future.
        OUTBOX_OLDEST: [((), max(outbox_s or 0.0, 0.0))],
        EXECUTABLES_OLDEST: [((), max(executables_s or 0.0, 0.0))],
        SCHEDULED: [((), estimated(scheduled, live))],
        INBOX_OLDEST: [((name,), seconds) for name, seconds in oldest.items()],
        INBOX_KEYS: list(keys.items()),
        INBOX_FAILING: [((name,), seconds) for name, seconds in failing_s.items()],
        LINK_LAG: [((name,), lag_s) for name, lag_s in links],
        BRIDGE_LAG: [((name,), lag_s) for name, lag_s in bridges],
        PERIODIC_LATE: [((name,), late_s) for name, late_s in periodic],
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
                async with await self._home.connect_async("dispatcher metrics", SESSION) as session:
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
