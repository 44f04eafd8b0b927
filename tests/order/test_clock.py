"""Lamport's rules: the worked run of dapcomp's README, and what must hold for every run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailroom.order.clock import MAX_CLOCK, WARN_CLOCK, ClockOverflow, receive, tick
from tests.models.clock import receive_all, stamp

clocks = st.integers(0, WARN_CLOCK)
nodes = st.integers(0, 2)


def test_worked_run_of_three_processes_ends_as_published() -> None:
    # p1, p2 and p3 broadcast one message each, in turn; a history is a process's stamps of m1, m2 and m3.
    clock = {"p1": 0, "p2": 0, "p3": 0}
    history: dict[str, list[int]] = {"p1": [], "p2": [], "p3": []}
    for sender in clock:
        clock[sender] = sent_clock = tick(clock[sender])
        for process in clock:
            if process != sender:
                clock[process] = receive(clock[process], sent_clock)
            history[process].append(clock[process])
    assert clock == {"p1": 6, "p2": 6, "p3": 5}
    assert history == {"p1": [1, 4, 6], "p2": [2, 3, 6], "p3": [2, 4, 5]}


def test_message_from_a_slow_node_is_stamped_and_not_dropped_as_stale() -> None:
    assert receive(100, 3) == 101
    assert receive_all(100, [3, 3, 2]) == [101, 102, 103]


def test_receiving_from_a_faster_node_jumps_past_its_clock() -> None:
    assert receive(3, 100) == 101


def test_batch_is_stamped_one_by_one_after_the_node_s_own_clock() -> None:
    assert list(stamp(7, 3)) == [8, 9, 10]


def test_batch_is_stamped_later_than_its_after_clock() -> None:
    assert list(stamp(7, 3, after_clock=20)) == [21, 22, 23]


def test_after_clock_of_the_past_changes_nothing() -> None:
    assert stamp(7, 3, after_clock=5) == stamp(7, 3)


def test_empty_batch_stamps_nothing_even_at_the_last_clock() -> None:
    assert list(stamp(MAX_CLOCK, 0)) == []
    assert receive_all(MAX_CLOCK, []) == []


def test_last_clock_of_a_bigint_can_be_given_out() -> None:
    assert tick(MAX_CLOCK - 1) == MAX_CLOCK == 2**63 - 1
    assert receive(0, MAX_CLOCK - 1) == MAX_CLOCK
    assert stamp(MAX_CLOCK - 2, 2)[-1] == MAX_CLOCK


def test_clock_refuses_to_wrap() -> None:
    with pytest.raises(ClockOverflow, match="9223372036854775807"):
        tick(MAX_CLOCK)
    with pytest.raises(ClockOverflow):
        receive(5, MAX_CLOCK)
    with pytest.raises(ClockOverflow):
        receive_all(MAX_CLOCK - 2, [1, 1, 1])
    with pytest.raises(ClockOverflow):
        stamp(MAX_CLOCK - 2, 3)
    with pytest.raises(ClockOverflow):
        stamp(0, 1, after_clock=MAX_CLOCK)


@given(clocks, st.lists(clocks))
@settings(deadline=None)
def test_received_messages_keep_their_order_and_follow_their_sending(clock: int, sent_clocks: list[int]) -> None:
    received = receive_all(clock, sent_clocks)
    assert len(received) == len(sent_clocks)
    assert all(a < b for a, b in zip([clock, *received], received, strict=False))
    assert all(sent < stamped for sent, stamped in zip(sent_clocks, received, strict=True))


@given(clocks, st.lists(clocks))
@settings(deadline=None)
def test_window_maximum_that_sql_uses_gives_the_same_clocks(clock: int, sent_clocks: list[int]) -> None:
    by_window = [
        i + max(clock, max(sent - j + 1 for j, sent in enumerate(sent_clocks[:i], start=1)))
        for i in range(1, len(sent_clocks) + 1)
    ]
    assert receive_all(clock, sent_clocks) == by_window


@given(clocks, st.integers(0, 50), clocks)
@settings(deadline=None)
def test_stamping_a_batch_equals_ticking_once_per_message(clock: int, count: int, after_clock: int) -> None:
    at, ticked = max(clock, after_clock), []
    for _ in range(count):
        at = tick(at)
        ticked.append(at)
    assert list(stamp(clock, count, after_clock)) == ticked


@pytest.mark.slow
@given(st.lists(st.tuples(nodes, nodes), max_size=40))
@settings(deadline=None)
def test_in_every_run_clocks_rise_per_node_and_effects_follow_causes(messages: list[tuple[int, int]]) -> None:
    """Each pair is a message; to oneself it is an internal event. Causality is tracked beside it, as sets of events."""
    clock = [0, 0, 0]
    known: list[frozenset[int]] = [frozenset()] * 3  # per node: the events that lie in its past
    stamped: list[int] = []
    causes: list[frozenset[int]] = []
    owner: list[int] = []

    def event(node: int, at: int) -> None:
        assert at > clock[node]
        clock[node] = at
        causes.append(known[node])
        known[node] |= {len(stamped)}
        stamped.append(at)
        owner.append(node)

    for source, target in messages:
        event(source, tick(clock[source]))
        if source != target:
            known[target] |= known[source]
            event(target, receive(clock[target], clock[source]))
    for number, past in enumerate(causes):
        assert all(stamped[cause] < stamped[number] for cause in past)
    assert len(set(zip(stamped, owner, strict=True))) == len(stamped)
