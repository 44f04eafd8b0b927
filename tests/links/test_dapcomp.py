"""dapcomp's worked run by real nodes: three databases that read each other have the same clocks, to the number."""

from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from inbox import Inbox
from mailroom.links.start import noting_place, starting
from mailroom.sql.runner import run
from tests.support import dapcomp
from tests.support.databases import Databases
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

RECEIVED = Inbox("received")


@pytest.fixture
def nodes(databases: Databases) -> Iterator[dict[str, Node]]:
    """A node for each process; its place is noted, so that its first start is no jump."""
    with ExitStack() as closing:
        nodes = {}
        for process in dapcomp.PROCESSES:
            dsn = databases.create(migrated=True)
            closing.callback(databases.drop, dsn)
            nodes[process] = Node(dsn, closing.enter_context(psycopg.connect(dsn, autocommit=True)))
            run(nodes[process].connection, noting_place(SCHEMA))
        yield nodes


@pytest.fixture
def links(nodes: dict[str, Node]) -> dict[tuple[str, str], Linked]:
    """Each node reads each other one, by sender and receiver."""
    made = {
        (sender, receiver): linked(nodes[sender], nodes[receiver], ["news"], name=sender, reader=receiver)
        for sender in nodes
        for receiver in nodes
        if sender != receiver
    }
    for link in made.values():
        link.inbox(RECEIVED.inbox, "news")
    for process, node in nodes.items():
        assert run(node.connection, starting(SCHEMA)).clock == 0, f"{process} has jumped"
        node.allow_clocks()
    return made


@pytest.mark.slow
def test_worked_run_of_dapcomp_by_three_nodes_to_the_number(
    nodes: dict[str, Node], links: dict[tuple[str, str], Linked]
) -> None:
    heard: dict[str, list[str]] = {process: [] for process in nodes}

    def send(sender: str, message: str) -> int:
        nodes[sender].send("news", message, key=message)
        clock = nodes[sender].deliver().clock
        assert clock is not None
        return clock

    def receive(receiver: str, sender: str, message: str, sent_clock: int) -> int:
        assert links[sender, receiver].take().delivered == 1
        with nodes[receiver].connection.transaction():
            [found] = RECEIVED.reap_any(nodes[receiver].connection)
        assert (found.value, found.sent_clock, found.origin) == (message, sent_clock, links[sender, receiver].source_id)
        heard[receiver].append(message)
        return found.clock

    found = dapcomp.histories(send, receive)
    assert found == dapcomp.HISTORIES == {"p1": [1, 4, 6], "p2": [2, 3, 6], "p3": [2, 4, 5]}
    clocks = {process: node.value("SELECT last_value FROM mailroom.clock") for process, node in nodes.items()}
    assert clocks == dapcomp.CLOCKS == {"p1": 6, "p2": 6, "p3": 5}
    assert heard == {"p1": ["m2", "m3"], "p2": ["m1", "m3"], "p3": ["m1", "m2"]}
