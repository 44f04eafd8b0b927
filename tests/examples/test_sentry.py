"""A failure of a handler arrives at Sentry, with what finds its message again and without what is in it."""

import json
from typing import Any

import sentry_sdk
from sentry_sdk.transport import Transport

from examples.sentry import report
from inbox import Message, Worker
from tests.support.node import Node
from tests.support.waiting import eventually
from tests.support.working import NEVER_S, working


class Kept(Transport):
    """Keeps the events instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Any) -> None:
        if (event := envelope.get_event()) is not None:
            self.events.append(event)


def test_a_failure_arrives_with_its_message_and_without_its_value(node: Node) -> None:
    node.inbox("shipping", backoff_s=3_600)
    sent = node.send("shipping", {"card": "a secret"}, key="order-42")
    node.deliver_all()
    kept = Kept()

    def handle(message: Message, _: Any) -> None:
        card = message.value["card"]
        raise ValueError(f"no such order, of {len(card)}")

    options: dict[str, Any] = {"default_integrations": False, "auto_enabling_integrations": False}
    sentry_sdk.init("http://key@127.0.0.1/1", transport=kept, include_local_variables=False, **options)
    try:
        with working(Worker(node.dsn, "shipping", handle, on_error=report, poll_interval_s=NEVER_S)):
            eventually(lambda: kept.events)
    finally:
        sentry_sdk.init(**options)
    [event] = kept.events
    assert event["exception"]["values"][-1]["type"] == "ValueError"
    assert event["tags"]["topic"] == "shipping"
    assert (event["contexts"]["message"]["id"], event["contexts"]["message"]["key"]) == (str(sent), "order-42")
    assert "a secret" not in json.dumps(event, default=str)
