"""A node on which each of our processes has something to do."""

from collections.abc import Callable, Iterator

import pytest

from mailroom import Links
from mailroom.sql.runner import run
from tests.support.node import Node, failing
from tests.support.roles import rights, role
from inbox import Inbox, Park, Skip


@pytest.fixture
def busy(node: Node) -> Node:
    """Inboxes of each kind, messages everywhere, a parked key, a link, and what died at each stage."""
    node.inbox("shipping", "print", backoff_s=0, max_attempts=2, on_failure="skip")
    node.inbox("ledger", "#", order="total", backoff_s=0)
    node.inbox("replies", keep_s=60)
    with node.connection.transaction():
        Links().allow(node.connection, "lyon", actor="ada")
    node.connection.execute("INSERT INTO mailroom.link_topic (topic, link) SELECT 'print', number FROM mailroom.link")
    for key in ("parked", "skipped", "waits"):
        node.send("shipping", key=key)
    node.send("nobody", kind="C")
    node.send("print")
    node.deliver_all()
    for message, error in zip(Inbox("shipping").peek(node.connection), (Park("no"), Skip("no")), strict=False):
        with node.connection.transaction():
            run(node.connection, failing("shipping", message, error))
    node.send("shipping", key="parked")
    return node
