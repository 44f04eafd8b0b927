"""Two reapers of one key, in every order of their steps: nothing lost, doubled or overtaken (T-04)."""

from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from typing import Any

import psycopg
import pytest

from inbox import Inbox
from mailroom import create_inbox
from mailroom.testing import deliver
from outbox import Outbox, Outgoing
from tests.interleavings.sessions import Step, interleave, orders, sessions
from tests.support.databases import Connect

pytestmark = pytest.mark.both_versions

MESSAGES = 12


class Reaper:
    """The steps of one session, and what it consumed: `log` is common to all, in the order of the commits."""

    def __init__(self, call: str, log: list[int]) -> None:
        self._inbox = Inbox("shipping")
        self._call = call
        self._log = log
        self._taken: list[int] = []
        self._mark = 0

    def reap(self, connection: psycopg.Connection[Any]) -> None:
        if self._call == "reap":
            messages = self._inbox.reap(connection, "k", limit=3)
        else:
            messages = self._inbox.reap_any(connection, max_keys=1, per_key=3)
        self._taken += [int(str(message.value)) for message in messages]

    def savepoint(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("SAVEPOINT s")
        self._mark = len(self._taken)

    def rollback_to(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("ROLLBACK TO SAVEPOINT s")
        del self._taken[self._mark :]

    def commit(self, connection: psycopg.Connection[Any]) -> None:
        # Noted before the commit: a session that waits for this one goes on the moment it is done.
        self._log += self._taken
        connection.commit()
        self._taken = []

    def rollback(self, connection: psycopg.Connection[Any]) -> None:
        connection.rollback()
        self._taken = []

    def steps(self, names: Sequence[str]) -> list[Step]:
        return [getattr(self, name) for name in names]


PLANS = {
    "commit": ("reap", "reap", "commit"),
    "rollback": ("reap", "rollback", "reap", "commit"),
    "savepoint": ("savepoint", "reap", "rollback_to", "reap", "commit"),
    "kept savepoint": ("reap", "savepoint", "reap", "rollback_to", "commit"),
}


# With one plan and two calls, either session may have either of them: one of the two ways is all there is.
CASES = [
    pytest.param(a, b, calls, marks=[pytest.mark.slow] if len(PLANS[a]) + len(PLANS[b]) > 8 else [])
    for a, b in combinations_with_replacement(sorted(PLANS), 2)
    for calls in product(("reap", "reap_any"), repeat=2)
    if a != b or calls != ("reap_any", "reap")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("a", "b", "calls"), CASES)
def test_two_reapers_of_one_key_never_overtake(
    dsn: str, connect: Connect, a: str, b: str, calls: tuple[str, str]
) -> None:
    alike = a == b and calls[0] == calls[1]
    observer = connect(autocommit=True)
    with connect() as setup:
        create_inbox(setup, "shipping")
    with sessions(dsn, observer, "a", "b") as opened:
        for order in orders("a", len(PLANS[a]), "b", len(PLANS[b])):
            if alike and order[0] == "b":
                continue  # the same as another order with the names exchanged
            with observer.transaction():
                observer.execute("DELETE FROM mailroom.inbox")
                Outbox().send_many(observer, [Outgoing("shipping", n, key="k") for n in range(MESSAGES)])
                deliver(observer)
            log: list[int] = []
            steps = {
                "a": Reaper(calls[0], log).steps(PLANS[a]),
                "b": Reaper(calls[1], log).steps(PLANS[b]),
            }
            interleave(opened, steps, order)
            left = [int(str(message.value)) for message in Inbox("shipping").peek(observer, limit=100)]
            assert log + left == list(range(MESSAGES)), order
