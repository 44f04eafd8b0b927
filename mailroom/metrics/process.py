"""What a process counts of a node, from its events: plain numbers, until they are read."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from mailroom import events
from mailroom.health import Probed
from mailroom.message.message import delivered_times, sent_times
from mailroom.metrics.family import Family, Histogram, Samples
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

OUTCOME = Family(
    "messages_outcome_total", "counter", "Messages that this dispatcher took, by what became of them.", ("outcome",)
)
RECEIVED = Family("messages_received_total", "counter", "Rows that this process received of other nodes.", ("origin",))
EXECUTED = Family(
    "executables_total", "counter", "Executables that this process took, by what became of them.", ("outcome",)
)
SENT = Family("messages_sent_total", "counter", "Messages that this process inserted into the outbox.")
REAPED = Family(
    "messages_reaped_total", "counter", "Messages of committed batches of this process's workers.", ("inbox",)
)
BATCHES = Family(
    "batches_total", "counter", "Batches of this process's workers, by how their transactions ended.",
    ("inbox", "outcome"),
)  # fmt: skip
FAILED = Family(
    "attempts_failed_total", "counter", "Failed attempts that this process's workers recorded, by what follows.",
    ("inbox", "outcome"),
)  # fmt: skip
HELD = Family(
    "claims_held_total", "counter", "Claims of this process's workers that a limit of the inbox has held.",
    ("inbox", "limit"),
)  # fmt: skip
ERRORS = Family(
    "db_errors_total", "counter", "Errors that no message is to blame for, by their class.", ("role", "class")
)
RECONNECTS = Family("reconnects_total", "counter", "New connections after such an error.", ("role",))
AGE = Family(
    "message_age_at_reap_seconds", "histogram", "From the send of a message to the commit of its batch.", ("inbox",)
)
WAIT = Family("message_wait_seconds", "histogram", "From the delivery of a message to its claim.", ("inbox",))
HANDLE = Family(
    "handle_seconds", "histogram", "How long handlers took: with a message, or with a batch in one call.", ("inbox",)
)
CLAIM = Family("claim_seconds", "histogram", "How long claims took that found messages.", ("inbox",))
DELIVER = Family("deliver_batch_seconds", "histogram", "How long deliveries took that took messages.")
IN_FLIGHT = Family("worker_messages_in_flight", "gauge", "Messages in the hands of this process's workers.", ("inbox",))
LONGEST = Family("worker_longest_batch_seconds", "gauge", "Since when the oldest batch in hand is open.", ("inbox",))

AWAKE = Family("dispatcher_awake", "gauge", "Whether this process delivers now: 0 while it sleeps, or does not lead.")

# 30 s is the bound of the error budget in the alert rules.
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
BOUNDS = {AGE: LONG_S, WAIT: LONG_S, HANDLE: SHORT_S, CLAIM: SHORT_S, DELIVER: SHORT_S}
COUNTERS = (OUTCOME, RECEIVED, EXECUTED, SENT, REAPED, BATCHES, FAILED, HELD, ERRORS, RECONNECTS)
FAMILIES = (*COUNTERS, *BOUNDS, IN_FLIGHT, LONGEST, AWAKE)

TOOK = ("delivered", "scheduled", "expired", "unrouted", "dead", "carried")


def awake(dispatcher: Probed) -> Callable[[], dict[Family, Samples]]:
    """Return what tells whether a dispatcher is awake."""
    return lambda: {AWAKE: [((), int(dispatcher.health().state == "awake"))]}


@dataclass(frozen=True, slots=True)
class _Open:
    labels: tuple[str]
    messages: int
    since: float


class ProcessMetrics:
    """Counts what happens in this process to the node `schema`, from `listen` on. Threads may share it.

    `now` is the wall clock by which ages are computed, and `offset` how far the database's is ahead of it. Code that
    asks the database sets that, so that a process on a machine with a wrong clock tells true ages.
    """

    def __init__(
        self,
        schema: str = DEFAULT_SCHEMA,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schema = schema_name(schema)
        self._now = now
        self._monotonic = monotonic
        self.offset = timedelta()
        self._lock = threading.Lock()
        self._counters: dict[Family, Counter[tuple[str, ...]]] = {family: Counter() for family in COUNTERS}
        self._histograms: dict[Family, dict[tuple[str, ...], Histogram]] = {family: {} for family in BOUNDS}
        self._open: dict[int, _Open] = {}  # batches in hand, by the identity of their list of messages
        self._hearing: dict[type[Any], Callable[[Any], None]] = {
            events.MessagesSent: self._sent,
            events.MessagesDelivered: self._delivered,
            events.ExecutablesExecuted: self._executed,
            events.MessagesReceived: self._received,
            events.BatchClaimed: self._claimed,
            events.BatchEnded: self._ended,
            events.AttemptFailed: self._attempt_failed,
            events.ClaimHeld: self._held,
            events.TriedAgain: self._tried_again,
        }

    def listen(self) -> Callable[[], None]:
        """Count from now on; return what ends that."""
        return events.subscribe(self._hear, *self._hearing)

    def read(self) -> dict[Family, Samples]:
        """Return all that was counted, as it is now."""
        with self._lock:
            metrics: dict[Family, Samples] = {family: list(of.items()) for family, of in self._counters.items()}
            for family, histograms in self._histograms.items():
                metrics[family] = [(labels, each.copy()) for labels, each in histograms.items()]
            in_hand = list(self._open.values())
            known = list(self._histograms[CLAIM])
        messages, longest = dict.fromkeys(known, 0), dict.fromkeys(known, 0.0)
        now = self._monotonic()
        for each in in_hand:
            messages[each.labels] += each.messages
            longest[each.labels] = max(longest[each.labels], now - each.since)
        return metrics | {IN_FLIGHT: messages.items(), LONGEST: longest.items()}

    def _hear(self, event: Any) -> None:
        if event.schema == self._schema:
            with self._lock:
                self._hearing[type(event)](event)

    def _count(self, family: Family, *labels: str, times: int = 1) -> None:
        self._counters[family][labels] += times

    def _histogram(self, family: Family, *labels: str) -> Histogram:
        histograms = self._histograms[family]
        if labels not in histograms:
            histograms[labels] = Histogram(BOUNDS[family])
        return histograms[labels]

    def _since(self, family: Family, inbox: str, times: Iterable[datetime]) -> None:
        """Observe how long ago the database's clock showed these times; one that it shows only later counts as now.

        The times are naive, in UTC. There are two for each message, so no loop of Python's goes over them.
        """
        now = (self._now() + self.offset).astimezone(UTC).replace(tzinfo=None)
        ages = list(map(timedelta.total_seconds, map(now.__sub__, times)))
        if ages and min(ages) < 0:
            ages = [max(0.0, age) for age in ages]
        self._histogram(family, inbox).observe_all(ages)

    def _sent(self, event: events.MessagesSent) -> None:
        self._count(SENT, times=event.messages)

    def _delivered(self, event: events.MessagesDelivered) -> None:
        for outcome in TOOK:
            self._count(OUTCOME, outcome, times=getattr(event, outcome))
        self._histogram(DELIVER).observe(event.seconds)

    def _executed(self, event: events.ExecutablesExecuted) -> None:
        self._count(EXECUTED, "applied", times=event.taken - event.dead)
        self._count(EXECUTED, "dead", times=event.dead)

    def _received(self, event: events.MessagesReceived) -> None:
        self._count(RECEIVED, event.origin, times=event.received)

    def _claimed(self, event: events.BatchClaimed) -> None:
        self._open[id(event.messages)] = _Open((event.inbox,), len(event.messages), self._monotonic())
        self._histogram(CLAIM, event.inbox).observe(event.seconds)
        # From 0 on: where every attempt fails, a share of nothing would be no number, and no alert.
        self._count(REAPED, event.inbox, times=0)
        self._histogram(AGE, event.inbox)
        self._since(WAIT, event.inbox, delivered_times(event.messages))

    def _ended(self, event: events.BatchEnded) -> None:
        self._open.pop(id(event.messages), None)
        self._count(BATCHES, event.inbox, event.outcome)
        self._histogram(HANDLE, event.inbox).observe_all(event.handled_s)
        if event.outcome == "committed":
            self._count(REAPED, event.inbox, times=len(event.messages))
            self._since(AGE, event.inbox, sent_times(event.messages))

    def _attempt_failed(self, event: events.AttemptFailed) -> None:
        self._count(FAILED, event.inbox, event.outcome)

    def _held(self, event: events.ClaimHeld) -> None:
        self._count(HELD, event.inbox, event.limit)

    def _tried_again(self, event: events.TriedAgain) -> None:
        self._count(ERRORS, event.role, type(event.error).__name__)
        if event.reconnects:
            self._count(RECONNECTS, event.role)
