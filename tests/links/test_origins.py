"""Subscriptions to other nodes' messages, and the node's own name."""

from typing import Any

import pytest

from dispatcher.delivery.deliver import delivering
from mailroom import create_inbox, subscribe, subscribe_async, unsubscribe, unsubscribe_async
from mailroom.errors import InvalidMessage, InvalidName
from mailroom.node.identity import rename_node, rename_node_async
from mailroom.sql.runner import run
from tests.support.command import done, error_of, json_of, mailroom
from tests.support.drivers import ASYNC, SYNC, opened, opened_async
from tests.support.node import SCHEMA, Node


def subscriptions(node: Node) -> list[Any]:
    return node.rows("SELECT topic, inbox, origin FROM mailroom.subscription ORDER BY 1, 2, 3")


# -- Subscriptions ----------------------------------------------------------------------------------------------------


def test_subscriptions_to_this_node_to_another_and_to_all_stand_side_by_side(node: Node) -> None:
    node.inbox("billing")
    with node.connection.transaction():
        assert subscribe(node.connection, "billing", ["a", "b.*"]) == ["a", "b.*"]
        assert subscribe(node.connection, "billing", ["a", "b.*"], origin="lyon") == ["a", "b.*"]
        assert subscribe(node.connection, "billing", "a", origin="*") == ["a"]
        assert subscribe(node.connection, "billing", ["a", "c"], origin="lyon") == ["c"]
    assert [origin for topic, _, origin in subscriptions(node) if topic == "a"] == ["", "*", "lyon"]
    with node.connection.transaction():
        assert unsubscribe(node.connection, "billing", ["a", "d"], origin="lyon") == ["a"]
        assert unsubscribe(node.connection, "billing", "b.*") == ["b.*"]
    assert subscriptions(node) == [
        ("a", "billing", ""), ("a", "billing", "*"), ("b.*", "billing", "lyon"), ("c", "billing", "lyon"),
    ]  # fmt: skip


def test_message_of_this_node_goes_to_those_that_want_its_own(node: Node) -> None:
    with node.connection.transaction():
        for name, topic in (("one", "order.paid"), ("all", "order.*")):
            create_inbox(node.connection, name, topic, origin="lyon")
    node.send("order.paid", kind="E")
    assert node.deliver_all().unrouted == 1
    for origin in ("", "*"):
        node.connection.execute("UPDATE mailroom.subscription SET origin = %s", [origin])
        node.send("order.paid", kind="E")
        totals = node.deliver_all()
        assert (totals.delivered, totals.unrouted) == (2, 0), origin


def test_topic_wanted_of_this_node_and_of_all_comes_once(node: Node) -> None:
    node.inbox("billing", "order.paid", "order.*")
    with node.connection.transaction():
        subscribe(node.connection, "billing", ["order.paid", "order.*"], origin="*")
        node.allow_clocks()
    node.send("order.paid")
    with node.connection.transaction():
        assert run(node.connection, delivering(SCHEMA, rows=10, max_bytes=1_000)).delivered == 1


def test_origin_that_is_no_name_is_refused(node: Node) -> None:
    node.inbox("billing")
    wrong: list[Any] = ["1st", "a b", "a" * 64, "**", "-", "é", None, 7, "a\n"]
    for origin in wrong:
        with pytest.raises(InvalidName, match="Node name"), node.connection.transaction():
            subscribe(node.connection, "billing", "a", origin=origin)
        with pytest.raises(InvalidName, match="Node name"), node.connection.transaction():
            create_inbox(node.connection, "more", "a", origin=origin)
    assert subscriptions(node) == []


def test_names_that_python_takes_are_those_that_the_table_takes(node: Node) -> None:
    node.inbox("billing")
    for origin in ("a", "Z9", "north.example-1_x", "a" * 63):
        with node.connection.transaction():
            subscribe(node.connection, "billing", "a", origin=origin)
        node.connection.execute("INSERT INTO mailroom.link (name) VALUES (%s)", [origin])
        node.connection.execute("INSERT INTO mailroom.origin (name) VALUES (%s)", [origin])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SYNC)
def test_every_connection_subscribes_to_another_node(dsn: str, node: Node, kind: str) -> None:
    with opened(dsn, kind) as connection:
        create_inbox(connection, "billing", "a", origin="lyon")
        assert subscribe(connection, "billing", ["a", "b"], origin="lyon") == ["b"]
        assert unsubscribe(connection, "billing", "a", origin="lyon") == ["a"]
        assert rename_node(connection, "north", actor="tests") != "north"
        connection.commit()
    assert subscriptions(node) == [("b", "billing", "lyon")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ASYNC)
async def test_every_async_connection_subscribes_to_another_node(dsn: str, node: Node, kind: str) -> None:
    node.inbox("billing")
    async with opened_async(dsn, kind) as connection:
        assert await subscribe_async(connection, "billing", ["a", "b"], origin="*") == ["a", "b"]
        assert await unsubscribe_async(connection, "billing", "a", origin="*") == ["a"]
        assert await rename_node_async(connection, "north", actor="tests") != "north"
        await connection.commit()
    assert subscriptions(node) == [("b", "billing", "*")]


# -- By command -------------------------------------------------------------------------------------------------------


def test_commands_subscribe_to_another_node(node: Node) -> None:
    said = mailroom("inbox", "create", "billing", "--subscribe", "a", "--origin", "lyon", dsn=node.dsn)
    assert "Inbox billing exists, subscribed to a of lyon.\n" in said.stdout
    assert said.stderr == (
        "This node does not read lyon yet. To read it: mailroom link add lyon, or mailroom bridge in lyon if it is to "
        "be a bridge\n"
    )
    node.connection.execute("INSERT INTO mailroom.origin (name) VALUES ('lyon')")
    said = mailroom("inbox", "subscribe", "billing", "b.*", "a", "--origin", "lyon", "--no-wait", dsn=node.dsn)
    assert said.stdout == "Inbox billing has subscribed to b.* of lyon.\n"
    assert said.stderr.splitlines()[-1] == "It had subscribed before to a of lyon."
    assert done("inbox", "subscribe", "billing", "c", "--origin", "*", "--no-wait", dsn=node.dsn) == (
        "Inbox billing has subscribed to c of every node.\n"
    )
    done("inbox", "subscribe", "billing", "own", dsn=node.dsn)
    [listed] = json_of("inbox", "list", dsn=node.dsn)
    assert (listed["topics"], listed["topics_of"]) == (["own"], {"*": ["c"], "lyon": ["a", "b.*"]})
    text = done("inbox", "list", dsn=node.dsn)
    for words in ("own", "c of every node", "a of lyon", "b.* of lyon"):
        assert words in text
    said = mailroom("inbox", "unsubscribe", "billing", "a", "own", "--origin", "lyon", dsn=node.dsn)
    assert said.stdout == "Inbox billing no longer subscribes to a of lyon.\n"
    assert said.stderr == "It does not subscribe to own of lyon; mailroom inbox list shows to what.\n"
    assert json_of("inbox", "unsubscribe", "billing", "c", "--origin", "*", dsn=node.dsn) == {
        "inbox": "billing", "schema": "mailroom", "unsubscribed": ["c"], "origin": "*",
    }  # fmt: skip


def test_commands_refuse_what_cannot_be_an_origin(node: Node) -> None:
    wrong = mailroom("inbox", "create", "billing", "--subscribe", "a", "--origin", "1st", dsn=node.dsn)
    assert "Node name '1st' is not valid: use a letter" in error_of(wrong)
    useless = mailroom("inbox", "create", "billing", "--origin", "lyon", dsn=node.dsn)
    assert "--origin says whose messages to subscribe to: give --subscribe too." in error_of(useless)
    assert {wrong.exit_code, useless.exit_code} == {2}


# -- The node's name --------------------------------------------------------------------------------------------------


def audit(node: Node) -> list[Any]:
    return node.rows("SELECT actor, action, change, reason FROM mailroom.audit ORDER BY id")


def test_node_is_renamed_and_the_audit_says_by_whom_and_why(node: Node) -> None:
    first = node.value("SELECT name FROM mailroom.node")
    with node.connection.transaction():
        assert rename_node(node.connection, "lyon", actor="ada", why="as its site") == first
        assert rename_node(node.connection, "lyon", actor="ada") == "lyon"
    assert node.value("SELECT name FROM mailroom.node") == "lyon"
    assert audit(node) == [("ada", "node rename", f"{first} -> lyon", "as its site")]


def test_node_takes_no_name_that_a_link_could_not_have(node: Node) -> None:
    for name in ("", "*", "1st", "a b"):
        with pytest.raises(InvalidName, match="Node name"), node.connection.transaction():
            rename_node(node.connection, name, actor="ada")
    with pytest.raises(InvalidMessage, match="actor"), node.connection.transaction():
        rename_node(node.connection, "lyon", actor=" ")
    assert audit(node) == []


def test_command_renames_the_node(node: Node) -> None:
    first = node.value("SELECT name FROM mailroom.node")
    rename = ("node", "rename", "lyon")
    assert done(*rename, "--dry-run", dsn=node.dsn) == f"The node would be called lyon; it was called {first}.\n"
    assert (node.value("SELECT name FROM mailroom.node"), audit(node)) == (first, [])
    assert done(*rename, "--actor", "ada", "--why", "its site", dsn=node.dsn) == (
        f"The node is called lyon; it was called {first}.\n"
    )
    assert audit(node) == [("ada", "node rename", f"{first} -> lyon", "its site")]
    assert done(*rename, dsn=node.dsn) == "The node is called lyon already.\n"
    assert json_of(*rename, dsn=node.dsn) == {
        "schema": "mailroom", "before": "lyon", "name": "lyon", "dry_run": False,
    }  # fmt: skip
    assert len(audit(node)) == 1
