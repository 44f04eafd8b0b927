"""Plans: what an empty, just analyzed database makes of the hot statements must serve a full one too."""

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pytest

from dispatcher.deliver import DELIVER
from dispatcher.deliver import SESSION as DELIVERY
from inbox.claim import HAS_MORE, PINNED, REAP_ANY, REAP_KEY, Share
from inbox.note import LEFT, WRITE
from mailroom.operation import PARAMETER, Sql
from mailroom.schema import create_inbox
from outbox.outbox import INSERT
from tests.databases import Connect

HOT = {
    "insert": (INSERT, {}, {}),
    "reap(key)": (REAP_KEY, {}, PINNED),
    "reap(key) looks again": (HAS_MORE, {}, PINNED),
    "reap_any": (REAP_ANY, Share(100, 10, 1_000).names(), PINNED),
    "reap_any of one": (REAP_ANY, Share(1, 1, 1).names(), PINNED),
    "deliver": (DELIVER, {}, DELIVERY),
    "note of a batch": (WRITE, {}, PINNED),
}
WRITE_NO_LARGE_TABLE = ("reap(key) looks again", "note of a batch")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def generic_plan(connection: psycopg.Connection[Any], statement: Sql, names: Mapping[str, str]) -> list[dict[str, Any]]:
    rendered = statement.at(schema="mailroom", **({"inbox": "shipping"} | dict(names))).sql
    types: dict[str, str] = {}
    for match in PARAMETER.finditer(rendered):
        types.setdefault(match[1], match[2])
    numbers = {name: nth for nth, name in enumerate(types, start=1)}
    numbered = PARAMETER.sub(lambda match: f"${numbers[match[1]]}::{match[2]}", rendered).replace("%%", "%")
    arguments = f"({', '.join(types.values())})" if types else ""
    connection.execute(f"PREPARE hot{arguments} AS {numbered}".encode())
    connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
    values = f"({', '.join('NULL' for _ in types)})" if types else ""
    row = connection.execute(f"EXPLAIN (FORMAT json) EXECUTE hot{values}".encode()).fetchone()
    assert row is not None
    return list(nodes(row[0][0]["Plan"]))


@pytest.mark.parametrize("hot", HOT)
def test_hot_statement_reads_large_tables_by_their_indexes_only(connect: Connect, hot: str) -> None:
    statement, names, session = HOT[hot]
    with connect() as connection:
        create_inbox(connection, "shipping")
    with connect(autocommit=True) as connection:
        connection.execute("ANALYZE")
    connection = connect()
    for name, value in session.items():
        connection.execute("SELECT set_config(%s, %s, true)", [name, value])
    plan = generic_plan(connection, statement, names)
    large = {"outbox", "inbox", "inbox_shipping", "scheduled"}
    scans = [node["Node Type"] for node in plan if node.get("Relation Name") in large]
    assert [kind for kind in scans if kind in ("Seq Scan", "Bitmap Heap Scan")] == []
    assert scans
    assert "ModifyTable" in scans or hot in WRITE_NO_LARGE_TABLE
    joins = [
        node["Node Type"] for node in plan if node["Node Type"] in ("Hash Join", "Merge Join")
        and any(below.get("Relation Name") in large - {"outbox"} for child in node["Plans"] for below in nodes(child)
                if below["Node Type"] != "ModifyTable")
    ]  # fmt: skip
    assert joins == []


def test_notes_of_the_dead_are_looked_up_one_by_one(connect: Connect) -> None:
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
    looks = [node for node in generic_plan(connection, LEFT, {}) if node.get("Relation Name") == "inbox_shipping"]
    assert len(looks) == 2
    assert all("key" in node.get("Index Cond", "") for node in looks)
