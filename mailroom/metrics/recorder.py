"""Write what a process has counted into `stat_minute`, once a minute, over a session that ends at once.

A session that stays would idle for 59 of 60 seconds, in each process, and count against the limits of the server and of
a pooler; one of a statement costs some milliseconds. Counts of several processes add up in the row of a minute. What
could not be written waits, so an outage of the database loses nothing. If the session is lost while it writes, nobody
knows whether it has: then the rows are not written again. So no count is ever too high.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import random

from mailroom.metrics.minutes import BUCKETS, COUNTED, Minutes, Rows, minute_of, totals
from mailroom.metrics.process import ProcessMetrics
from mailroom.session import settings
from mailroom.session.home import Home, reading_place
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from mailroom.sql.sqlstate import Meaning, meaning
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

log = logging.getLogger("mailroom.metrics")

MINUTE = timedelta(minutes=1)
KEPT = timedelta(hours=48)  # the janitor deletes what is older
SPREAD_S = 10.0  # so that not all processes connect at once
# D-metrics-5: The recorder opens a session each minute.
RECORDER_SESSION = settings.UNATTENDED | {"statement_timeout": "10s", "lock_timeout": "5s"}

TIME = Sql("SELECT clock_timestamp()", columns=("timestamptz",))
# In one order, since two processes that lock the rows of one minute in two orders would wait for each other. Counts of
# an inbox that is gone go with it.
# D-metrics-6: A write of statistics whose end is unknown is not repeated.
ADD = Sql(
    """
INSERT INTO {schema}.my_stat_minute AS s
    (minute, inbox, delivered, reaped, failed, parked, skipped, batches, handle_s, ages)
SELECT u.minute, u.inbox, u.delivered, u.reaped, u.failed, u.parked, u.skipped, u.batches, u.handle_s,
       (%(ages)s::integer[])[(u.nth - 1) * {buckets} + 1 : u.nth * {buckets}]
FROM unnest(%(minutes)s::timestamptz[], %(inboxes)s::text[], %(delivered)s::bigint[], %(reaped)s::bigint[],
            %(failed)s::bigint[], %(parked)s::bigint[], %(skipped)s::bigint[], %(batches)s::bigint[],
            %(handle_s)s::float8[])
     WITH ORDINALITY AS u (minute, inbox, delivered, reaped, failed, parked, skipped, batches, handle_s, nth)
WHERE u.inbox = '' OR EXISTS (SELECT FROM {schema}.inbox_registry AS r WHERE r.name = u.inbox)
ORDER BY u.minute, u.inbox
ON CONFLICT (minute, inbox) DO UPDATE SET
    delivered = s.delivered + excluded.delivered, reaped = s.reaped + excluded.reaped,
    failed = s.failed + excluded.failed, parked = s.parked + excluded.parked, skipped = s.skipped + excluded.skipped,
    batches = s.batches + excluded.batches, handle_s = s.handle_s + excluded.handle_s,
    ages = ARRAY(SELECT t.old + t.new
                 FROM unnest(s.ages, excluded.ages) WITH ORDINALITY AS t (old, new, nth) ORDER BY t.nth)
""",
    buckets=BUCKETS,
)


def writing(schema: str, rows: Rows) -> Operation[None]:
    """Add counts to the rows of their minutes."""
    columns = {name: [numbers[nth] for numbers in rows.values()] for nth, name in enumerate(COUNTED)}
    yield ADD.at(schema=schema)(
        minutes=[minute for minute, _ in rows],
        inboxes=[inbox for _, inbox in rows],
        ages=[count for numbers in rows.values() for count in numbers[len(COUNTED) :]],
        **columns,
    )


class Recorder:
    """Writes the statistics of what `process` counts from now on, in a thread of its own, until it is closed.

    `home` says where the database is, which a worker knows only once it has connected. `now` is the wall clock; what it
    is off by is known once the database has been asked. Whatever fails is logged, and disturbs nothing else.
    """

    def __init__(
        self,
        home: Callable[[], Home],
        process: ProcessMetrics,
        *,
        schema: str = DEFAULT_SCHEMA,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._process = process
        self._schema = schema_name(schema)
        self._now = now
        self._repeats = Repeats(monotonic)
        self._minutes = Minutes()
        self._minute = minute_of(now())
        self._minutes.cut(self._minute, totals(process.read()))
        self._minutes.done(self._minutes.waiting())  # what was counted before is not of this minute
        self._knows_time = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mailroom-statistics", daemon=True)

    def start(self) -> None:
        """Write once a minute from now on."""
        self._thread.start()

    def close(self) -> None:
        """Write what is left, and end. It waits for the database for as long as connecting and a statement may take."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.cut()
        self.write()

    def cut(self) -> None:
        """Put what was counted since the last time into the minute that began then; it waits to be written."""
        minute = minute_of(self._now() + self._process.offset)
        self._minutes.cut(self._minute, totals(self._process.read()))
        self._minutes.forget_before(minute - KEPT)
        self._minute = minute

    def write(self) -> None:
        """Write what waits, if anything does; what cannot be written waits on, unless it may have been written."""
        rows = self._minutes.waiting()
        if rows or not self._knows_time:
            try:
                self._write(rows)
            except Exception as error:  # whatever it is, the process goes on
                # At the first look a worker has not connected yet, and nothing waits.
                if rows and (again := self._repeats.struck(why := cause(error))) is not None:
                    log.warning("statistics: not written (%s), trying again%s", why, again)
            else:
                self._repeats.over()
        if self._minutes.dropped:
            log.warning("statistics: %d rows waited for too long and were dropped", self._minutes.dropped)
            self._minutes.dropped = 0

    def _write(self, rows: Rows) -> None:
        home = self._home()
        with home.connect("statistics", RECORDER_SESSION) as connection:
            home.compare(run(connection, reading_place()))
            before = self._now()
            [(there,)] = run(connection, _asking())
            self._process.offset, self._knows_time = there - before, True
            if not rows:
                return
            try:
                run(connection, writing(self._schema, rows))
            except Exception as error:
                if meaning(error, connection) is Meaning.LOST:
                    self._minutes.done(rows)
                raise
            self._minutes.done(rows)

    def _run(self) -> None:
        self.write()
        self._minute = minute_of(self._now() + self._process.offset)
        spread_s = random() * SPREAD_S  # noqa: S311  # not a secret
        while not self._stopping.wait(self._left_s()):
            self.cut()
            self._stopping.wait(spread_s)
            self.write()

    def _left_s(self) -> float:
        now = self._now() + self._process.offset
        return (minute_of(now) + MINUTE - now).total_seconds()


def _asking() -> Operation[list[tuple[datetime]]]:
    return [(there,) for (there,) in (yield TIME.at()())]
