"""Plans: what an empty, just analyzed database makes of the hot statements must serve a full one too."""

from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from inbox import Inbox
from inbox.by_key.claim import PIN, PINNED, Share
from inbox.by_key.entries import BY_ROW
from inbox.worker.in_flight import TAKE_OVER
from mailroom import create_inbox, create_log
from mailroom.logs.segments import making_segment
from mailroom.node.trace import TRACE
from mailroom.sql.operation import Sql
from mailroom.sql.runner import run
from outbox import Outbox, Outgoing
from tests.support.databases import Connect
from tests.support.explain import executed, main, nodes, prepared
from tests.support.hot import HOT
from tests.support.node import Node, failing
from tests.support.working import deliver

pytestmark = pytest.mark.both_versions

# The others read what is small, or no more of it than asked.
READ_LARGE_TABLES = (
    "insert",
    "reap-key",
    "reap-key-again",
    "reap-plain",
    "reap-plain-of-one",
    "reap-any",
    "reap-any-of-one",
    "deliver-one",
    "deliver-plain",
    "deliver",
    "look",
    "in-flight-entry",
)
WRITE_NO_LARGE_TABLE = ("reap-key-again", "in-flight-entry", "look")


def generic_plan(connection: psycopg.Connection[Any], statement: Sql, names: Mapping[str, str]) -> list[dict[str, Any]]:
    prepare, parameters = prepared(statement, names)
    connection.execute(prepare.encode())
    connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    row = connection.execute(f"EXPLAIN (FORMAT json) {executed(['NULL'] * len(parameters))}".encode()).fetchone()
    assert row is not None
    return list(nodes(row[0][0]["Plan"]))


def test_hot_statements_read_large_tables_by_their_indexes_only(connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping")
    with connect(autocommit=True) as connection:
        connection.execute("ANALYZE")
    for name in READ_LARGE_TABLES:
        with connect() as connection:
            reads_by_indexes(connection, name)


def reads_by_indexes(connection: psycopg.Connection[Any], name: str) -> None:
    hot = HOT[name]
    for setting, value in hot.session.items():
        connection.execute("SELECT set_config(%s, %s, true)", [setting, value])
    plan = generic_plan(connection, hot.sql, hot.names)
    large = {"outbox", "inbox", "inbox_shipping", "scheduled"}
    scans = [node["Node Type"] for node in plan if node.get("Relation Name") in large]
    assert [kind for kind in scans if kind in ("Seq Scan", "Bitmap Heap Scan")] == [], name
    assert scans, name
    assert "ModifyTable" in scans or name in WRITE_NO_LARGE_TABLE
    joins = [
        node["Node Type"] for node in plan if node["Node Type"] in ("Hash Join", "Merge Join")
        and any(below.get("Relation Name") in large - {"outbox"} for child in node["Plans"] for below in nodes(child)
                if below["Node Type"] != "ModifyTable")
    ]  # fmt: skip
    assert joins == [], name


@pytest.mark.parametrize("name", ["reap-one-of-a-worker", "reap-plain-of-a-worker", "reap-any-of-a-worker"])
def test_claim_finds_the_oldest_by_their_clock_in_an_inbox_that_was_small_when_it_was_analyzed(
    node: Node, connect: Connect, name: str
) -> None:
    node.inbox("shipping")
    for step in range(3):
        with node.connection.transaction():
            messages = [Outgoing("shipping", "x" * 200, key=f"key-{nth * 7_919 % 1_000:07}") for nth in range(1_000)]
            Outbox().send_many(node.connection, messages)
        deliver(node)
        if not step:
            node.connection.execute("ANALYZE mailroom.inbox_shipping")
    connection = connect()
    for setting, value in PINNED.items():
        connection.execute("SELECT set_config(%s, %s, true)", [setting, value])
    plan = generic_plan(connection, HOT[name].sql, Share(1_000, 1_000, 1_000).names())  # it would read all of them
    scans = [scan for scan in plan if scan.get("Relation Name") == "inbox_shipping" and "Index Name" in scan]
    assert any(scan["Index Name"].startswith("clock_of_") for scan in scans)
    # A scan of the whole key's index, sorted by clock, would cost less now, and as much as the inbox has later.
    assert all("Index Cond" in scan for scan in scans)


@pytest.mark.parametrize(
    ("name", "is_any_failing", "most"),
    [("reap-plain-of-one", False, 0), ("reap-plain-of-one", True, 3), ("reap-any-of-one", True, 3)],
)
def test_claim_looks_for_failures_of_no_more_keys_than_it_takes_and_of_none_if_none_is_failing(
    node: Node, name: str, is_any_failing: bool, most: int
) -> None:
    node.inbox("shipping")
    deliver(node, *(f"k{nth}" for nth in range(60)))
    if is_any_failing:
        [message] = Inbox("shipping").peek(node.connection, "k59", limit=1)
        run(node.connection, failing("shipping", message, ValueError("no")))
    hot = HOT[name]
    with node.connection.transaction(force_rollback=True):
        node.connection.execute(PIN.at().sql.encode())
        prepare, parameters = prepared(hot.sql, hot.names)
        node.connection.execute(prepare.encode())
        execute = executed(["'{}'" if name in ("mine", "but") else "'1'" for name in parameters])
        [(plan,)] = node.rows(f"EXPLAIN (ANALYZE, FORMAT json) {execute}")
        node.connection.execute("DEALLOCATE hot")
    looks = [below for below in nodes(plan[0]["Plan"]) if below.get("Index Name") == "key_state_pkey"]
    assert looks
    assert sum(look["Actual Loops"] for look in looks) <= most


def test_entries_of_dead_workers_are_looked_up_one_by_one(connect: Connect) -> None:
    """Never by hashing the whole inbox, which such a plan would do each second."""
    with connect() as connection:
        create_inbox(connection, "shipping")
    with connect(autocommit=True) as connection:
        connection.execute(
            "INSERT INTO mailroom.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks) "
            "SELECT gen_random_uuid(), 'shipping', 'h', n, now(), 1, ARRAY['k' || n], ARRAY[n] "
            "FROM generate_series(1, 20) AS n"
        )
        connection.execute("ANALYZE")
    connection = connect()
    for name, value in PINNED.items():
        connection.execute("SELECT set_config(%s, %s, true)", [name, value])
    looks = [
        node
        for node in generic_plan(connection, TAKE_OVER, {"found": BY_ROW["found"], "is_gone": BY_ROW["is_gone"]})
        if node.get("Relation Name") == "inbox_shipping"
    ]
    assert len(looks) == 2
    assert all("key" in node.get("Index Cond", "") for node in looks)


def test_trace_reads_and_plans_each_inbox_once(connect: Connect) -> None:
    """With a thousand inboxes each further look at all of them takes longer than finding the message."""
    connection = connect()
    for name in ("shipping", "billing"):
        create_inbox(connection, name)
    read = [node.get("Relation Name") for node in generic_plan(connection, TRACE, {"but": "''"})]
    assert (read.count("inbox_shipping"), read.count("inbox_billing")) == (1, 1)


# One database for all of them: making it takes longer than an EXPLAIN.
@pytest.mark.slow
def test_hot_statements_can_be_pasted_into_psql(connect: Connect) -> None:
    with connect() as connection:
        create_log(connection, "orders", lanes=1)
        run(connection, making_segment("mailroom", "orders"))
        create_inbox(connection, "shipping", log="orders")  # it has all tables of one by key, too
    names = [name for name, hot in HOT.items() if hot.is_planned]
    assert len(names) > 100
    for name in names:
        printed = CliRunner().invoke(main, [name])
        assert printed.exit_code == 0, f"{name}: {printed.output}"
        with connect(autocommit=True) as connection:  # its own, as in psql: the text sets what it needs
            results = connection.execute(printed.output.encode())
            while results.statusmessage != "EXPLAIN":
                assert results.nextset(), name
            assert "cost=" in results.fetchall()[0][0], name
