"""The size of batches by the time that they take: slow handlers get few messages at once, fast ones many."""

import random
import threading
from typing import Any

import pytest

from inbox import Message, Worker
from inbox.worker.pace import Pace
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually
from tests.support.working import NEVER_S, SHIPPING_WITH_LEDGER, deliver, ledger_keys, working, write_ledger

pytestmark = SHIPPING_WITH_LEDGER


@pytest.fixture(autouse=True)
def full_batches() -> None:
    """Leave the first batch as small as it is."""


def sizes(pace: Pace, message_s: float, batches: int) -> list[int]:
    """Return the sizes of full batches whose messages take so long each."""
    found = []
    for _ in range(batches):
        found.append(pace.next())
        pace.took(pace.next(), pace.next() * message_s)
    return found


def test_batches_of_fast_messages_grow_from_one_to_the_largest() -> None:
    assert sizes(Pace(100, 1.0), 0.000_1, 9) == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_batches_grow_until_one_takes_a_quarter() -> None:
    assert sizes(Pace(1_000, 1.0), 0.05, 8) == [1, 2, 4, 8, 4, 8, 4, 8]


def test_slow_messages_have_batches_of_their_own() -> None:
    assert sizes(Pace(1_000, 1.0), 0.3, 4) == [1, 1, 1, 1]


def test_one_slow_batch_is_followed_by_a_small_one() -> None:
    pace = Pace(1_000, 1.0)
    sizes(pace, 0.000_1, 11)
    assert pace.next() == 1_000
    pace.took(1_000, 40.0)
    assert pace.next() == 4
    pace.took(1, 40.0)
    assert pace.next() == 1


def test_batches_are_not_small_because_a_commit_takes_long() -> None:
    """A slow disk makes each COMMIT wait, whatever the batch has in it: small batches would stand still meanwhile."""
    pace = Pace(1_000, 1.0)
    for _ in range(10):
        pace.took(pace.next(), pace.next() * 0.000_1, 5.0)
    assert pace.next() == 1_000
    pace.took(1_000, 0.5, 0.5)  # handlers on a slow server
    assert pace.next() == 1_000
    pace.took(1_000, 40.0, 5.0)
    assert pace.next() == 16


def test_batch_that_was_not_full_lets_none_grow() -> None:
    pace = Pace(1_000, 1.0)
    for _ in range(10):
        pace.took(pace.next(), 0.000_1)
        assert pace.next() == 2
        pace.took(1, 0.000_1)
        assert pace.next() == 2
        pace.took(1, 1.0)
        assert pace.next() == 1


def test_batches_without_a_bound_are_full_at_once() -> None:
    assert sizes(Pace(100, None), 40.0, 3) == [100, 100, 100]


def test_whatever_messages_take_a_batch_takes_twice_a_quarter_or_has_one_message() -> None:
    """As long as the next message takes no longer than the last one did."""
    drawn = random.Random(1)
    for nth in range(400):
        if nth % 20 == 0:
            most, batch_s = drawn.choice([1, 7, 64, 1_000]), drawn.choice([0.1, 1.0, 10.0])
            pace = Pace(most, batch_s)
        message_s = 10 ** drawn.uniform(-5, 1)
        sizes(pace, message_s, 1)
        for size in sizes(pace, message_s, 20):
            assert 1 <= size <= most
            assert size in (1, most) or size & (size - 1) == 0
            assert size == 1 or size * message_s <= batch_s / 2 + 1e-9
        assert 2 * pace.next() > most or 2 * pace.next() * message_s >= batch_s / 4


def test_first_message_of_a_worker_holds_up_no_other_one(node: Node) -> None:
    deliver(node, "slow", "a", "b")
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: Message, connection: Any) -> None:
        if message.key == "slow":
            begun.set()
            assert go_on.wait(WITHIN_S)
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, parallel=2, poll_interval_s=NEVER_S)):
        assert begun.wait(WITHIN_S)
        eventually(lambda: ledger_keys(node) == ["a", "b"])
        go_on.set()
        eventually(lambda: ledger_keys(node) == ["a", "b", "slow"])


def test_worker_s_batches_grow(node: Node) -> None:
    deliver(node, *(f"k{nth}" for nth in range(15)))
    with working(Worker(node.dsn, "shipping", write_ledger, batch_s=4 * NEVER_S, poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == 15)
    assert node.rows("SELECT count(*) FROM ledger GROUP BY xact ORDER BY min(nth)") == [(1,), (2,), (4,), (8,)]
