"""Fetch: each column of each type arrives as it is stored, and Python looks into none."""

from typing import Any

import psycopg
import pytest

from dispatcher.links.at_source.bounds import START
from dispatcher.links.at_source.fetch import FetchedBatch, fetching
from dispatcher.links.receive import receiving
from mailroom.links.handshake.wire import WIRE_COLUMNS
from mailroom.message.columns import MESSAGE
from mailroom.sql.operation import Undecoded
from mailroom.sql.runner import run, run_async
from tests.support.links import Linked, linked
from tests.support.node import SCHEMA, Node

pytestmark = pytest.mark.both_versions

# What is unlikely to survive a way through text, JSON or Python.
ROWS: list[dict[str, Any]] = [
    {"value": bytes(range(256)) * 4096},
    {"value": b""},
    {"value": None, "value_json": '{"b": [1, 2.50, 1e400, 123456789012345678901234567890, null], "a": "\\u00e9\\n"}'},
    {"value": None, "value_json": "null", "headers": '{"user": "NULL", "quote": "\\"{}\\\\,"}'},
    {"key": 'NULL {"a,b"} \\ \' é 𝄞', "source": "", "headers": "{}"},
    {"key": "x" * 1024, "source": None, "event_type": None, "expires_at": None, "after_clock": None},
    {"event_type": "D", "message_type": "O", "kind": "E", "after_clock": 2**62, "topic": "order.paid"},
    {"expires_at": "9998-12-31 23:59:59.999999 UTC", "sent_at": "0001-01-01 00:00:00.000001 UTC"},
    {"kind": "C", "message_type": "C", "event_type": "C"},
    {"kind": "R", "message_type": "D", "event_type": "U"},
    {"value": b"y" * 2**20},
]
# At the source and at the target; what a value's text depends on.
SETTINGS = {
    "source": {"datestyle": "German, DMY", "timezone": "Asia/Kolkata", "bytea_output": "escape",
               "intervalstyle": "sql_standard", "client_encoding": "LATIN1", "array_nulls": "off"},
    "target": {"datestyle": "SQL, MDY", "timezone": "America/St_Johns", "bytea_output": "hex",
               "standard_conforming_strings": "off", "client_encoding": "WIN1252", "array_nulls": "off"},
}  # fmt: skip


@pytest.fixture
def pair(source: Node, target: Node) -> Linked:
    target.allow_clocks(2**60)
    made = linked(source, target, ["#"])
    made.inbox("billing", "order.paid")
    return made


def carried_over(pair: Linked) -> bool:
    """Return whether what stands in the inbox is what stood in transit, to the byte."""
    rows = [node.rows(f"SELECT md5(t::text), t::text FROM (SELECT sent_clock, {MESSAGE} FROM mailroom.{table} "
                      "ORDER BY sent_clock) AS t")
            for node, table in ((pair.source, "transit"), (pair.target, "inbox"))]  # fmt: skip
    return rows[0] == rows[1] and len(rows[0]) == len(ROWS)


@pytest.mark.parametrize("decoded", [False, True])
def test_every_column_arrives_as_it_was_under_whatever_settings(pair: Linked, decoded: bool) -> None:
    given = ROWS if not decoded else [row for row in ROWS if "sent_at" not in row] + [{}]
    pair.put(*given)
    with psycopg.connect(pair.source.dsn) as source, psycopg.connect(pair.target.dsn) as target:
        for connection, name in ((source, "source"), (target, "target")):
            for setting, value in SETTINGS[name].items():
                if not (decoded and setting in ("array_nulls", "standard_conforming_strings")):
                    connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
        batch = run(source, fetching(SCHEMA, pair.link, after=0, to=99, decoded=decoded))
        assert run(target, receiving(SCHEMA, pair.origin, batch, START)).delivered == len(ROWS)
    assert carried_over(pair)


async def test_async_connections_pass_a_batch_on_as_it_came(pair: Linked) -> None:
    pair.put(*ROWS)
    async with (
        await psycopg.AsyncConnection.connect(pair.source.dsn) as source,
        await psycopg.AsyncConnection.connect(pair.target.dsn) as target,
    ):
        batch = await run_async(source, fetching(SCHEMA, pair.link, after=0, to=99))
        assert (await run_async(target, receiving(SCHEMA, pair.origin, batch, START))).delivered == len(ROWS)
    assert carried_over(pair)


def test_python_looks_into_nothing(pair: Linked) -> None:
    pair.put(*ROWS)
    batch: FetchedBatch = run(pair.source.connection, fetching(SCHEMA, pair.link, after=0, to=99))
    assert batch.rows == len(ROWS)
    assert list(batch.columns) == list(WIRE_COLUMNS)
    assert all(isinstance(each, Undecoded) for each in batch.columns.values())
    assert 2**21 < batch.size < 2**21 + 2**16
    assert "yyy" not in repr(batch) + repr(batch.columns)


def test_only_the_columns_of_the_wire_cross(pair: Linked) -> None:
    """Neither side needs the other's release: a column that one side has more changes nothing."""
    pair.source.connection.execute("ALTER TABLE mailroom.transit ADD extra text DEFAULT 'x'")
    pair.target.connection.execute("ALTER TABLE mailroom.inbox ADD more text DEFAULT 'y'")
    pair.put({})
    assert pair.take().delivered == 1


def test_rows_come_by_seq_from_behind_to_the_end(pair: Linked) -> None:
    ids = pair.put(*[{}] * 5)
    batch = run(pair.source.connection, fetching(SCHEMA, pair.link, after=1, to=4, decoded=True))
    assert (batch.rows, batch.columns["seq"], batch.columns["message_id"]) == (3, [2, 3, 4], ids[1:4])
