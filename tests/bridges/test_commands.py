"""Commands about a bridge into a node: a place is set as it was given, and nobody waits for a broker to be told."""

import pytest

from mailroom import Bridges, Links
from mailroom.bridges import BrokerPosition, InSettings
from mailroom.bridges.into import beginning, reading_ins
from mailroom.sql.runner import run
from tests.support.command import done
from tests.support.node import Node

pytestmark = pytest.mark.one_version


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
