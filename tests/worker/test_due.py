"""Due: when a loop claims failing keys, by a clock of the test's own."""

from inbox.worker.loop import Due


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_due_is_what_the_last_claim_reported() -> None:
    due = Due(1.0, clock := Clock())
    due.reported(None, clock.now)
    assert due.in_s() == float("inf")
    due.reported(3.0, clock.now)
    clock.now += 2
    assert due.in_s() == 1
    due.reported(-5.0, clock.now)
    assert due.in_s() == 0


def test_recorded_failure_comes_before_what_is_later() -> None:
    due = Due(1.0, clock := Clock())
    due.reported(3.0, clock.now)
    due.recorded(2.0)
    due.recorded(5.0)
    due.recorded(None)
    assert due.in_s() == 2


def test_after_one_was_claimed_the_next_is_claimed_when_it_is_due() -> None:
    due = Due(1.0, clock := Clock())
    due.claimed(0.25, clock.now)
    assert due.in_s() == 0.25
    due.claimed(-0.25, clock.now)
    assert due.in_s() == 0


def test_keys_that_others_hold_are_tried_again_after_a_while_and_others_in_time() -> None:
    due = Due(1.0, clock := Clock())
    due.missed(0.25, clock.now)
    assert due.in_s() == 0.25
    due.reported(-3.0, clock.now)  # by claims that see the one that is held
    assert due.in_s() == 0.25
    clock.now += 0.25
    assert due.in_s() == 0
    due.missed(None, clock.now)
    due.reported(-3.0, clock.now)
    assert due.in_s() == 1
    due.claimed(-3.0, clock.now)
    assert due.in_s() == 0


def test_what_a_claim_reported_counts_from_the_claim_and_does_not_undo_what_was_recorded_since() -> None:
    due = Due(1.0, clock := Clock())
    claimed_at = clock.now
    clock.now += 4  # its handlers take a while
    due.reported(5.0, claimed_at)
    assert due.in_s() == 1
    due.recorded(0.5)
    due.reported(None, claimed_at)
    assert due.in_s() == 0.5
    due.reported(None, clock.now)
    assert due.in_s() == float("inf")
