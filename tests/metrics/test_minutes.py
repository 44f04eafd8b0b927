"""What a process counts minute by minute: nothing is lost, nothing counts twice, and quiet inboxes have no row."""

from datetime import timedelta

import pytest

from mailroom import events
from mailroom.metrics import minutes
from mailroom.metrics.minutes import COUNTED, NODE, NONE, Minutes, Numbers, minute_of, totals
from mailroom.metrics.process import ProcessMetrics
from tests.metrics.test_process import NOW, message

NEXT = NOW + timedelta(minutes=1)


def numbers(**given: float) -> Numbers:
    ages = {3: given.pop("young")} if "young" in given else {}  # from 50 to 100 ms
    return (
        *(given.get(column, none) for column, none in zip(COUNTED, NONE, strict=False)),
        *(ages.get(nth, 0) for nth in range(len(NONE) - len(COUNTED))),
    )


def test_columns_are_what_the_events_tell() -> None:
    process = ProcessMetrics(now=lambda: NOW)
    end = process.listen()
    batch = [message(sent_s=0.06, delivered_s=0.05), message(sent_s=0.07, delivered_s=0.05)]
    events.emit(events.MessagesDelivered("mailroom", 5, 6, 1, 0, 0, 1, 0, 0.01))
    for outcome in ("committed", "rolled_back"):
        events.emit(events.BatchClaimed("mailroom", "shipping", batch, False, 0.002))
        events.emit(events.BatchEnded("mailroom", "shipping", batch, False, outcome, [0.25], 7.0))
    for outcome in ("retry", "park", "skip", "alone"):
        events.emit(events.AttemptFailed("mailroom", "billing", None, 1, outcome, ValueError()))
    end()
    assert totals(process.read()) == {
        NODE: numbers(delivered=6),
        "shipping": numbers(reaped=2, batches=1, handle_s=0.5, young=2),
        "billing": numbers(failed=3, parked=1, skipped=1),
    }


def test_a_minute_has_what_came_since_the_last_one_and_only_where_something_came() -> None:
    kept = Minutes()
    kept.cut(NOW, {"a": numbers(reaped=2), "b": numbers(reaped=1)})
    kept.cut(NEXT, {"a": numbers(reaped=5), "b": numbers(reaped=1)})
    assert kept.waiting() == {
        (NOW, "a"): numbers(reaped=2), (NOW, "b"): numbers(reaped=1), (NEXT, "a"): numbers(reaped=3),
    }  # fmt: skip
    kept.cut(NEXT, {"a": numbers(reaped=6), "b": numbers(reaped=1)})
    assert kept.waiting()[NEXT, "a"] == numbers(reaped=4)


def test_what_is_written_is_forgotten_and_what_came_meanwhile_is_not() -> None:
    kept = Minutes()
    kept.cut(NOW, {"a": numbers(reaped=2)})
    written = kept.waiting()
    kept.cut(NEXT, {"a": numbers(reaped=3)})
    kept.done(written)
    assert kept.waiting() == {(NEXT, "a"): numbers(reaped=1)}


def test_rows_that_wait_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minutes, "KEPT_ROWS", 2)
    kept = Minutes()
    for nth in range(1, 4):
        kept.cut(NOW + timedelta(minutes=nth), {"a": numbers(reaped=nth)})
    assert [minute for minute, _ in kept.waiting()] == [NOW + timedelta(minutes=nth) for nth in (2, 3)]
    assert kept.dropped == 1
    kept.forget_before(NOW + timedelta(minutes=3))
    assert list(kept.waiting()) == [(NOW + timedelta(minutes=3), "a")]


def test_minute() -> None:
    assert minute_of(NOW + timedelta(seconds=59.9)) == NOW
