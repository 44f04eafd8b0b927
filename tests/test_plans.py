"""Plans: a plan is kept, so the one made while the tables were small must be right when they are large."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from dispatcher import deliver, janitor
from inbox import claim
from mailroom.operation import PARAMETER, Statement
from mailroom.schema import create_inbox
from tests.databases import Connect

NAMES = {"schema": "mailroom", "inbox": "shipping"}
SHARE = claim.Share(keys=100, per_key=100, total=100).names()

CLAIMS = {
    "reap": claim.REAP_KEY.at(**NAMES),
    "reap_any": claim.REAP_ANY.at(**NAMES, **SHARE),
}
DELIVERIES = {
    "deliver": deliver.DELIVER.at(schema="mailroom"),
    "bury": deliver.BURY.at(schema="mailroom"),
    "release": deliver.RELEASE.at(schema="mailroom"),
    "oldest alive": janitor.OLDEST.at(**NAMES),
    "probe": janitor.PROBE.at(**NAMES),
}


@pytest.fixture
def connection(connect: Connect) -> psycopg.Connection[Any]:
    """A session on empty tables whose statistics say so: where a sequential scan looks cheapest."""
    connection = connect(autocommit=True)
    with connection.transaction():
        create_inbox(connection, "shipping")
    connection.execute("VACUUM ANALYZE")
    connection.execute("SET plan_cache_mode = force_generic_plan")
    return connection


def plan_of(connection: psycopg.Connection[Any], statement: Statement) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the plan that would be kept."""
    names = list(dict.fromkeys(match[1] for match in PARAMETER.finditer(statement.sql)))
    text = PARAMETER.sub(lambda match: f"${names.index(match[1]) + 1}::{match[2]}", statement.sql).replace("%%", "%")
    connection.execute(f"PREPARE kept AS {text}".encode())
    arguments = f"({', '.join(['NULL'] * len(names))})" if names else ""
    [(found,)] = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE kept{arguments}".encode()).fetchall()
    connection.execute("DEALLOCATE kept")
    waiting = [(found if isinstance(found, list) else json.loads(found))[0]["Plan"]]
    while waiting:
        node = waiting.pop()
        waiting += node.get("Plans", [])
        yield node


def read_from_end_to_end(nodes: list[dict[str, Any]]) -> set[str]:
    """Return the growing tables that the plan reads as a whole."""
    grows = {"outbox", "inbox_shipping", "scheduled", "key_state"}
    return {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"} & grows


def pin(connection: psycopg.Connection[Any]) -> None:
    for name, value in claim.PINNED.items():
        connection.execute("SELECT set_config(%s, %s, false)", [name, value])


def dispatch(connection: psycopg.Connection[Any]) -> None:
    for name, value in deliver.SESSION.items():
        connection.execute("SELECT set_config(%s, %s, false)", [name, value])


@pytest.mark.parametrize("name", CLAIMS)
def test_claim_planned_on_empty_tables_goes_by_indexes_and_one_row_at_a_time(
    connection: psycopg.Connection[Any], name: str
) -> None:
    pin(connection)
    nodes = list(plan_of(connection, CLAIMS[name]))
    assert read_from_end_to_end(nodes) == set()
    assert {node["Node Type"] for node in nodes} & {"Hash Join", "Merge Join", "Bitmap Heap Scan"} == set()
    deleted = [node for node in nodes if node["Node Type"] == "Tid Scan"]
    assert [node["Relation Name"] for node in deleted] == ["inbox_shipping"]


@pytest.mark.parametrize("name", CLAIMS)
def test_claim_finds_rows_by_the_index_that_gives_them_in_order(connection: psycopg.Connection[Any], name: str) -> None:
    pin(connection)
    used = {node["Index Name"] for node in plan_of(connection, CLAIMS[name]) if "Index Name" in node}
    expected = {"inbox_shipping_pkey", "inbox_registry_pkey", "key_state_pkey"}
    assert expected | ({"inbox_shipping_clock"} if name == "reap_any" else set()) <= used


@pytest.mark.parametrize("name", DELIVERIES)
def test_delivery_planned_on_empty_tables_goes_by_indexes(connection: psycopg.Connection[Any], name: str) -> None:
    dispatch(connection)
    assert read_from_end_to_end(list(plan_of(connection, DELIVERIES[name]))) == set()


def test_delivery_takes_and_deletes_by_a_range_of_positions(connection: psycopg.Connection[Any]) -> None:
    dispatch(connection)
    scans = [node for node in plan_of(connection, DELIVERIES["deliver"]) if node.get("Relation Name") == "outbox"]
    by_index = [node for node in scans if node["Node Type"] != "ModifyTable"]
    assert {node["Index Name"] for node in by_index} == {"outbox_pkey"}
    assert all('"position" >' in node["Index Cond"] for node in by_index)
