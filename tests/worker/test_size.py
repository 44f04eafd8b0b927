"""The size of batches after failures: a storm of failures repeats few other messages."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any, cast

import psycopg
import pytest

from inbox import Message, Worker
from inbox.by_key.claim import Claimed
from inbox.by_key.key_order import KeyOrder
from inbox.handling.batch import Batch
from inbox.handling.run import HandlerRun
from inbox.handling.size import HANDLED_PER_REPEATED, Size
from inbox.handling.taken import TakenBatch
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, SHIPPING_WITH_LEDGER, ledger_keys, working, write_ledger

pytestmark = SHIPPING_WITH_LEDGER


def batch_of(messages: int, *, due: bool = False, bad: int | None = None) -> Batch:
    """Return a batch of this many messages, of which that one is to blame if it fails."""
    made = cast("list[Message]", list(range(messages)))
    taken = TakenBatch(Claimed(made, None, is_all=True), KeyOrder("mailroom", "shipping"), at=0.0)
    return Batch(due, taken=taken, run=HandlerRun(blamed=None if bad is None else made[bad]))


def test_first_batch_is_full() -> None:
    assert Size(100).next() == 100


def test_batches_are_smaller_by_what_was_repeated_and_grow_with_what_is_handled() -> None:
    size = Size(100)
    size.failed(batch_of(100, bad=0))
    assert size.next() == 100
    size.failed(batch_of(100, bad=9))
    assert size.next() == 64
    size.failed(batch_of(64, bad=63))
    sizes = []
    while (now := size.next()) < 100:
        sizes.append(now)
        size.handled(batch_of(now))
    assert sorted(Counter(sizes)) == [16, 32, 64]
    assert sizes == sorted(sizes)


def test_all_messages_are_repeated_if_it_is_unknown_which_one_failed() -> None:
    size = Size(100)
    size.failed(batch_of(100))
    assert size.next() == 1


def test_messages_tried_alone_do_not_change_the_size_of_batches() -> None:
    size = Size(100)
    size.failed(batch_of(1, due=True))
    assert size.next() == 100
    size.failed(batch_of(100))
    for _ in range(1_000):
        size.handled(batch_of(1, due=True))
    assert size.next() == 1


def test_no_more_than_a_tenth_is_repeated_whatever_fails_when() -> None:
    dice = random.Random(1)
    for nth in range(10_000):
        if nth % 500 == 0:
            size = Size(most := dice.choice([1, 2, 7, 100, 1_000]))
            handled = repeated = 0
        messages = dice.randint(1, size.next())
        if dice.random() < 0.3:
            bad = dice.choice([None, dice.randrange(messages)])
            size.failed(batch_of(messages, bad=bad))
            repeated += messages - 1 if bad is None else bad
        else:
            size.handled(batch_of(messages))
            handled += messages
        assert repeated <= handled / HANDLED_PER_REPEATED + most - 1, nth


@pytest.mark.slow
def test_storm_of_first_failures_repeats_little(node: Node) -> None:
    """Of 1,000 keys in one loop 100 fail once. Without the allowance each failure repeated the batch before it."""
    keys, bad = 1_000, {f"k{nth}" for nth in random.Random(13).sample(range(1_000), 100)}
    with node.connection.transaction():
        for nth in range(keys):
            node.send("shipping", key=f"k{nth}")
    node.deliver_all()
    calls: Counter[str] = Counter()
    order: list[bool] = []

    def handle(message: Message, connection: psycopg.Connection[Any]) -> None:
        calls[message.key] += 1
        order.append(calls[message.key] == 1)
        if message.key in bad and calls[message.key] == 1:
            raise ValueError
        write_ledger(message, connection)

    with working(Worker(node.dsn, "shipping", handle, batch=100, batch_s=None, poll_interval_s=NEVER_S)):
        eventually(lambda: len(ledger_keys(node)) == keys)
    healthy = [key for key in calls if key not in bad]
    assert {calls[key] for key in bad} <= {2, 3}  # more than once, if it was before another in its batch
    assert sum(calls[key] - 1 for key in healthy) <= keys / HANDLED_PER_REPEATED + 99
    # Retries take turns with new batches, so each holds up healthy keys by one message at most.
    new = [nth for nth, is_new in enumerate(order) if is_new]
    assert max(after - before for before, after in pairwise(new)) <= 2
