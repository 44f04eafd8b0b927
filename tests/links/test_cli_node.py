"""`mailroom node new-id`, `moved` and `restored`: what only an operator can say of a node."""

from typing import Any

import psycopg
import pytest

from mailroom.errors import ConfigurationError
from mailroom.links.start import noting_place
from mailroom.node.identity import (
    advance_clock,
    advance_clock_async,
    new_node_id,
    new_node_id_async,
    node_moved,
    node_moved_async,
    node_restored,
    node_restored_async,
)
from mailroom.sql.runner import run
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.node import SCHEMA, Node

ELSEWHERE = "UPDATE mailroom.node SET database_oid = database_oid - 1"


@pytest.fixture(autouse=True)
def allowed(node: Node) -> None:
    """Let another node read this one."""
    with node.connection.transaction():
        run(node.connection, noting_place(SCHEMA))
        node.connection.execute("INSERT INTO mailroom.link (name) VALUES ('south')")


def changed(node: Node) -> Any:
    return node.rows("SELECT n, c.last_value FROM mailroom.node AS n, mailroom.clock AS c")


def test_copy_gets_a_new_id_and_is_told_what_it_loses(node: Node) -> None:
    node.connection.execute("INSERT INTO mailroom.bridge_out (link, settings) SELECT number, '{}' FROM mailroom.link")
    id = str(node.value("SELECT id FROM mailroom.node"))
    before = changed(node)
    lost = "1 link of readers with 0 messages for them, and 0 sources"
    assert done("node", "new-id", "--dry-run", dsn=node.dsn) == (
        f"The node would get another id than {id}, and lose {lost}.\n"
    )
    assert changed(node) == before
    told = done("node", "new-id", "--actor", "ada", "--why", "tests", dsn=node.dsn)
    assert (
        told == f"The node has the id {node.value('SELECT id FROM mailroom.node')} now; it was {id}. It lost {lost}.\n"
    )
    assert node.rows("SELECT actor, action, reason FROM mailroom.audit") == [("ada", "node new-id", "tests")]
    found = json_of("node", "new-id", dsn=node.dsn)
    assert (found["links"], found["id"]) == (0, str(node.value("SELECT id FROM mailroom.node")))
    assert node.rows("SELECT link FROM mailroom.bridge_out") == []


def test_node_that_was_moved_lets_readers_in_again(node: Node) -> None:
    assert done("node", "moved", dsn=node.dsn) == "The node is where it was, or has no links.\n"
    node.connection.execute(ELSEWHERE)
    before = changed(node)
    assert done("node", "moved", "--dry-run", dsn=node.dsn) == (
        "Readers would be let in here. Each compares what it has with this node.\n"
    )
    assert changed(node) == before
    assert json_of("node", "moved", dsn=node.dsn) == {"schema": "mailroom", "moved": True, "dry_run": False}
    assert json_of("node", "moved", dsn=node.dsn)["moved"] is False


def test_restored_node_goes_on_as_another_incarnation(node: Node) -> None:
    before = changed(node)
    assert done("node", "restored", "--above", "3", "--dry-run", dsn=node.dsn) == (
        "The node would go on as incarnation 4.\n"
    )
    assert changed(node) == before
    assert done("node", "restored", "--actor", "ada", "--why", "snapshot", dsn=node.dsn) == (
        "The node goes on as incarnation 2.\n"
    )
    assert json_of("node", "restored", "--above", "7", dsn=node.dsn)["incarnation"] == 8
    node.connection.execute(ELSEWHERE)
    assert "mailroom node moved" in error_of(mailroom("node", "restored", dsn=node.dsn))


def test_node_is_let_follow_one_that_is_far_ahead(node: Node) -> None:
    node.connection.execute("SELECT setval('mailroom.clock', 7)")
    before = changed(node)
    assert done("node", "advance", f"{2**60}", "--dry-run", dsn=node.dsn) == (
        f"The clock would go on after {2**60}; it was at 7.\n"
    )
    assert changed(node) == before
    assert done("node", "advance", f"{2**60}", "--actor", "ada", "--why", "follows lyon", dsn=node.dsn) == (
        f"The clock goes on after {2**60}; it was at 7.\n"
    )
    assert node.rows("SELECT last_value, clock_ceiling, advanced FROM mailroom.clock, mailroom.node") == [(2**60,) * 3]
    assert node.rows("SELECT actor, action, change, reason FROM mailroom.audit") == [
        ("ada", "node advance", f"7 -> {2**60}", "follows lyon")
    ]
    node.inbox("shipping", "order.paid")
    node.send("order.paid", after_clock=2**60 + 2**32)
    node.deliver_all()
    assert node.value("SELECT clock FROM mailroom.inbox_shipping") > 2**60
    assert json_of("node", "advance", "9", dsn=node.dsn)["clock"] > 2**60
    assert node.value("SELECT last_value FROM mailroom.clock") > 2**60
    assert "is not in the range" in error_of(mailroom("node", "advance", f"{2**63}", dsn=node.dsn))
    with node.connection.transaction(), pytest.raises(ConfigurationError, match="clock must be an int from 0 to"):
        advance_clock(node.connection, 2**63 - 1, actor="ada")


async def test_same_is_there_for_programs_on_both_kinds_of_connection(node: Node) -> None:
    async with await psycopg.AsyncConnection.connect(node.dsn) as connection:
        assert await node_restored_async(connection, actor="ada") == 2
        before = await advance_clock_async(connection, 2**60, actor="ada")
        assert not await node_moved_async(connection, actor="ada")
        assert (await new_node_id_async(connection, actor="ada", dry_run=True)).links == 1
    with psycopg.connect(node.dsn) as connection:
        assert node_restored(connection, actor="ada") == 3
        assert before < 2**60 < advance_clock(connection, 2**60, actor="ada")
        assert not node_moved(connection, actor="ada")
        assert new_node_id(connection, actor="ada").links == 1
