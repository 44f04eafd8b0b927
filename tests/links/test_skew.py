"""Skew: the two sides of a link have other releases, with other versions of the columns, or another PostgreSQL."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest

from inbox import Inbox
from mailroom.errors import LinkRefused
from mailroom.links.handshake.hello import greeting
from mailroom.links.handshake.identity import WIRES, Pinned
from mailroom.links.handshake.target import introducing, reading_origins
from mailroom.links.handshake.wire import VERSION
from mailroom.links.start import noting_place
from mailroom.message.columns import MESSAGE
from mailroom.sql.runner import run
from tests.links.test_fetch import ROWS
from tests.support.databases import Databases
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node
from tests.support.postgres import available_majors

# -- Two versions of the columns --------------------------------------------------------------------------------------


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    """`target` has said no hello yet. The source is where it was noted."""
    target.allow_clocks()
    run(source.connection, noting_place(SCHEMA))
    pair = linked(source, target, ["#"])
    pair.inbox("billing", "order.paid")
    return pair


def greet(pair: Linked, wires: tuple[int, int]) -> None:
    """Say hello as a release that speaks these versions."""
    [origin] = run(pair.target.connection, reading_origins(SCHEMA))
    party = replace(run(pair.target.connection, introducing(SCHEMA, origin)), wires=wires)
    with pair.source.connection.transaction():
        run(pair.source.connection, greeting(SCHEMA, pair.name, party, Pinned(), uuid4()))


def test_this_release_speaks_the_version_whose_columns_it_has() -> None:
    assert WIRES[0] <= VERSION == WIRES[1]


def test_sides_without_a_common_version_say_which_one_to_upgrade(pair: Linked) -> None:
    pair.put({})
    before = pair.source.rows("SELECT link.* FROM mailroom.link")
    for wires, at_source, older in (
        ((2, 3), 1, "north"), ((2, 2), 1, "north"), ((1, 1), 2, "south"), ((1, 2), 3, "south"),
    ):  # fmt: skip
        pair.source.connection.execute("UPDATE mailroom.node SET wire = %s", [at_source])
        with pytest.raises(LinkRefused, match="speaks the link's columns up to version") as raised:
            greet(pair, wires)
        assert raised.value.at == older
        assert str(raised.value).endswith(f"at {older}: pip install --upgrade pg-mailroom, then mailroom migrate")
        assert pair.source.rows("SELECT link.* FROM mailroom.link") == before
    assert pair.target.rows("SELECT FROM mailroom.receipt") == []


def test_newer_reader_that_still_speaks_the_source_s_version_is_let_in(pair: Linked) -> None:
    pair.put(*ROWS)
    greet(pair, (1, 2))
    assert pair.take().rows == len(ROWS)
    assert_as_sent(pair)


# -- Two versions of PostgreSQL ---------------------------------------------------------------------------------------


@pytest.fixture
def majors() -> tuple[int, int]:
    """The oldest and the newest PostgreSQL of this machine."""
    majors = available_majors()
    if "MAILROOM_TEST_DSN" in os.environ or len(majors) < 2:
        pytest.skip("this needs servers of two major versions")
    return majors[-1], majors[0]


@pytest.fixture
def mixed(majors: tuple[int, int], _databases_of: Callable[[int | None], Databases]) -> Iterator[tuple[Linked, Linked]]:
    """Two nodes on servers of the two versions, which read each other; first the one whose source is the older."""
    with ExitStack() as closing:
        nodes = []
        for major in majors:
            databases = _databases_of(major)
            dsn = databases.create(migrated=True)
            closing.callback(databases.drop, dsn)
            nodes.append(Node(dsn, closing.enter_context(psycopg.connect(dsn, autocommit=True))))
            nodes[-1].allow_clocks()
        assert sorted(node.connection.info.server_version // 10_000 for node in nodes) == list(majors)
        older, newer = nodes
        yield linked(older, newer, ["#"]), linked(newer, older, ["#"], name="south", reader="north")


def assert_as_sent(pair: Linked) -> None:
    """Hold what stands in the inbox against what stood in transit, as text and to the byte."""
    sent, received = (
        node.rows(
            f"SELECT md5(t::text), t::text FROM (SELECT sent_clock, {MESSAGE} FROM mailroom.{table} "
            "ORDER BY sent_clock) AS t"
        )
        for node, table in ((pair.source, "transit"), (pair.target, "inbox"))
    )
    assert received == sent
    assert sent


@pytest.mark.slow
def test_every_column_crosses_between_two_versions_of_postgresql(mixed: tuple[Linked, Linked]) -> None:
    for pair in mixed:
        pair.inbox("billing", "order.paid")
        pair.put(*ROWS)
        assert pair.take(rows=4).rows == 4
        while pair.position().seq < len(ROWS):
            assert pair.take(rows=4).outcome == "taken"
        assert_as_sent(pair)


@pytest.mark.slow
def test_total_order_holds_between_two_versions_of_postgresql(mixed: tuple[Linked, Linked]) -> None:
    """What each of the nodes has stamped stands in one order, which is the same at both."""
    nodes = [pair.source for pair in mixed]
    for pair in mixed:
        pair.target.inbox("ledger", "sale", order="total", origin="*")
    for turn in range(6):
        for node in nodes if turn % 2 else reversed(nodes):
            node.send("sale", f"{turn} {node.value('SELECT name FROM mailroom.node')}", key=f"k{turn % 2}")
            node.deliver()
        for pair in mixed:
            assert pair.take().dead == 0
    orders = []
    for node in nodes:
        with node.connection.transaction():
            orders.append([(each.sent_clock, each.origin, each.value) for each in Inbox("ledger").reap_any(
                node.connection, 100, 1
            )])  # fmt: skip
    shorter, longer = sorted(orders, key=len)
    assert longer[: len(shorter)] == shorter == sorted(shorter)
    assert len(shorter) > 6
