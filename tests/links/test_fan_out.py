"""Fan out of what was received: inboxes by key get theirs a few at a time, and one in total order at once."""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from dispatcher.links.receive import RECEIVING_SESSION, receiving
from dispatcher.links.receiver import Receiver
from inbox import Inbox
from mailroom.sql.runner import run
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

FEW = 3
NAMES = [f"i{nth}" for nth in range(7)]


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    target.allow_clocks()
    pair = linked(source, target, ["#"])
    for name in NAMES:
        pair.inbox(name, "order.paid")
    pair.inbox("ledger", "order.paid", order="total")
    return pair


@pytest.fixture
async def lane(target: Node) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(target.dsn, autocommit=True) as connection:
        for name, value in RECEIVING_SESSION.items():
            await connection.execute(f"SET {name} = '{value}'".encode())
        yield connection


def has(pair: Linked) -> dict[str, list[Any]]:
    return {
        name: pair.target.rows(f"SELECT clock, sent_clock, key FROM mailroom.inbox_{name} ORDER BY clock")
        for name in (*NAMES, "ledger")
    }


async def test_batch_for_many_inboxes_gets_into_all_of_them_in_order(
    pair: Linked, lane: psycopg.AsyncConnection
) -> None:
    pair.put(*({"sent_clock": clock} for clock in (10, 20, 30)))
    position = pair.position()
    reception = await Receiver(lane, SCHEMA, partitions=FEW).receive(pair.origin, pair.batch(position), position)
    assert (reception.outcome, reception.rows, reception.delivered) == ("taken", 3, 24)
    assert sorted(reception.inboxes) == [*NAMES, "ledger"]
    found = has(pair)
    assert [sent for _, sent, _ in found["ledger"]] == [10, 20, 30]
    assert found == dict.fromkeys(found, found["ledger"])
    assert pair.target.rows("SELECT FROM mailroom.fan_out") == []
    with psycopg.connect(pair.target.dsn) as reaping:
        assert [each.sent_clock for each in Inbox("ledger").reap_any(reaping)] == [10, 20, 30]


@pytest.mark.slow
async def test_what_a_crash_has_left_comes_before_the_next_batch(pair: Linked, lane: psycopg.AsyncConnection) -> None:
    pair.put({"sent_clock": 10})
    position = pair.position()
    with pair.target.connection.transaction():
        left = run(
            pair.target.connection,
            receiving(SCHEMA, pair.origin, pair.batch(position), position, most=1, partitions=FEW, reasons=[]),
        )
    assert (left.outcome, left.waits, left.delivered) == ("taken", True, 1)
    assert pair.target.rows("SELECT FROM mailroom.stable WHERE clock >= 10") == []
    pair.put({"sent_clock": 20})
    position = pair.position()
    with pair.target.connection.transaction():
        waits = run(
            pair.target.connection,
            receiving(SCHEMA, pair.origin, pair.batch(position), position, most=1, partitions=FEW, reasons=[]),
        )
    assert (waits.outcome, waits.rows) == ("waits", 0)
    await Receiver(lane, SCHEMA, partitions=FEW).receive(pair.origin, pair.batch(position), position)
    found = has(pair)
    assert [sent for _, sent, _ in found["ledger"]] == [10, 20]
    assert found == dict.fromkeys(found, found["ledger"])
