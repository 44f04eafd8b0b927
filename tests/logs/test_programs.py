"""What programs do with an inbox by key works on one that reads a log, or is refused with the reason."""

from dataclasses import dataclass
from typing import Any

import pytest

from inbox import Handlers, Inbox, Message, Requests
from mailroom import Topic, create_inbox, create_log, testing
from mailroom.errors import ConfigurationError
from mailroom.testing.mail import Mail, mailing
from outbox import Outbox
from tests.support.databases import Connect
from tests.support.node import SCHEMA, Node


@dataclass
class Paid:
    order: str
    total: int


paid = Topic("order.paid", Paid)
sent = Topic("order.sent", str)


def test_typed_topics_and_the_test_kit_work_on_readers(node: Node, connect: Connect) -> None:
    with node.connection.transaction():
        create_log(node.connection, "orders", [paid, sent], lanes=4)
        create_inbox(node.connection, "billing", log="orders", topics=paid)
        create_inbox(node.connection, "search", log="orders")
    billing, search = Handlers(), Handlers()
    totals: list[int] = []
    seen: list[str] = []

    @billing.on(paid)
    def bill(message: Message[Paid], connection: Any) -> None:
        totals.append(message.value.total)
        if len(totals) == 2:
            raise ValueError("not yet")

    @search.on("order.#")
    def index(message: Message, connection: Any) -> None:
        seen.append(message.topic)

    outbox = Outbox()
    with connect() as connection, mailing(connection, SCHEMA) as mail:
        assert isinstance(mail, Mail)
        outbox.send(connection, paid, Paid("o-1", 80), key="o-1")
        outbox.send(connection, sent, "bicycle", key="o-1")
        outbox.send(connection, paid, Paid("o-2", 90), key="o-2")
        worked = mail.handle_all(billing=billing, search=search)
        assert [each.message.key for each in worked.failures] == ["o-2"]
        assert (totals, sorted(seen)) == ([80, 90], ["order.paid", "order.paid", "order.sent"])
        assert [each.topic for each in mail.sent("billing")] == ["order.paid"] * 2
        assert [each.topic for each in mail.sent("search")] == ["order.paid", "order.sent", "order.paid"]
        assert Inbox("billing").backlog(connection) == 1  # which waits for its next attempt
        outbox.send(connection, sent, "train", key="o-3")
        assert testing.handle_all(connection, "search", lambda message, _: seen.append(message.value)) == 1
        assert seen[-1] == "train"


def test_requests_need_an_inbox_that_gets_replies(node: Node) -> None:
    with node.connection.transaction():
        create_log(node.connection, "orders", ["order.#"])
        create_inbox(node.connection, "billing", log="orders")
    with pytest.raises(ConfigurationError) as raised, Requests(node.dsn, "billing"):
        pass
    assert raised.value.code == "MR-log-has-no-replies"
