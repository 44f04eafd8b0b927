"""A stream of Spark and pauses: it finds nothing in a paused inbox, and does not pass by a paused key."""

import pytest

from inbox import Inbox
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from spark_jobs.read.offsets import planning
from tests.support.node import SCHEMA, Node

INBOX = Inbox("shipping")


def test_stream_finds_nothing_in_a_paused_inbox_and_refuses_paused_keys(node: Node) -> None:
    node.inbox("shipping")
    for key in ("k", "l"):
        node.send("shipping", key=key)
    node.deliver_all()
    with node.connection.transaction():
        INBOX.pause(node.connection, actor="ada")
    for number in (1, None):
        with node.connection.transaction():
            assert run(node.connection, planning(SCHEMA, "shipping", 0, number)) is None
    with node.connection.transaction():
        INBOX.resume(node.connection, actor="ada")
        assert run(node.connection, planning(SCHEMA, "shipping", 0, 1)) is not None
        INBOX.pause(node.connection, "k", actor="ada")
    with pytest.raises(ConfigurationError, match="parked or paused"), node.connection.transaction():
        run(node.connection, planning(SCHEMA, "shipping", 0, 1))
