"""Bounds: where the next batch ends, and whether both sides have had one past. Acknowledge: what is told, and when."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from dispatcher.delivery.deliver import DELIVERY_SESSION
from dispatcher.links.at_source.acknowledge import acknowledging, making_durable
from dispatcher.links.at_source.bounds import BOUNDS, POSITION, START, Bounds, Position, bounding
from dispatcher.links.at_source.fetch import FETCH
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run, run_in_transaction
from tests.support.explain import executed, nodes, pages, prepared
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    target.allow_clocks()
    return linked(source, target, ["#"])


def bounds(pair: Linked, position: Position, rows: int = 10, max_bytes: int = 2**25) -> Bounds:
    return run(pair.source.connection, bounding(SCHEMA, pair.link, position, rows=rows, max_bytes=max_bytes))


def at(pair: Linked, seq: int) -> Position:
    """Return the position of a reader that has received the rows up to seq."""
    row = pair.source.rows("SELECT message_id, stamped_at, sent_clock FROM mailroom.transit WHERE seq = %s", seq)
    return Position(seq, *row[0])


# -- How far ----------------------------------------------------------------------------------------------------------


def test_link_without_rows_agrees_with_a_reader_that_has_none(pair: Linked) -> None:
    assert bounds(pair, START) == Bounds(None, False, "agrees", 0, 0)


def test_batch_has_at_most_so_many_rows(pair: Linked) -> None:
    pair.put(*[{}] * 5)
    found = [bounds(pair, at(pair, 2), rows) for rows in (1, 2, 3, 4)]
    ends = [(3, True), (4, True), (5, True), (5, False)]
    assert found == [Bounds(last, more, "agrees", 0, 5) for last, more in ends]


def test_batch_has_at_most_so_many_bytes_and_at_least_one_row(pair: Linked) -> None:
    large = {"value": b"x" * 5_000}
    pair.put(large, {}, {}, large, {"kind": "H", "value": None}, {"value": b"x" * 20_000})
    assert [bounds(pair, START, max_bytes=size).last for size in (1, 5_300, 6_000, 11_000)] == [1, 2, 3, 5]
    assert bounds(pair, at(pair, 5), max_bytes=1) == Bounds(6, False, "agrees", 0, 6)


def test_what_is_stored_compressed_counts_as_it_crosses(pair: Linked) -> None:
    text = '{"user": "' + "x" * 8_000 + '"}'
    for column, value in (("value_json", None), ("headers", b"\xf6")):
        pair.source.connection.execute("DELETE FROM mailroom.transit")
        pair.put(*[{column: text, "value": value}] * 3)
        assert pair.source.value(f"SELECT max(pg_column_size({column})) FROM mailroom.transit") < 1_000
        assert bounds(pair, START, max_bytes=20_000).last == 2, column


def test_reader_that_has_all_agrees(pair: Linked) -> None:
    pair.put({}, {})
    assert bounds(pair, at(pair, 2)) == Bounds(None, False, "agrees", 0, 2)


def test_links_are_told_apart(pair: Linked) -> None:
    pair.put({}, {})
    other = pair.source.value("INSERT INTO mailroom.link (name) VALUES ('east') RETURNING number")
    assert run(pair.source.connection, bounding(SCHEMA, other, START)) == Bounds(None, False, "agrees", 0, 0)


# -- Whether both had one past ----------------------------------------------------------------------------------------


def test_source_with_another_row_in_that_place_has_diverged(pair: Linked) -> None:
    pair.put({}, {}, {})
    here = at(pair, 3)
    others = replace(here, last_id=uuid4()), replace(here, stamped_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert [bounds(pair, each) for each in others] == [Bounds(None, False, "diverged", 0, 3)] * 2
    pair.put({}, {})
    assert [bounds(pair, each) for each in others] == [Bounds(None, False, "diverged", 0, 5)] * 2


def test_source_behind_its_reader_has_diverged(pair: Linked) -> None:
    pair.put({}, {}, {})
    here = at(pair, 3)
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 3")
    assert bounds(pair, here) == Bounds(None, False, "diverged", 0, 2)
    pair.source.connection.execute("DELETE FROM mailroom.transit")
    assert bounds(pair, here) == Bounds(None, False, "diverged", 0, 0)


def test_reader_that_went_back_reads_again_what_is_not_trimmed(pair: Linked) -> None:
    pair.put(*[{}] * 6)
    here = at(pair, 2)
    pair.trim(2)
    assert bounds(pair, here) == Bounds(6, False, "agrees", 0, 6)
    pair.trim(3)
    assert bounds(pair, here) == Bounds(6, False, "agrees", 0, 6)


def test_reader_that_went_back_before_what_was_trimmed_finds_a_gap_and_its_size(pair: Linked) -> None:
    pair.put(*[{}] * 6)
    here = at(pair, 2)
    pair.trim(5)
    assert bounds(pair, here) == Bounds(None, False, "gap", 2, 6)
    assert bounds(pair, START) == Bounds(None, False, "gap", 4, 6)


def test_rows_that_are_missing_behind_the_position_are_a_gap(pair: Linked) -> None:
    pair.put(*[{}] * 4)
    pair.source.connection.execute("DELETE FROM mailroom.transit WHERE seq = 2")
    assert bounds(pair, at(pair, 1)) == Bounds(None, False, "gap", 1, 4)


# -- By index ---------------------------------------------------------------------------------------------------------


def explained(node: Node, sql: Sql, **values: object) -> list[dict[str, Any]]:
    """Run a statement as the daemon's session does, and return the nodes of its plan."""
    prepare, parameters = prepared(sql, {})
    given = [f"'{values[name]}'" if values.get(name) is not None else "NULL" for name in parameters]
    with node.connection.transaction(force_rollback=True):
        for name, value in DELIVERY_SESSION.items():
            node.connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        node.connection.execute(prepare.encode())
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {executed(given)}"
        [(plan,)] = node.connection.execute(explain.encode()).fetchall()
        node.connection.execute("DEALLOCATE hot")
    return list(nodes(plan[0]["Plan"]))


@pytest.mark.nightly
def test_probes_are_flat_above_what_was_trimmed_under_a_held_snapshot(pair: Linked) -> None:
    many = 100_000
    pair.put({})
    with (
        psycopg.connect(pair.source.dsn) as holder_at_source,
        psycopg.connect(pair.target.dsn) as holder_at_target,
    ):
        pair.source.connection.execute(
            "INSERT INTO mailroom.transit (link, seq, sent_clock, stamped_at, message_id, topic, key, kind, "
            "message_type, value, sent_at) SELECT %s, n, n, now(), gen_random_uuid(), 'order.paid', 'k', 'M', 'U', "
            "'\\xf6', now() FROM generate_series(2, %s) AS n",
            [pair.link, many],
        )
        pair.target.connection.execute(
            "INSERT INTO mailroom.receipt (origin, first, last, last_id, stamped_at, sent_clock, ids) "
            "SELECT %s, n, n, gen_random_uuid(), now(), n, '{}' FROM generate_series(1, %s) AS n",
            [pair.origin, many],
        )
        for holder in (holder_at_source, holder_at_target):
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM mailroom.node")
        here = at(pair, many - 10)
        pair.trim(many - 10)
        pair.target.connection.execute("DELETE FROM mailroom.receipt WHERE last < %s", [many])
        position = {"seq": here.seq, "last_id": here.last_id, "stamped_at": here.stamped_at}
        plans = {
            "bounds": explained(pair.source, BOUNDS, link=pair.link, rows=10_000, bytes=2**25, **position),
            "fetch": explained(pair.source, FETCH, link=pair.link, after=here.seq, to=many),
            "position": explained(pair.target, POSITION, origin=pair.origin),
        }
        assert bounds(pair, here, 100).last == many
    for name, plan in plans.items():
        scans = {each["Node Type"] for each in plan if each.get("Relation Name") in ("transit", "receipt")}
        assert scans <= {"Index Scan", "Index Only Scan"}, name
        assert scans, name
        assert pages(plan, "transit", "receipt") < 60, (name, pages(plan, "transit", "receipt"))


# -- Acknowledge ------------------------------------------------------------------------------------------------------


def acked(pair: Linked) -> Any:
    return pair.source.value("SELECT acked FROM mailroom.link WHERE number = %s", pair.link)


def told(pair: Linked, seq: int, run_id: Any = None) -> bool:
    return run(pair.source.connection, acknowledging(SCHEMA, pair.link, run_id or pair.run, seq))


def test_acknowledgement_is_the_run_s_and_may_fall(pair: Linked) -> None:
    assert told(pair, 7)
    assert told(pair, 5)
    assert acked(pair) == 5
    assert not told(pair, 9, uuid4())
    assert acked(pair) == 5


def test_acknowledgement_that_says_nothing_new_writes_nothing(pair: Linked) -> None:
    told(pair, 7)
    before = pair.source.rows("SELECT xmin::text, ctid::text FROM mailroom.link")
    assert told(pair, 7)
    assert pair.source.rows("SELECT xmin::text, ctid::text FROM mailroom.link") == before


async def test_what_is_made_durable_is_on_disk_though_its_own_commit_has_written_nothing(pair: Linked) -> None:
    """The source trims what is acknowledged: a crash of the target must not undo it any more."""
    pair.inbox("billing", "order.paid")
    pair.target.connection.execute("SET synchronous_commit = off")
    async with await psycopg.AsyncConnection.connect(pair.target.dsn, autocommit=True) as target:
        await target.execute("SET synchronous_commit = off")
        for _ in range(5):  # several, since PostgreSQL itself makes all durable five times a second
            pair.put({})
            pair.take()
            written = pair.target.value("SELECT pg_current_wal_insert_lsn()")
            await run_in_transaction(target, making_durable())
            assert pair.target.value("SELECT pg_current_wal_flush_lsn() >= %s::pg_lsn", written)
