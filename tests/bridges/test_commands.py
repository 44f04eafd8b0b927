"""Commands about bridges: a place is set as it was given, and hints speak of bridges where the user has one."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dispatcher.housekeeping.trim import Trim
from mailroom import AsyncBridges, Bridges, Links
from mailroom.bridges import BrokerPosition, InSettings, OutSettings
from mailroom.bridges.into import beginning, reading_ins
from mailroom.errors import ConfigurationError
from mailroom.sql.runner import run
from outbox import Outbox, Outgoing
from tests.support.command import done, error_of, mailroom
from tests.support.databases import Connect
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, wait_until_blocked


@pytest.fixture
def bridged(node: Node) -> Node:
    """A node with a bridge from a broker that nobody asks."""
    with node.connection.transaction():
        Bridges().into(node.connection, "stock", InSettings("kafka", "localhost:1", ("stock.levels",)), actor="test")
    return node


def test_bridge_goes_on_at_the_place_that_was_given(bridged: Node) -> None:
    with bridged.connection.transaction():
        [row] = run(bridged.connection, reading_ins("mailroom"))
        run(bridged.connection, beginning("mailroom", row.origin, [BrokerPosition("stock.levels", 0, 7)]))
    done("bridge", "resume", "stock", "--at", "stock.levels/0=150", "--why", "deleted there", dsn=bridged.dsn)
    [state] = Bridges().status(bridged.connection).into
    assert state.positions == (BrokerPosition("stock.levels", 0, 150),)


def test_subscription_to_a_bridge_counts_without_a_dispatcher(bridged: Node) -> None:
    done("inbox", "create", "reorder", "--subscribe", "stock.levels", "--origin", "stock", dsn=bridged.dsn)
    Links().wait(bridged.connection, "reorder", origin="stock", timeout_s=0)


def test_subscription_to_a_bridge_speaks_of_no_link(bridged: Node) -> None:
    bridged.inbox("reorder")
    told = mailroom("inbox", "subscribe", "reorder", "stock.levels", "--origin", "stock", "--no-wait", dsn=bridged.dsn)
    assert told.exit_code == 0
    assert "link" not in told.output
    told = mailroom("inbox", "subscribe", "reorder", "prices", "--origin", "prices", "--no-wait", dsn=bridged.dsn)
    assert "mailroom link add prices, or mailroom bridge in prices" in told.stderr.replace("\n", " ")


def test_commands_of_links_leave_bridges_alone_and_say_which_command_is_meant(bridged: Node) -> None:
    with bridged.connection.transaction():
        Bridges().out(bridged.connection, "orders", OutSettings("kafka", "localhost:1"), actor="test")
    for name in ("orders", "stock"):
        for act, see in {
            "cut": f"bridge cut {name}", "remove": f"bridge remove {name}", "resume": f"bridge resume {name}",
            "moved": "bridge status", "report": "bridge status",
        }.items():  # fmt: skip
            told = error_of(mailroom("link", act, name, dsn=bridged.dsn))
            assert told.startswith(f"{name} is a bridge to a broker, and no link to a node. See: mailroom {see}")
    told = error_of(mailroom("link", "remove", "stock", "--source", dsn=bridged.dsn))
    assert told.startswith("stock is a bridge to a broker")
    states = Bridges().status(bridged.connection)
    assert [states.out[0].state, states.into[0].state] == ["open", "open"]


def test_bridge_that_is_cut_for_too_many_rows_is_no_link_in_the_log(
    bridged: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with bridged.connection.transaction():
        Bridges().out(bridged.connection, "orders", OutSettings("kafka", "localhost:1"), max_rows=2, actor="test")
        Outbox().send_many(bridged.connection, [Outgoing("order.paid", n) for n in range(3)])
    bridged.deliver_all()
    trim = Trim("mailroom")
    with bridged.connection.transaction(), caplog.at_level(logging.ERROR):
        [link] = run(bridged.connection, trim.listing_links())
        assert run(bridged.connection, trim.cutting_full(link))
    assert "the bridge to orders is cut: more than 2 rows waited for it. To publish again" in caplog.text
    assert "mailroom bridge remove orders, then mailroom bridge out orders" in caplog.text
    acts = [act for (act,) in bridged.rows("SELECT action FROM mailroom.audit WHERE action LIKE '%%cut'")]
    assert acts == ["bridge cut"]


def test_bridge_that_two_sessions_make_at_once_is_made_once(node: Node, connect: Connect) -> None:
    def out(connection: psycopg.Connection[Any], address: str) -> bool:
        return Bridges().out(connection, "orders", OutSettings("kafka", address), actor="test")

    def into(connection: psycopg.Connection[Any], address: str) -> bool:
        return Bridges().into(connection, "stock", InSettings("kafka", address, ("a",)), actor="test")

    def trying(make: Callable[[psycopg.Connection[Any], str], bool], session: psycopg.Connection[Any], at: str) -> bool:
        with session.transaction():
            return make(session, at)

    for make in (out, into):
        first, second, third = connect(), connect(), connect()
        assert make(first, "h:1")
        with ThreadPoolExecutor(2) as threads:
            same, other = threads.submit(trying, make, second, "h:1"), threads.submit(trying, make, third, "h:2")
            for each in (second, third):
                wait_until_blocked(node.connection, each.info.backend_pid)
            first.commit()
            assert same.result(WITHIN_S) is False
            with pytest.raises(ConfigurationError, match="stays as it is: address h:1 -> h:2"):
                other.result(WITHIN_S)
    assert node.rows("SELECT action FROM mailroom.audit ORDER BY id") == [("bridge out",), ("bridge in",)]


async def test_what_a_bridge_out_has_as_a_link_is_set_without_the_package_of_its_broker(bridged: Node) -> None:
    with bridged.connection.transaction():
        Bridges().out(bridged.connection, "orders", OutSettings("kafka", "localhost:1"), actor="test")
    bridged.connection.execute('UPDATE mailroom.bridge_out SET settings = settings || \'{"broker": "gone"}\'')
    async with await psycopg.AsyncConnection.connect(bridged.dsn) as connection:
        change = await AsyncBridges().set(connection, "orders", actor="ada", max_rows=9, keep_s=60, topics=["a"])
        assert change == "keep_s 0 -> 60, max_rows none -> 9, topics # -> a"
        with pytest.raises(ConfigurationError, match="'gone' is not a broker"):
            await AsyncBridges().set(connection, "orders", actor="ada", max_rows=8, on_failure="skip")
        assert await AsyncBridges().set(connection, "stock", actor="ada", max_origins=1) == "max_origins 1000 -> 1"
    assert Bridges().status(bridged.connection).out[0].max_rows == 9
