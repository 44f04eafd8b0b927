"""The model of how a batch is numbered by Lamport's rules, one message after another.

`stamp` is what `dispatcher.delivery.deliver.DELIVER` does with what is sent, and `receive_all` what
`dispatcher.links.receive` does with what comes from another node; `tests/dispatcher/test_deliver.py` and
`tests/links/test_receive.py` compare.
"""

from collections.abc import Iterable
from itertools import accumulate

from mailroom.order.clock import receive, tick


def receive_all(clock: int, sent_clocks: Iterable[int]) -> list[int]:
    """Return the clocks at which messages are received one after another, in the order given.

    The i-th of them (from 1) is i + max(clock, max over j <= i of (sent_clock[j] - j + 1)). That is a window maximum,
    so one SQL statement can number a whole batch.
    """
    return list(accumulate(sent_clocks, receive, initial=clock))[1:]


def stamp(clock: int, count: int, after_clock: int = 0) -> range:
    """Return the clocks of `count` messages sent one after another by a node whose clock is `clock`.

    All are later than `after_clock`, the largest clock that a message of the batch must follow. The last of them is the
    node's new clock; without messages the range is empty and the clock does not change.
    """
    before = max(clock, after_clock)
    return range(before + 1, tick(before, count) + 1)
