"""What one checkout does in `mailroom_bench.live`: all of the path at once, while the publisher goes on."""

import sys
from dataclasses import dataclass, field
from functools import partial
from math import nan

import psycopg

from .node import Node
from .pipeline import AHEAD, PUBLISHER, Count, Handler, Mark, Pipeline, counting, rate_between
from .processor import spent_us, used_by_s

KEYS = (20, 1_000, 50_000)
ON_A_LOOP = "AsyncWorkers"
WORKERS = 2
ENDLESS = sys.maxsize

PROCESSES = ("publisher", "publisher's backend", "dispatcher", "dispatcher's backends", "workers", "workers' backends")
SESSIONS = {
    f"mailroom {PUBLISHER}": PROCESSES[1],
    **dict.fromkeys(("mailroom dispatcher", "mailroom executor", "mailroom links"), PROCESSES[3]),  # its three lanes
    "mailroom worker": PROCESSES[5],
}


@dataclass(frozen=True, slots=True)
class Tally:
    """How many batches one process has taken, and the rows in them."""

    batches: Count = field(default_factory=Count)
    rows: Count = field(default_factory=Count)

    def add(self, rows: int) -> None:
        """Count one."""
        self.batches.add(1)
        self.rows.add(rows)


def _delivering(tally: Tally) -> None:
    from mailroom import events  # here, since older checkouts have none

    events.subscribe(lambda event: tally.add(event.taken), events.MessagesDelivered)


def _claiming(count: Count, tally: Tally) -> Handler:
    from mailroom import events

    events.subscribe(lambda event: tally.add(len(event.messages)), events.BatchClaimed)
    return counting(count)


@dataclass(frozen=True, slots=True)
class Reading:
    """What has happened until a moment: counted, written to the WAL, and used by each process, by its process id."""

    mark: Mark
    sent: int
    deliveries: tuple[int, int]  # batches, rows
    claims: tuple[int, int]
    wal: int
    used_s: dict[str, dict[int, float]]


class Live:
    """The processes of one run, with all that is counted."""

    def __init__(self, pipeline: Pipeline, looking: psycopg.Connection, keys: int, ahead: int, on_a_loop: bool) -> None:
        self._pipeline, self._looking = pipeline, looking
        self._deliveries, self._claims = Tally(), [Tally() for _ in range(WORKERS)]
        pipeline.dispatch(None, _delivering, self._deliveries)
        for tally in self._claims:
            pipeline.work(1, _claiming, tally, on_a_loop=on_a_loop)
        self._sent = pipeline.publish(ENDLESS, keys, ahead)

    def read(self, handled: int) -> Reading:
        """Return what has happened once that many messages are handled."""
        pipeline = self._pipeline
        pipeline.wait_handled(handled)
        pids: dict[str, list[int]] = {name: [] for name in PROCESSES}
        for name, processes in (
            ("publisher", [pipeline.publisher]),
            ("dispatcher", [pipeline.dispatcher]),
            ("workers", pipeline.workers),
        ):
            pids[name] += [process.pid for process in processes if process is not None and process.pid]
        for pid, role in pipeline.sessions(*SESSIONS).items():
            pids[SESSIONS[role]].append(pid)
        [(wal,)] = self._looking.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()
        mark = pipeline.wait_handled(handled)
        return Reading(
            mark,
            self._sent.value,
            (self._deliveries.batches.value, self._deliveries.rows.value),
            (sum(each.batches.value for each in self._claims), sum(each.rows.value for each in self._claims)),
            wal,
            {name: used_by_s(each) for name, each in pids.items()},
        )


def _live(node: Node, messages: int, name: str, keys: int, on_a_loop: bool = False) -> dict[str, float]:
    # Two deliveries' worth: the publisher never waits for want of room, and none of it grows to a backlog. On a busy
    # machine it was 1,000 to 3,000 ahead.
    ahead = min(AHEAD, messages // 5)
    with Pipeline(node) as pipeline, node.connect(autocommit=True) as looking:
        live = Live(pipeline, looking, keys, ahead, on_a_loop)
        before = live.read(ahead)
        after = live.read(before.mark.handled + messages)
    # With few messages a process may do nothing between the readings: that is no figure.
    return {f"{figure}, {name}": value or nan for figure, value in found(before, after).items()}


def found(before: Reading, after: Reading) -> dict[str, float]:
    """Return what a message cost between two readings, and how many there were in a batch."""
    handled = after.mark.handled - before.mark.handled
    deliveries, delivered = (now - then for now, then in zip(after.deliveries, before.deliveries, strict=True))
    claims, claimed = (now - then for now, then in zip(after.claims, before.claims, strict=True))
    # Each process has its own count: the publisher may be further ahead at the end than it was at the beginning.
    counts = {"publisher": after.sent - before.sent, "dispatcher": delivered, "workers": handled}
    used_us = {
        name: spent_us(before.used_s[name], after.used_s[name], counts[name.split("'")[0]]) for name in PROCESSES
    }
    return {
        "rate": rate_between(before.mark, after.mark),
        "all": sum(used_us.values()),
        **used_us,
        "WAL": (after.wal - before.wal) / handled if handled else nan,
        "rows per delivery": delivered / deliveries if deliveries else nan,
        "rows per claim": claimed / claims if claims else nan,
    }


PARTS = {f"live, {keys:,} keys": partial(_live, name=f"{keys:,} keys", keys=keys) for keys in KEYS}
PARTS |= {f"live, {ON_A_LOOP}": partial(_live, name=ON_A_LOOP, keys=KEYS[1], on_a_loop=True)}
