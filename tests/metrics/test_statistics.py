"""Statistics by minute: what processes write adds up exactly, whatever happens to the database, and how it is read."""

import bisect
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from dispatcher.housekeeping.janitor import sweeping_statistics
from inbox import Message, Worker
from mailroom import events
from mailroom.cli.call import Call
from mailroom.cli.commands.statistics import statistics as command
from mailroom.cli.options import share
from mailroom.cli.serving import serving
from mailroom.errors import InvalidMessage, UnknownInbox
from mailroom.metrics import minute_statistics, record, statistics, statistics_async
from mailroom.metrics.process import LONG_S, ProcessMetrics
from mailroom.metrics.recorder import Recorder
from mailroom.registry.drop import drop_inbox
from mailroom.registry.rename import rename_inbox
from mailroom.session.home import Home
from mailroom.sql.runner import run
from tests.metrics.test_process import NOW, message
from tests.support.node import SCHEMA, Node
from tests.support.proxy import proxied
from tests.support.roles import rights, role
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, working

NEXT = NOW + timedelta(minutes=1)
ROWS = (
    "SELECT minute, inbox, delivered, reaped, failed, batches, handle_s, ages FROM mailroom.stat_minute ORDER BY 1, 2"
)

share(command)


pytestmark = [pytest.mark.inbox("shipping"), pytest.mark.inbox("billing")]


class Process:
    """A process that counts, and whose recorder acts when the test says so; its clock stands."""

    def __init__(self, dsn: str) -> None:
        self.at = NOW
        self.counts = ProcessMetrics(now=lambda: NOW)
        # By the database's clock the ages of made-up messages would be years: `offset` stays nothing.
        self.recorder = Recorder(lambda: Home(dsn), self.counts, now=self.now, monotonic=lambda: 0.0)

    def now(self) -> datetime:
        return self.at - self.counts.offset

    def reap(self, inbox: str, *ages_s: float) -> None:
        batch = [message(sent_s=age_s, delivered_s=0) for age_s in ages_s]
        self.counts._hear(events.BatchClaimed(SCHEMA, inbox, batch, False, 0.0))
        offset, self.counts.offset = self.counts.offset, timedelta()
        self.counts._hear(events.BatchEnded(SCHEMA, inbox, batch, False, "committed", [0.25], 0.0))
        self.counts.offset = offset

    def deliver(self, messages: int) -> None:
        self.counts._hear(events.MessagesDelivered(SCHEMA, messages, messages, 0, 0, 0, 0, 0, 0.0))

    def write(self, at: datetime | None = None) -> None:
        """Write what was counted before `at`."""
        self.at = at or self.at
        self.recorder.cut()
        self.recorder.write()


def ages(**counts: int) -> list[int]:
    """Counts of buckets, by `b` and the number of the bucket."""
    return [counts.get(f"b{nth}", 0) for nth in range(len(LONG_S) + 1)]


def test_two_processes_add_up_exactly_and_quiet_inboxes_have_no_rows(node: Node) -> None:
    one, other = Process(node.dsn), Process(node.dsn)
    one.deliver(7)
    one.reap("shipping", 0.005, 0.02)
    other.reap("shipping", 0.02, 10_000)
    other.reap("billing", 2)
    for each in (one, other):
        each.write(NEXT)
        each.write()  # nothing came since
    one.reap("shipping", 0.005)
    one.write(NEXT + timedelta(minutes=1))
    assert node.rows(ROWS) == [
        (NOW, "", 7, 0, 0, 0, 0, ages()),
        (NOW, "billing", 0, 1, 0, 1, 0.25, ages(b7=1)),
        (NOW, "shipping", 0, 4, 0, 2, 0.5, ages(b0=1, b1=2, b15=1)),
        (NEXT, "shipping", 0, 1, 0, 1, 0.25, ages(b0=1)),
    ]


def test_process_that_ends_writes_the_part_of_its_minute(node: Node) -> None:
    process = Process(node.dsn)
    process.recorder.start()
    process.reap("shipping", 1)
    process.recorder.close()
    assert node.rows("SELECT inbox, reaped FROM mailroom.stat_minute") == [("shipping", 1)]


def test_what_was_counted_before_the_recorder_is_not_of_its_minute(node: Node) -> None:
    process = Process(node.dsn)
    process.reap("shipping", 1)
    process.recorder = Recorder(lambda: Home(node.dsn), process.counts, now=process.now)
    process.reap("shipping", 1)
    process.write(NEXT)
    assert node.value("SELECT reaped FROM mailroom.stat_minute") == 1


def test_outage_loses_nothing_and_is_told_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mailroom.metrics")
    with proxied(node.dsn) as (proxy, dsn):
        process = Process(dsn)
        proxy.cut()
        for minute in (NOW, NEXT):
            process.reap("shipping", 1)
            process.write(minute + timedelta(minutes=1))
        assert len(caplog.messages) == 1, caplog.messages
        assert caplog.messages[0].startswith("statistics: not written (")
        proxy.restore()
        process.write()
    assert node.rows("SELECT minute, reaped FROM mailroom.stat_minute ORDER BY 1") == [(NOW, 1), (NEXT, 1)]


def test_minute_that_may_have_been_written_is_not_written_twice(node: Node) -> None:
    with proxied(node.dsn) as (proxy, dsn):
        process = Process(dsn)
        process.reap("shipping", 1)
        proxy.end_behind(b"INSERT")
        process.write(NEXT)
        assert proxy.endings == 0
        process.write()
        process.reap("shipping", 1)
        process.write(NEXT + timedelta(minutes=1))
    assert node.rows("SELECT minute, reaped FROM mailroom.stat_minute ORDER BY 1") == [(NOW, 1), (NEXT, 1)]


def test_refusal_keeps_the_counts(node: Node) -> None:
    process = Process(node.dsn)
    process.reap("shipping", 1)
    node.connection.execute("ALTER TABLE mailroom.stat_minute RENAME COLUMN reaped TO gone")
    node.connection.execute("ALTER VIEW mailroom.my_stat_minute RENAME COLUMN reaped TO gone")
    process.write(NEXT)
    node.connection.execute("ALTER TABLE mailroom.stat_minute RENAME COLUMN gone TO reaped")
    node.connection.execute("ALTER VIEW mailroom.my_stat_minute RENAME COLUMN gone TO reaped")
    process.write()
    assert node.value("SELECT reaped FROM mailroom.stat_minute") == 1


def test_inbox_that_is_gone_keeps_no_other_from_being_written(node: Node) -> None:
    process = Process(node.dsn)
    for inbox in ("shipping", "billing"):
        process.reap(inbox, 1)
    with node.connection.transaction():
        drop_inbox(node.connection, "billing", actor="ada")
    process.write(NEXT)
    assert node.rows("SELECT inbox FROM mailroom.stat_minute") == [("shipping",)]


def test_rows_go_with_their_inbox(node: Node) -> None:
    process = Process(node.dsn)
    for inbox in ("shipping", "billing"):
        process.reap(inbox, 1)
    process.write(NEXT)
    with node.connection.transaction():
        drop_inbox(node.connection, "billing", actor="ada")
        rename_inbox(node.connection, "shipping", "sending", actor="ada")
    assert node.rows("SELECT inbox FROM mailroom.stat_minute") == [("sending",)]


def test_rights_of_who_reaps_and_who_delivers_suffice_and_reach_no_further(node: Node) -> None:
    with (
        role(node.dsn, *rights("reaper", "shipping")) as (_, reaper),
        role(node.dsn, *rights("dispatcher", "shipping", "billing")) as (_, dispatcher),
    ):
        for _ in range(2):  # the second time the rows are there
            consumer, delivering = Process(reaper), Process(dispatcher)
            consumer.reap("shipping", 1)
            consumer.write(NEXT)
            delivering.deliver(3)
            delivering.reap("billing", 1)
            delivering.write(NEXT)
        assert node.rows("SELECT inbox, delivered, reaped FROM mailroom.stat_minute ORDER BY 1") == [
            ("", 6, 0), ("billing", 0, 2), ("shipping", 0, 2),
        ]  # fmt: skip
        foreign = Process(reaper)
        foreign.reap("billing", 1)
        foreign.deliver(1)
        foreign.write(NEXT)
        assert node.value("SELECT sum(delivered + reaped)::int FROM mailroom.stat_minute") == 10
        with psycopg.connect(reaper, autocommit=True) as connection:
            assert connection.execute("SELECT inbox FROM mailroom.my_stat_minute").fetchall() == [("shipping",)]
    with role(node.dsn, *rights("metrics", "shipping")) as (_, reader), psycopg.connect(reader) as connection:
        assert [each.inbox for each in statistics(connection, now=NEXT)] == [None, "billing", "shipping"]


def test_statistics_are_kept_for_48_hours(node: Node) -> None:
    process = Process(node.dsn)
    process.reap("shipping", 1)
    process.write(NEXT)
    process.reap("shipping", 1)
    process.write(NEXT + timedelta(minutes=1))
    assert run(node.connection, sweeping_statistics(SCHEMA, now=NOW + timedelta(hours=48))) == 0
    assert run(node.connection, sweeping_statistics(SCHEMA, now=NOW + timedelta(hours=48, seconds=1))) == 1
    assert node.rows("SELECT minute FROM mailroom.stat_minute") == [(NEXT,)]


# -- Percentiles ------------------------------------------------------------------------------------------------------


def percentile(node: Node, counts: list[int], share: float) -> float | None:
    found: float | None = node.value("SELECT mailroom.age_percentile(%s::bigint[], %s)", counts, share)
    return found


def test_bounds_are_those_of_the_metric(node: Node) -> None:
    for nth, bound in enumerate((*LONG_S, LONG_S[-1])):  # above the last bound there is none
        counts = [0] * (len(LONG_S) + 1)
        counts[nth] = 3
        assert percentile(node, counts, 1) == pytest.approx(bound)


def test_percentiles_are_within_the_bucket_of_the_true_one(node: Node) -> None:
    chance = random.Random(1)
    for _ in range(60):
        values = sorted(chance.lognormvariate(-1, 4) for _ in range(chance.choice([1, 2, 7, 400])))
        counts = [0] * (len(LONG_S) + 1)
        for value in values:
            counts[bisect.bisect_left(LONG_S, value)] += 1
        for part in (0.5, 0.99):
            true = values[math.ceil(part * len(values)) - 1]
            found = percentile(node, counts, part)
            bucket = bisect.bisect_left(LONG_S, true)
            lower, upper = (0, *LONG_S)[bucket], (*LONG_S, LONG_S[-1])[bucket]
            assert found is not None
            assert lower <= found <= upper, (values, part, found)


def test_half_of_a_bucket_lies_in_its_middle(node: Node) -> None:
    assert percentile(node, [0, 0, 0, 0, 0, 10], 0.5) == pytest.approx(0.375)
    assert percentile(node, [5, 5], 0.75) == pytest.approx(0.0175)
    assert percentile(node, [0, 0], 0.5) is None


# -- Reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(node: Node) -> Node:
    """Two minutes of two inboxes."""
    process = Process(node.dsn)
    process.deliver(4)
    process.reap("shipping", *[0.005] * 99)
    process.write(NEXT)
    process.reap("shipping", 3_000)
    process.reap("billing", 0.005)
    process.counts._hear(events.AttemptFailed(SCHEMA, "billing", None, 1, "park", ValueError("secret")))
    process.write(NEXT + timedelta(minutes=1))
    return node


async def test_summary_is_over_all_messages_of_the_time(busy: Node) -> None:
    now = NEXT + timedelta(minutes=1)
    whole, billing, shipping = statistics(busy.connection, now=now)
    assert whole[:4] == (None, 1, 4, 0)
    assert whole.age_p50_s is None
    assert (billing.inbox, billing.reaped, billing.failed, billing.parked, billing.skipped) == ("billing", 1, 1, 1, 0)
    assert (shipping.minutes, shipping.reaped, shipping.batches, shipping.handle_s) == (2, 100, 2, 0.5)
    assert shipping.age_p99_s == pytest.approx(0.01)
    [only] = minute_statistics(busy.connection, "billing", now=now)
    assert (only.minute, only.inbox, only.reaped) == (NEXT, "billing", 1)
    async with await psycopg.AsyncConnection.connect(busy.dsn) as connection:
        assert await statistics_async(connection, now=now) == [whole, billing, shipping]


def test_only_the_minutes_that_are_asked_for_count(busy: Node) -> None:
    found = minute_statistics(busy.connection, "shipping", now=NEXT + timedelta(seconds=59), since_m=1)
    assert [(each.minute, each.reaped) for each in found] == [(NEXT, 1)]
    assert found[0].age_p50_s == pytest.approx(1800 + (7200 - 1800) / 2)
    assert [each.delivered for each in minute_statistics(busy.connection, None, now=NEXT)] == [4]
    assert statistics(busy.connection) == []  # years later
    with pytest.raises(InvalidMessage, match="since_m must be an int from 1 to 2,880"):
        statistics(busy.connection, since_m=0)
    with pytest.raises(UnknownInbox):
        minute_statistics(busy.connection, "nowhere")


def told(node: Node, *arguments: str, width: str | None = None) -> str:
    result = CliRunner().invoke(command, arguments, obj=Call(given_dsn=node.dsn), env={"COLUMNS": width})
    assert result.exit_code == 0, result.output
    return result.output


def test_command_tells_each_inbox_or_the_minutes_of_one(busy: Node) -> None:
    assert "Nothing was recorded" in told(busy)
    busy.connection.execute(
        "UPDATE mailroom.stat_minute SET minute = minute + (date_trunc('minute', now()) - %s)", [NEXT]
    )
    lines = [line.split() for line in told(busy).splitlines()]
    assert [line[0] for line in lines if line] == ["inbox", lines[1][0], "(all)", "billing", "shipping"]
    for width in (60, 80, 120):
        assert max(map(len, told(busy, width=str(width)).splitlines())) <= width
    minutes: list[dict[str, Any]] = json.loads(told(busy, "--inbox", "shipping", "--json"))
    assert [each["reaped"] for each in minutes] == [99, 1]
    assert "minute" in told(busy, "--inbox", "shipping").splitlines()[0]


# -- Processes that keep them -----------------------------------------------------------------------------------------


def handle(message: Message, connection: Any) -> None:
    connection.execute("SELECT 1")


@contextmanager
def by_option(node: Node) -> Iterator[None]:
    with serving(None, [], {SCHEMA: lambda: Home(node.dsn)}, statistics=True):
        yield


@contextmanager
def by_function(node: Node) -> Iterator[None]:
    with record(node.dsn):
        yield


@pytest.mark.parametrize("keeping", [by_option, by_function])
def test_worker_s_batches_are_in_the_statistics(node: Node, keeping: Callable[[Node], Any]) -> None:
    for _ in range(3):
        node.send("shipping", key="k")
    node.deliver_all()
    with keeping(node), working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: not node.delivered())
    assert not events.heard(events.BatchEnded)
    [found] = statistics(node.connection)
    assert (found.inbox, found.reaped) == ("shipping", 3)
    assert found.age_p99_s is not None
    assert found.age_p99_s < 60
