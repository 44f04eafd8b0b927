"""Plans of a log's statements: what was planned while it was empty serves a full one, and reads nothing of the past."""

from typing import Any

import pytest

from inbox.by_key.claim import PIN
from inbox.by_log.lanes import SEGMENTS
from mailroom.logs.segments import ALONE, making_segment
from mailroom.sql.operation import Statement
from mailroom.sql.runner import run
from tests.logs.support import Reader, make
from tests.support.databases import Connect
from tests.support.explain import executed, nodes, prepared
from tests.support.hot import HOT
from tests.support.node import SCHEMA, Node

pytestmark = pytest.mark.both_versions

LANES, ROWS, OLD, PER_LANE = 8, 2_000, 300, 5
BEGUN = ROWS - 50  # the last 50 messages of each lane are unread
# Values of parameters by name: what a claim of two lanes, of all segments, and a janitor give.
VALUES = {
    "lanes": "'{1, 2}'", "first": "0", "per_lane": str(PER_LANE), "seen": "-1", "most": "2", "but": "'{}'",
    "clock": "100", "rows": "1000", "limit": "5", "key": "'k1'",
}  # fmt: skip
FILL = f"""
INSERT INTO mailroom.log (log, segment, lane, clock, sent_clock, origin, message_id, topic, key, kind, message_type,
                          sent_at, value_json)
SELECT 'orders', 1 + (n > {ROWS * LANES // 2})::integer, n % {LANES}, n, n, gen_random_uuid(), gen_random_uuid(),
       'order.paid', 'k' || n % 100, 'M', 'U', now(), '1'
FROM generate_series(1, {ROWS * LANES}) AS n;
INSERT INTO mailroom.receipts_shipping (inbox, lane, epoch, clock)
SELECT 'shipping', lane, epoch, n FROM mailroom.receipts_shipping AS r, generate_series(1, {OLD}) AS n;
INSERT INTO mailroom.receipts_shipping (inbox, lane, epoch, clock)
SELECT DISTINCT 'shipping', lane, epoch, {BEGUN * LANES} FROM mailroom.receipts_shipping
"""


@pytest.fixture
def full(node: Node) -> Node:
    """A log that was analyzed while it was empty; much of it was read long ago, and each lane has old receipts."""
    make(node, "shipping", lanes=LANES)
    with node.connection.transaction():
        run(node.connection, making_segment(SCHEMA, "orders"))
    node.connection.execute("ANALYZE")
    node.connection.execute(FILL)
    return node


def plan_of(node: Node, name: str, after: Statement | None = None, **values: str) -> list[dict[str, Any]]:
    """Run a statement after the one that sets how it is planned, undo it, and return its plan with what it did."""
    hot, connection = HOT[name], node.connection
    with connection.transaction(force_rollback=True):
        if after is not None:
            connection.execute(after.sql.encode())
        connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        prepare, parameters = prepared(hot.sql, hot.names)
        connection.execute(prepare.encode())
        execute = executed([(VALUES | values).get(each, "NULL") for each in parameters])
        [(plan,)] = node.rows(f"EXPLAIN (ANALYZE, FORMAT json) {execute}")
        connection.execute("DEALLOCATE hot")
    return list(nodes(plan[0]["Plan"]))


def rows_of(plan: list[dict[str, Any]], table: str) -> int:
    """Return how many rows the scans of a table have come by, each by an index with a condition on its columns."""
    scans = [each for each in plan if each.get("Relation Name") == table and each["Node Type"] != "ModifyTable"]
    assert scans
    for each in scans:
        assert each["Node Type"] in ("Index Scan", "Index Only Scan"), f"{table}: {each['Node Type']}"
        assert "lane" in each["Index Cond"], f"{table}: {each}"
    removed = "Rows Removed by Filter"
    return int(sum((each["Actual Rows"] + each.get(removed, 0)) * each["Actual Loops"] for each in scans))


@pytest.mark.parametrize("name", ["log-read-plain", "log-read", "log-read-plain-of-segments", "log-read-of-segments"])
def test_claim_reads_what_it_takes_and_the_newest_receipt_of_each_lane(full: Node, name: str) -> None:
    plan = plan_of(full, name, PIN.at())
    assert rows_of(plan, "receipts_shipping") == 2  # one descending probe a lane
    taken = 2 * PER_LANE if "segments" in name else 0  # the unread ones are in the second segment
    looks = 4 if "plain" not in name else 3  # at each of these messages: which, their keys' state, and all of them
    for table in ("log_1", "log_2") if "segments" in name else ("log_1",):
        assert rows_of(plan, table) <= (looks * taken if table == "log_2" else 0)


def test_locks_of_lanes_read_no_more_ticks_than_are_new(full: Node) -> None:
    full.connection.execute(
        "INSERT INTO mailroom.log_tick (log, clock, lanes, rows) SELECT 'orders', n, '{1}', 1 "
        "FROM generate_series(1, 5000) AS n"
    )
    plan = plan_of(full, "log-lock", PIN.at(), seen="4990", lanes="'{}'")
    ticks = [each for each in plan if each.get("Relation Name") == "log_tick"]
    assert sum(each["Actual Rows"] * each["Actual Loops"] for each in ticks) <= 11  # and the last one
    locked = [each for each in plan if each.get("Relation Name") == "lanes_shipping"]
    assert [each["Actual Rows"] * each["Actual Loops"] for each in locked] == [1]


def test_what_holds_a_segment_is_looked_up_by_lane(full: Node) -> None:
    plan = plan_of(full, "segments-holds", ALONE.at(node=SCHEMA))
    assert rows_of(plan, "log_1") == 0
    plan = plan_of(full, "log-record-a-failure")
    assert rows_of(plan, "receipts_shipping") <= 2


def test_a_claim_locks_the_segments_that_it_reads_and_no_others(node: Node, connect: Connect) -> None:
    make(node, "billing", lanes=1)
    for _ in range(SEGMENTS + 4):
        node.send("order.paid", key="a")
        node.deliver_all()
        with node.connection.transaction():
            run(node.connection, making_segment(SCHEMA, "orders"))
    reader = Reader(connect(), "billing")
    most = []
    while reader.claim(2).messages:
        locked = node.value(
            "SELECT count(DISTINCT c.relname) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation "
            "WHERE l.pid = %s AND c.relname ~ '^log_[0-9]+$'", reader.connection.info.backend_pid,
        )  # fmt: skip
        reader.connection.commit()
        most.append(locked)
    # The first claim has looked at the newest segment before, and one has gone on to those after the first eight.
    assert min(most) <= SEGMENTS
    assert most.count(SEGMENTS) >= 2
    assert len(most) == SEGMENTS // 2 + 2
