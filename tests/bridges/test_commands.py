"""Commands about bridges: a place is set as it was given, and hints speak of bridges where the user has one."""

import logging

import pytest

from dispatcher.housekeeping.trim import Trim
from mailroom import Bridges, Links
from mailroom.bridges import BrokerPosition, InSettings, OutSettings
from mailroom.bridges.into import beginning, reading_ins
from mailroom.sql.runner import run
from outbox import Outbox, Outgoing
from tests.support.command import done, error_of, mailroom
from tests.support.node import Node


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
