"""What a process counts, from events that are made by hand."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from mailroom import events
from mailroom.message.message import Message
from mailroom.metrics import process
from mailroom.metrics.family import Family, Histogram
from mailroom.metrics.process import ProcessMetrics

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clocks:
    """A wall clock that stands at `NOW`, and a monotonic one that the test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at


def message(*, sent_s: float, delivered_s: float) -> Message:
    """A message that was sent and delivered so long ago."""
    sent, delivered = (NOW - timedelta(seconds=ago) for ago in (sent_s, delivered_s))
    return Message(
        "a", 1, 1, uuid4(), uuid4(), "shipping", "M", "U", None, b"\x01", None, None, None,
        sent.replace(tzinfo=None), None, delivered.replace(tzinfo=None),
    )  # fmt: skip


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def counted(clocks: Clocks) -> Iterator[ProcessMetrics]:
    metrics = ProcessMetrics(now=lambda: NOW, monotonic=clocks.monotonic)
    end = metrics.listen()
    yield metrics
    end()


def values(metrics: ProcessMetrics, family: Family) -> dict[tuple[str, ...], Any]:
    return {labels: value for labels, value in metrics.read()[family] if not isinstance(value, Histogram)}


def observed(metrics: ProcessMetrics, family: Family) -> dict[tuple[str, ...], tuple[int, float]]:
    """How many values each histogram has, and their sum."""
    found = {}
    for labels, histogram in metrics.read()[family]:
        assert isinstance(histogram, Histogram)
        found[labels] = sum(histogram.counts), round(histogram.sum, 6)
    return found


def test_a_batch_counts_when_it_has_committed_and_is_in_flight_until_then(
    counted: ProcessMetrics, clocks: Clocks
) -> None:
    batch = [message(sent_s=8, delivered_s=5), message(sent_s=4, delivered_s=1)]
    events.emit(events.BatchClaimed("mailroom", "shipping", batch, False, 0.002))
    clocks.at += 7
    labels = ("shipping",)
    assert values(counted, process.IN_FLIGHT) == {labels: 2}
    assert values(counted, process.LONGEST) == {labels: 7.0}
    assert observed(counted, process.WAIT) == {labels: (2, 6.0)}
    assert observed(counted, process.AGE) == {labels: (0, 0.0)}
    events.emit(events.BatchEnded("mailroom", "shipping", batch, False, "committed", [0.25, 0.5], 7.0))
    assert values(counted, process.IN_FLIGHT) == values(counted, process.LONGEST) == {labels: 0}
    assert values(counted, process.REAPED) == {labels: 2}
    assert observed(counted, process.AGE) == {labels: (2, 12.0)}
    assert observed(counted, process.HANDLE) == {labels: (2, 0.75)}
    assert observed(counted, process.CLAIM) == {labels: (1, 0.002)}


@pytest.mark.parametrize("outcome", ["rolled_back", "unknown"])
def test_a_batch_that_did_not_commit_reaped_nothing(counted: ProcessMetrics, outcome: str) -> None:
    batch = [message(sent_s=1, delivered_s=1)]
    events.emit(events.BatchClaimed("mailroom", "shipping", batch, False, 0.0))
    events.emit(events.BatchEnded("mailroom", "shipping", batch, False, outcome, [], 1.0))
    assert values(counted, process.BATCHES) == {("shipping", outcome): 1}
    assert values(counted, process.REAPED) == {("shipping",): 0}
    assert observed(counted, process.AGE) == {("shipping",): (0, 0.0)}
    assert values(counted, process.IN_FLIGHT) == {("shipping",): 0}


def test_deliveries_failures_and_errors_are_counted_by_their_labels(counted: ProcessMetrics) -> None:
    events.emit(events.MessagesSent("mailroom", ["a", "b"], 2))
    events.emit(events.MessagesDelivered("mailroom", 5, 6, 1, 0, 0, 1, 0, 0.01))
    events.emit(events.ExecutablesExecuted("mailroom", 3, 1, 0, 0.01))
    events.emit(events.MessagesReceived("mailroom", "lyon", 4, 4, 0, 0, 0, 0, 0.01))
    events.emit(events.AttemptFailed("mailroom", "shipping", None, 1, "retry", ValueError("secret")))
    events.emit(events.TriedAgain("mailroom", "worker", "shipping", OSError("secret"), True))
    events.emit(events.TriedAgain("mailroom", "dispatcher", None, OSError("secret"), False))
    assert values(counted, process.SENT) == {(): 2}
    assert values(counted, process.OUTCOME) == {
        ("delivered",): 6, ("scheduled",): 1, ("expired",): 0, ("unrouted",): 0, ("dead",): 1, ("carried",): 0,
    }  # fmt: skip
    assert values(counted, process.EXECUTED) == {("applied",): 2, ("dead",): 1}
    assert values(counted, process.RECEIVED) == {("lyon",): 4}
    assert values(counted, process.FAILED) == {("shipping", "retry"): 1}
    assert values(counted, process.ERRORS) == {("worker", "OSError"): 1, ("dispatcher", "OSError"): 1}
    assert values(counted, process.RECONNECTS) == {("worker",): 1}


def test_other_nodes_of_the_process_are_not_counted(counted: ProcessMetrics) -> None:
    events.emit(events.MessagesSent("tenant_a", ["a"], 1))
    assert values(counted, process.SENT) == {}


def test_ages_are_by_the_database_s_clock_and_never_negative(counted: ProcessMetrics) -> None:
    counted.offset = timedelta(seconds=10)
    events.emit(events.BatchClaimed("mailroom", "shipping", [message(sent_s=0, delivered_s=-4)], False, 0.0))
    events.emit(events.BatchClaimed("mailroom", "billing", [message(sent_s=0, delivered_s=-60)], False, 0.0))
    assert observed(counted, process.WAIT) == {("shipping",): (1, 6.0), ("billing",): (1, 0.0)}


def test_what_was_read_does_not_change(counted: ProcessMetrics) -> None:
    events.emit(events.BatchEnded("mailroom", "shipping", [], False, "committed", [1.0], 1.0))
    before = counted.read()
    events.emit(events.BatchEnded("mailroom", "shipping", [], False, "committed", [1.0], 1.0))
    [(_, histogram)] = before[process.HANDLE]
    assert isinstance(histogram, Histogram)
    assert sum(histogram.counts) == 1
