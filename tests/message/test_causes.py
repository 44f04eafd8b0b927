"""Trace follows causes: where the messages are that one follows from, and those that follow from it."""

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest

from inbox import Message, Park
from mailroom import testing
from mailroom.errors import InvalidMessage
from mailroom.node.trace import Location, causes, effects, trace
from outbox import Outbox, Store
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.drivers import SYNC, opened
from tests.support.node import Node

OUTBOX, STORE = Outbox(), Store()


INBOXES = {"shop": "paid", "audit": "paid", "stock": "reserve", "ledger": "reserve", "mail": "reserved"}
pytestmark = [pytest.mark.inbox(inbox, topic) for inbox, topic in INBOXES.items()]


class Flow(NamedTuple):
    """What follows from `paid`: `reserve` and `increment`, and from `reserve` then `reserved`."""

    paid: UUID
    reserve: UUID
    increment: UUID
    reserved: UUID


def handled(node: Node, inbox: str, handler: Any) -> None:
    with node.connection.transaction():
        testing.work(node.connection, inbox, handler)


@pytest.fixture
def flow(node: Node) -> Flow:
    """A flow that `audit` and `ledger` have not followed yet."""
    ids = [node.send("paid", key="k")]

    def reserve(_message: Message, connection: Any) -> None:
        ids.append(OUTBOX.send(connection, "reserve", 1, key="k"))
        ids.append(STORE.increment(connection, "n"))

    handled(node, "shop", reserve)
    handled(node, "stock", lambda _, connection: ids.append(OUTBOX.send(connection, "reserved", 1, key="k")))
    node.deliver_all()
    return Flow(*ids)


def found(places: list[Location]) -> list[tuple[UUID, str | None, UUID | None]]:
    return [(place.id, place.inbox or place.where, place.causation) for place in places]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_causes_and_effects_are_followed_over_all_that_is_on_the_node(node: Node, flow: Flow, kind: str) -> None:
    reserve = (flow.reserve, "ledger", flow.paid)
    reserved = (flow.reserved, "mail", flow.reserve)
    with opened(node.dsn, kind) as connection:
        assert found(causes(connection, flow.reserved)) == [reserve, (flow.paid, "audit", None)]
        assert found(causes(connection, flow.paid)) == []
        assert found(effects(connection, flow.paid)) == [
            reserve, (flow.increment, "outbox_executable", flow.paid), reserved
        ]  # fmt: skip
        assert found(effects(connection, flow.reserve)) == [reserved]
        assert found(effects(connection, flow.reserved)) == []


def test_what_follows_from_a_message_that_is_gone_is_found_and_what_that_followed_from_is_not(
    node: Node, flow: Flow
) -> None:
    handled(node, "audit", lambda *_: None)
    handled(node, "ledger", lambda *_: None)
    assert found(effects(node.connection, flow.reserve)) == [(flow.reserved, "mail", flow.reserve)]
    assert found(effects(node.connection, flow.paid)) == [(flow.increment, "outbox_executable", flow.paid)]
    assert causes(node.connection, flow.reserved) == []


def test_effects_are_found_wherever_a_message_can_be(node: Node) -> None:
    cause = uuid4()
    headers = {"causation": str(cause)}

    def park(_message: Message, _connection: Any) -> None:
        raise Park("no such street")

    node.send("reserved", headers=headers)
    handled(node, "mail", park)
    node.send("nobody", headers=headers)
    node.send("paid", headers=headers, deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
    node.deliver_all()
    node.send("reserve", headers=headers)
    with node.connection.transaction():
        STORE.delete(node.connection, "k", headers=headers)
    places = effects(node.connection, cause)
    assert [place.where for place in places] == ["parked", "dead_letter", "scheduled", "outbox", "outbox_executable"]
    assert {(place.causation, place.ahead) for place in places} == {(cause, None)}
    [parked] = [place for place in places if place.where == "parked"]
    assert (parked.reason, parked.attempts) == ("no such street", 1)


def test_causes_in_a_circle_and_those_that_are_no_ids_end_the_search(node: Node) -> None:
    one, other, own, odd = (uuid4() for _ in range(4))
    for id, cause in ((one, other), (other, one), (own, own), (odd, "4711-secret")):
        node.send("paid", id=id, headers={"causation": str(cause)})
    for search in (causes, effects):
        assert [place.id for place in search(node.connection, one)] == [other]
        assert search(node.connection, own) == []
        assert search(node.connection, odd) == []
    [place] = trace(node.connection, odd)
    assert place.causation is None
    assert "4711-secret" not in done("trace", str(odd), dsn=node.dsn)


def test_effects_end_at_the_limit(node: Node, flow: Flow) -> None:
    for limit in (1, 2, 3):
        ids = [place.id for place in effects(node.connection, flow.paid, limit=limit)]
        assert ids == [flow.reserve, flow.increment, flow.reserved][:limit]
    with pytest.raises(InvalidMessage, match=r"limit must be .*, not 0"):
        effects(node.connection, flow.paid, limit=0)


def test_command_tells_causes_and_effects(node: Node, flow: Flow) -> None:
    lines = done("trace", str(flow.reserve), dsn=node.dsn).splitlines()
    assert [line.partition(" (topic")[0].partition(" with clock")[0] for line in lines] == [
        f"{flow.reserve} is in inbox ledger",
        f"It follows from {flow.paid}, which is in inbox audit",
        f"From it follows {flow.reserved}, which is in inbox mail",
    ]
    told = json_of("trace", str(flow.reserve), dsn=node.dsn)
    assert [[place["id"] for place in told[name]] for name in ("places", "causes", "effects")] == [
        [str(flow.reserve)], [str(flow.paid)], [str(flow.reserved)]
    ]  # fmt: skip
    assert told["effects"][0]["causation"] == str(flow.reserve)


def test_command_tells_what_follows_from_a_message_that_is_gone_and_fails_as_it_did(node: Node, flow: Flow) -> None:
    handled(node, "ledger", lambda *_: None)
    result = mailroom("trace", str(flow.reserve), dsn=node.dsn)
    assert "is nowhere in schema mailroom" in error_of(result)
    [line] = result.stdout.splitlines()
    assert line.startswith(f"From it follows {flow.reserved}, which is in inbox mail with clock ")
    told = json.loads(done("trace", str(flow.reserve), "--json", dsn=node.dsn, exit_code=1))
    assert (told["places"], len(told["effects"])) == ([], 1)
    assert f"It follows from {flow.reserve}, which is gone." in done("trace", str(flow.reserved), dsn=node.dsn)
