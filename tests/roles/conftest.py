"""A node on which each of our processes has something to do."""

import pytest

from dispatcher import execute_all
from inbox import Inbox, Park, Skip
from mailroom import Links
from mailroom.sql.runner import run
from outbox import Executable, Outbox, Store
from tests.support.node import Node, failing

ORIGIN = "INSERT INTO mailroom.origin (name, id) VALUES ('paris', gen_random_uuid()) RETURNING id"
OF_ANOTHER_NODE = """
INSERT INTO mailroom.dead_letter (stage, reason, origin, sent_clock,
                                  message_id, topic, key, kind, message_type, sent_at, value_json)
VALUES ('receive', 'no inbox gets it', %s, 5, gen_random_uuid(), 'theirs', 'k', 'M', 'U', now(), '1')
"""


@pytest.fixture
def busy(node: Node) -> Node:
    """Inboxes of each kind, messages everywhere, a parked key, a link, and what died at each stage."""
    node.inbox(
        "shipping",
        "print",
        backoff_s=0,
        max_attempts=2,
        on_failure="skip",
        rate=1_000,
        concurrency=3,
        breaker=100,
        breaker_by="/",
    )
    node.inbox("ledger", "#", order="total", backoff_s=0, max_attempts=2, rate=1_000, concurrency=3, breaker=100)
    node.inbox("replies", expire_s=60)
    with node.connection.transaction():
        Links().allow(node.connection, "lyon", actor="ada")
    node.connection.execute("INSERT INTO mailroom.link_topic (topic, link) SELECT 'print', number FROM mailroom.link")
    for key in ("parked", "skipped", "waits"):
        node.send("shipping", key=key)
    with node.connection.transaction():
        Outbox().command(node.connection, "nobody", 1, reply_to="replies")
    node.send("print")
    node.deliver_all()
    for message, error in zip(Inbox("shipping").peek(node.connection), (Park("no"), Skip("no")), strict=False):
        with node.connection.transaction():
            run(node.connection, failing("shipping", message, error))
    with node.connection.transaction():
        Store().send_many(
            node.connection, [Executable("put", "v", value=b"\x01"), Executable("increment", "v", amount=1)]
        )
    execute_all(node.dsn)
    [origin] = node.rows(ORIGIN)
    node.connection.execute(OF_ANOTHER_NODE, origin)
    node.send("shipping", key="parked")
    return node
