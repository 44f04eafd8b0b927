"""Plans of a link's statements: by index, and flat above what was trimmed while a snapshot is held, on both sides."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from dispatcher.delivery.deliver import DELIVER_FULL
from dispatcher.delivery.deliver import DELIVERY_SESSION as DELIVERY
from dispatcher.links.at_source.bounds import BOUNDS, POSITION, Position
from dispatcher.links.at_source.fetch import FETCH
from dispatcher.links.receive import RECEIVE
from dispatcher.links.receive import RECEIVING_SESSION as RECEIVING
from mailroom.links.handshake.wire import WIRE_COLUMNS
from mailroom.links.marks import ASK, MARK, NEXT, WANTS
from mailroom.order.total import LOWEST, RAISE
from mailroom.sql.operation import Sql
from tests.support.explain import executed, nodes, pages, prepared
from tests.support.links import Linked, linked
from tests.support.node import Node

pytestmark = pytest.mark.both_versions

GROW = ("transit", "receipt", "stable")
ROWS = 10  # behind the position
# Pages that the probes meet more: the index is a level higher, and its last pages are not full. One that walks what was
# trimmed reads hundreds.
MORE_PAGES = 50


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    """`target` reads `source`, for an inbox by key and one in total order."""
    for node in (source, target):
        node.allow_clocks(2**60)
    pair = linked(source, target, ["#"])
    pair.inbox("billing", "order.paid")
    pair.inbox("ledger", "order.paid", order="total")
    return pair


def fill(pair: Linked, number: int) -> Position:
    """Put rows there as if all but the last were received; return the position."""
    first = pair.source.value("SELECT coalesce(max(seq), 0) + 1 FROM mailroom.transit")
    last = first + number - 1
    pair.source.connection.execute(
        "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, message_type, "
        "value, sent_at) SELECT %s, n, n, now(), gen_random_uuid(), 'order.paid', 'k', 'M', 'U', '\\xf6', now() "
        "FROM generate_series(%s::bigint, %s::bigint) AS n",
        [pair.link, first, last],
    )
    here = Position(last - ROWS, *pair.source.rows(
        "SELECT message_id, stamped_at, sent_clock FROM mailroom.transit WHERE seq = %s", last - ROWS
    )[0])  # fmt: skip
    pair.target.connection.execute(
        "INSERT INTO mailroom.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids) "
        "SELECT %s, n, n, CASE WHEN n = %s THEN %s::uuid ELSE gen_random_uuid() END, %s, n, '{}' "
        "FROM generate_series(%s::bigint, %s::bigint) AS n",
        [pair.origin, here.seq, here.last_id, here.stamped_at, first, here.seq],
    )
    pair.target.connection.execute(
        "INSERT INTO mailroom.stable SELECT 'ledger', n FROM generate_series(%s::bigint, %s::bigint) AS n",
        [first, here.seq - 1],
    )
    return here


def trim(pair: Linked, position: Position) -> None:
    """Delete what is below the position, on both sides."""
    pair.trim(position.seq)
    pair.target.connection.execute("DELETE FROM mailroom.receipt WHERE last < %s", [position.seq])
    pair.target.connection.execute("DELETE FROM mailroom.stable WHERE clock < %s", [position.seq - 1])


@contextmanager
def held(*nodes: Node) -> Iterator[None]:
    """Hold a snapshot of each of these nodes, so that nothing which is deleted goes."""
    with ExitStack() as stack:
        for node in nodes:
            holder = stack.enter_context(psycopg.connect(node.dsn))
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM mailroom.node")
        yield


def explained(node: Node, sql: Sql, session: Mapping[str, str], **values: object) -> list[dict[str, Any]]:
    """Run a statement as the daemon's session does, undo it, and return the nodes of its plan."""
    prepare, parameters = prepared(sql, {})
    given = ["NULL" if values.get(name) is None else f"'{values[name]}'" for name in parameters]
    with node.connection.transaction(force_rollback=True):
        for name, value in session.items():
            node.connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        node.connection.execute(prepare.encode())
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {executed(given)}"
        [(plan,)] = node.connection.execute(explain.encode()).fetchall()
        node.connection.execute("DEALLOCATE hot")
    return list(nodes(plan[0]["Plan"]))


def plans(pair: Linked, here: Position) -> dict[str, list[dict[str, Any]]]:
    """Return the plan of each statement of the link that looks into what grows; nothing of it stays."""
    to, source, target = here.seq + ROWS, pair.source, pair.target
    arrays = ", ".join(
        f"array_agg({sent.format(c=name)} ORDER BY seq)::text" for name, (_, sent, _) in WIRE_COLUMNS.items()
    )
    [row] = source.rows(f"SELECT {arrays} FROM mailroom.transit WHERE seq > %s", here.seq)
    batch = dict(zip(WIRE_COLUMNS, row, strict=True))
    at = {"at_seq": here.seq, "at_id": here.last_id, "at_time": here.stamped_at}
    witness = {"seq": here.seq, "last_id": here.last_id, "stamped_at": here.stamped_at}
    source.connection.execute("SELECT setval('mailroom.clock', %s)", [to])
    source.send("order.paid")
    found = {
        "deliver": explained(source, DELIVER_FULL, DELIVERY, start=0, gaps="{}", writers="{}", rows=10, bytes=2**20),
        "bounds": explained(source, BOUNDS, DELIVERY, link=pair.link, rows=10_000, bytes=2**25, **witness),
        "fetch": explained(source, FETCH, DELIVERY, link=pair.link, after=here.seq, to=to),
        "ask": explained(source, ASK, DELIVERY, link=pair.link, run=pair.run, clock=to + 1),
        "position": explained(target, POSITION, DELIVERY, origin=pair.origin),
        "receive": explained(target, RECEIVE, RECEIVING, **batch, **at, origin=pair.origin, rows=ROWS, reasons="{}"),
        "raise": explained(target, RAISE, RECEIVING),
        "wants": explained(target, WANTS, DELIVERY),
        "lowest": explained(target, LOWEST, DELIVERY),
    }
    source.connection.execute("UPDATE mailroom.link SET wanted_clock = %s", [to + 1])
    found |= {
        "next": explained(source, NEXT, DELIVERY),
        "mark": explained(source, MARK, DELIVERY, clock=to + 1),
    }
    source.connection.execute("UPDATE mailroom.link SET wanted_clock = 0")
    source.connection.execute("DELETE FROM mailroom.outbox")
    return found


def scans(plan: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return how a plan reads the tables that grow."""
    return {
        (each["Relation Name"], each["Node Type"])
        for each in plan
        if each.get("Relation Name") in GROW and each["Node Type"] != "ModifyTable"
    }


# What each statement probes, whatever is there.
READS = {
    "deliver": {"transit"}, "bounds": {"transit"}, "fetch": {"transit"}, "ask": {"transit"}, "next": {"transit"},
    "mark": {"transit"}, "position": {"receipt"}, "receive": {"receipt", "stable"}, "raise": {"receipt", "stable"},
    "wants": {"receipt", "stable"}, "lowest": {"receipt", "stable"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "trimmed", [30_000, pytest.param(200_000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_statements_of_a_link_are_flat_above_what_was_trimmed_under_a_held_snapshot(pair: Linked, trimmed: int) -> None:
    few = plans(pair, fill(pair, 2 * ROWS))
    here = fill(pair, trimmed)
    for node in (pair.source, pair.target):
        node.connection.execute("ANALYZE")
    with held(pair.source, pair.target):
        trim(pair, here)
        for node in (pair.source, pair.target):
            node.connection.execute("VACUUM mailroom.transit, mailroom.receipt, mailroom.stable")
        many = plans(pair, here)
    for name, reads in READS.items():
        assert {table for table, _ in scans(many[name])} == reads, name
        assert {kind for _, kind in scans(many[name])} <= {"Index Scan", "Index Only Scan"}, name
        met, usual = pages(many[name], *reads), pages(few[name], *reads)
        assert met <= usual + MORE_PAGES, (name, usual, met)
    assert set(READS) == set(many)
