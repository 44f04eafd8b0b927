"""Events: who listens hears what happens, in order; who does not, costs nothing, and disturbs nothing."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dispatcher import Dispatcher, execute_all
from dispatcher.lanes import lease
from inbox import AsyncBatchHandler, AsyncWorker, Message, Park, Worker
from inbox.worker import in_flight
from mailroom import events
from mailroom.errors import ConfigurationError
from outbox import Outbox, Outgoing, Store
from tests.support.node import Node
from tests.support.pages import page_named
from tests.support.proxy import CommitFault, proxied
from tests.support.waiting import WITHIN_S, eventually, eventually_async
from tests.support.working import (
    NEVER_S,
    SHIPPING_WITH_LEDGER,
    deliver,
    ledger_keys,
    working,
    working_async,
    write_ledger,
)

pytestmark = SHIPPING_WITH_LEDGER

PAGE = page_named("events.md")


@contextlib.contextmanager
def heard(*kinds: type[Any]) -> Iterator[list[Any]]:
    """Collect the events of these kinds, or of all."""
    found: list[Any] = []
    end = events.subscribe(found.append, *kinds)
    try:
        yield found
    finally:
        end()


def names(found: list[Any]) -> list[str]:
    return [type(event).__name__ for event in found]


def test_a_batch_is_told_from_its_claim_to_its_end(node: Node) -> None:
    deliver(node, "a", "a")
    with heard() as found, working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)):
        eventually(lambda: ledger_keys(node) == ["a", "a"] and "BatchEnded" in names(found))
    assert names(found) == ["BatchClaimed", *["HandlerBegan", "HandlerEnded"] * 2, "BatchEnded"]
    assert {(event.schema, event.inbox) for event in found} == {("mailroom", "shipping")}
    assert {event.outcome for event in found if isinstance(event, events.BatchEnded)} == {"committed"}
    assert all(event.seconds >= 0 for event in found if hasattr(event, "seconds"))


async def test_a_batch_handler_is_told_once_with_all_messages(node: Node) -> None:
    deliver(node, "a", "b", "c")

    async def handle(messages: list[Message], connection: Any) -> None:
        for message in messages:
            await connection.execute("INSERT INTO ledger (key) VALUES (%s)", [message.key])

    with heard(events.HandlerBegan, events.HandlerEnded) as found:
        worker = AsyncWorker(node.dsn, "shipping", AsyncBatchHandler(handle), batch_s=None, poll_interval_s=NEVER_S)
        async with working_async(worker):
            await eventually_async(lambda: len(ledger_keys(node)) == 3 and len(found) == 2)
    assert [[message.key for message in event.messages] for event in found] == [["a", "b", "c"]] * 2


def test_a_failure_is_told_with_its_message_and_outcome(node: Node) -> None:
    deliver(node, "bad")

    def handle(message: Message, _: Any) -> None:
        raise Park("no such order")

    kinds = (events.HandlerEnded, events.BatchEnded, events.AttemptFailed)
    with heard(*kinds) as found, working(Worker(node.dsn, "shipping", handle, poll_interval_s=NEVER_S)):
        eventually(lambda: "AttemptFailed" in names(found))
    ended, batch, attempt = found[:3]
    assert ended.error is attempt.error is not None
    assert batch.outcome == "rolled_back"
    assert (attempt.message.key, attempt.attempt, attempt.outcome) == ("bad", 1, "park")


def test_a_commit_without_an_answer_is_told_as_unknown(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "WATCH_INTERVAL_S", NEVER_S)  # no other COMMIT comes between
    deliver(node, "a")

    with proxied(node.dsn) as (network, dsn), heard(events.BatchEnded, events.TriedAgain) as found:

        def handle(message: Message, connection: Any) -> None:
            network.at_next_commits(CommitFault.SWALLOW)
            write_ledger(message, connection)

        with working(Worker(dsn, "shipping", handle, poll_interval_s=NEVER_S)):
            eventually(lambda: len(found) == 2)
    batch, again = found
    assert batch.outcome == "unknown"
    assert (again.role, again.inbox, ledger_keys(node)) == ("worker", "shipping", ["a"])


async def test_a_lane_tells_that_it_leads_and_what_it_delivers(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", WITHIN_S)
    node.send("shipping", key="a")
    node.send("shipping.nobody", key="b")
    lane = Dispatcher(node.dsn)
    with heard() as found:
        running = asyncio.create_task(lane.run())
        await eventually_async(lambda: "MessagesDelivered" in names(found))
        lane.stop()
        await running
    assert [event[1:3] for event in found if isinstance(event, events.LeadershipChanged)] == [("dispatcher", True)]
    [delivered] = [event for event in found if isinstance(event, events.MessagesDelivered)]
    assert (delivered.taken, delivered.delivered, delivered.dead) == (2, 1, 1)


async def test_writers_and_executors_tell_what_they_did(node: Node) -> None:
    with heard(events.MessagesSent, events.ExecutablesExecuted) as found:
        with node.connection.transaction():
            Outbox().send(node.connection, "shipping", 1)
            Outbox().send_many(node.connection, [Outgoing("shipping", 2), Outgoing("billing", 3)])
            Store().put(node.connection, "key", b"value")
        await asyncio.to_thread(execute_all, node.dsn)
    assert [(list(event.topics), event.messages) for event in found[:2]] == [
        (["shipping"], 1),
        (["shipping", "billing"], 2),
    ]
    assert [event.taken for event in found[2:]] == [1]


def test_a_listener_that_fails_disturbs_nobody(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    deliver(node, "a", "b", "c")

    def fails(_: object) -> None:
        raise RuntimeError("a value of the message")

    end = events.subscribe(fails)
    try:
        with (
            caplog.at_level(logging.ERROR),
            heard(events.BatchEnded) as found,
            working(Worker(node.dsn, "shipping", write_ledger, poll_interval_s=NEVER_S)),
        ):
            eventually(lambda: len(ledger_keys(node)) == 3 and found)
    finally:
        end()
    lines = [record.getMessage() for record in caplog.records if record.name == "mailroom.events"]
    assert len(lines) == 1, lines
    assert "failed: RuntimeError in " in lines[0]
    assert "a value" not in caplog.text


def test_only_what_is_listened_to_is_heard_and_ending_it_ends_it() -> None:
    first: list[Any] = []
    second: list[Any] = []
    end_first = events.subscribe(first.append, events.MessagesSent)
    end_second = events.subscribe(second.append, events.MessagesSent, events.TriedAgain)
    sent = events.MessagesSent("mailroom", ["a"], 1)
    events.emit(sent)
    end_first()
    events.emit(sent)
    assert [kind for kind in events.KINDS if events.heard(kind)] == [events.MessagesSent, events.TriedAgain]
    end_second()
    end_second()  # a second time changes nothing
    assert (first, second) == ([sent], [sent, sent])
    assert not any(map(events.heard, events.KINDS))


async def coroutine(_: object) -> None:
    """A listener that nobody would await."""


def test_what_could_not_listen_is_refused() -> None:
    for wrong in (coroutine, 1):
        with pytest.raises(ConfigurationError, match="plain function"):
            events.subscribe(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not a kind of event"):
        events.subscribe(print, int)


def test_the_page_names_every_event_and_all_that_it_has() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == sorted(kind.__name__ for kind in events.KINDS)
    for name, fields in rows:
        assert re.findall(r"`(\w+)`", fields) == list(getattr(events, name)._fields), name
