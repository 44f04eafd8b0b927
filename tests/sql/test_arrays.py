"""Arrays in PostgreSQL's binary form, as the server reads them."""

from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest

from mailroom.sql.arrays import array
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from tests.support.node import Node

pytestmark = pytest.mark.both_versions

ITEMS: dict[str, list[object]] = {
    "bigint": [0, -1, 2**63 - 1, -(2**63), None],
    "bytea": [b"", b"\0\xff'\\{},\"NULL", b"x" * 300, None],
    "text": ["", "NULL", None, "{a,\"b\\'}", "\u00e9\U0001f4ec", "x" * 300],
    "timestamptz": [
        datetime(1, 1, 1, tzinfo=UTC), datetime(1999, 12, 31, 23, 59, 59, 999999, UTC), None,
        datetime(2026, 7, 1, 12, 30, 0, 1, timezone(timedelta(hours=-5, minutes=-30))),
        datetime(9998, 12, 31, 23, 59, 59, 999999, UTC),
    ],
    "uuid": [UUID(int=0), None, UUID(int=2**128 - 1)],
}  # fmt: skip


def test_array_is_what_the_server_gets(node: Node) -> None:
    for kind, given in ITEMS.items():
        both = Sql(f"SELECT %(items)s::{kind}[], cardinality(%(items)s::{kind}[])", columns=(f"{kind}[]", "integer"))
        for items in (given, [item for item in given if item is not None], [None], []):
            assert run(node.connection, asking(both, array(kind, items))) == (items, len(items)), kind


def asking(both: Sql, items: object) -> Operation[tuple[object, object]]:
    [(found, count)] = yield both.at()(items=items)
    return found, count
