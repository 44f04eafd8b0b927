"""What guests at logs hold against the log is noticed: each wrong reading is told by the invariant that it breaks."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from inbox import Inbox
from mailroom import create_log
from tests.faults.guests import GUEST, read_the_past, send_off
from tests.faults.misuse import Violated
from tests.support.node import Node

Reap = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lambda found: found, None),
        (lambda found: found[:1] + found[2:], "L1"),
        (lambda found: [*found, *found[:1]], "L3"),
        (lambda found: found[::-1], "L4"),
    ],
)
def test_a_guest_tells_what_it_misses_has_twice_or_out_of_order(
    node: Node, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]], invariant: str | None
) -> None:
    with node.connection.transaction():
        create_log(node.connection, "diary", ["noted"], lanes=2)
    for nth in range(20):
        node.send("noted", nth, key=f"k{nth % 2}")
    node.deliver_all()
    reap: Reap = Inbox.reap_any
    monkeypatch.setattr(Inbox, "reap_any", lambda *given: change(reap(*given)))
    if invariant is None:
        read_the_past(node.connection, random.Random(3), "diary", "start")
    else:
        with pytest.raises(Violated) as broken:
            read_the_past(node.connection, random.Random(3), "diary", "start")
        assert broken.value.violation.invariant == invariant
    assert node.rows("SELECT FROM mailroom.inbox_registry WHERE name = %s", GUEST)
    send_off(node.connection)
    assert not node.rows("SELECT FROM mailroom.inbox_registry WHERE name = %s", GUEST)
