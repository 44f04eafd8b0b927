"""The public clock: dapcomp's run by the class, and what holds in every run."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailroom import LamportClock, Stamp
from mailroom.order.clock import MAX_CLOCK, ClockOverflow
from tests.models.vector_clock import VectorClock
from tests.support import dapcomp

PROCESSES = 3
steps = st.lists(st.tuples(st.integers(0, PROCESSES - 1), st.integers(0, PROCESSES - 1), st.booleans()), max_size=30)


def test_worked_run_of_dapcomp_is_reproduced_to_the_number() -> None:
    clocks = {process: LamportClock() for process in dapcomp.PROCESSES}
    found = dapcomp.histories(
        lambda sender, message: clocks[sender].tick(message),
        lambda receiver, _, message, sent_clock: clocks[receiver].receive(sent_clock, message).clock,
    )
    assert found == dapcomp.HISTORIES == {"p1": [1, 4, 6], "p2": [2, 3, 6], "p3": [2, 4, 5]}
    assert {process: clock.clock for process, clock in clocks.items()} == dapcomp.CLOCKS == {"p1": 6, "p2": 6, "p3": 5}
    for process, clock in clocks.items():
        assert [(stamp.clock, stamp.what) for stamp in clock.history] == list(
            zip(dapcomp.HISTORIES[process], ("m1", "m2", "m3"), strict=True)
        )


def test_stale_message_is_received_and_says_so() -> None:
    clock = LamportClock(10)
    assert clock.receive(10, "late") == Stamp(11, "late", is_stale=True)
    assert clock.receive(3, "later") == Stamp(12, "later", is_stale=True)
    assert clock.receive(13, "in time") == Stamp(14, "in time", is_stale=False)
    assert [stamp.what for stamp in clock.history] == ["late", "later", "in time"]


def test_clock_goes_on_by_its_step() -> None:
    clock = LamportClock(2, step=5)
    assert clock.tick() == 7
    assert clock.receive(20).clock == 25
    assert clock.receive(1).clock == clock.clock == 30
    assert repr(clock) == "LamportClock(30, step=5)"


def test_clock_at_its_end_refuses_and_notes_nothing() -> None:
    clock = LamportClock(MAX_CLOCK - 1)
    assert clock.tick() == MAX_CLOCK
    with pytest.raises(ClockOverflow):
        clock.tick()
    with pytest.raises(ClockOverflow):
        clock.receive(0)
    assert clock.clock == MAX_CLOCK
    assert len(clock.history) == 1


def test_history_is_a_copy() -> None:
    clock = LamportClock()
    clock.tick()
    clock.history.clear()
    assert len(clock.history) == 1


def test_what_is_no_clock_is_refused() -> None:
    wrong: list[Any] = [-1, MAX_CLOCK + 1, 1.0, True, None]
    for clock in wrong:
        with pytest.raises(ValueError, match="clock must be an int from 0"):
            LamportClock(clock)
        with pytest.raises(ValueError, match="sent_clock must be"):
            LamportClock().receive(clock)


def test_step_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="step must be an int from 1"):
        LamportClock(step=0)


def test_vector_clock_tells_causes_from_what_is_concurrent() -> None:
    a, b = VectorClock(0, 2), VectorClock(1, 2)
    sent, other = a.tick(), b.tick()
    received = b.receive(sent)
    assert (sent, other, received) == ((1, 0), (0, 1), (1, 2))
    assert VectorClock.happened_before(sent, received)
    assert VectorClock.happened_before(other, received)
    assert not VectorClock.happened_before(received, sent)
    assert not VectorClock.happened_before(sent, other)
    assert not VectorClock.happened_before(other, sent)
    assert not VectorClock.happened_before(sent, sent)
    assert repr(b) == "VectorClock(1, (1, 2))"


def test_vector_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match="process must be from 0 to 1"):
        VectorClock(2, 2)
    with pytest.raises(ValueError, match="of 2 processes is expected, not of 3"):
        VectorClock(0, 2).receive((0, 0, 0))
    with pytest.raises(ValueError):
        VectorClock.happened_before((1,), (1, 2))


@given(steps, st.integers(1, 4))
@settings(deadline=None)
def test_what_happened_before_has_the_smaller_clock_in_every_run(
    messages: list[tuple[int, int, bool]], step: int
) -> None:
    """Each triple is a message; to oneself it is an internal event, and it may arrive only after all others."""
    scalar = [LamportClock(step=step) for _ in range(PROCESSES)]
    vector = [VectorClock(process, PROCESSES) for process in range(PROCESSES)]
    events: list[tuple[int, tuple[int, ...], int]] = []
    late: list[tuple[int, int, tuple[int, ...]]] = []

    def receive(target: int, sent_clock: int, sent: tuple[int, ...]) -> None:
        stamp = scalar[target].receive(sent_clock)
        assert stamp.clock > sent_clock
        events.append((stamp.clock, vector[target].receive(sent), target))

    for source, target, is_late in messages:
        clock, sent = scalar[source].tick(), vector[source].tick()
        events.append((clock, sent, source))
        if is_late and source != target:
            late.append((target, clock, sent))
        elif source != target:
            receive(target, clock, sent)
    for target, clock, sent in reversed(late):
        receive(target, clock, sent)
    for clock, one, _ in events:
        for other_clock, other, _ in events:
            if VectorClock.happened_before(one, other):
                assert clock < other_clock
    assert len({(clock, process) for clock, _, process in events}) == len(events)
    assert sum(len(clock.history) for clock in scalar) == len(events)
