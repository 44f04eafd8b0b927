"""Statements: their parts, and their results by name."""

import pytest

from mailroom.sql.operation import Operation, Sql, bytea_array, filled
from mailroom.sql.runner import run
from tests.support.node import Node


def test_result_of_named_columns_is_read_by_name() -> None:
    statement = Sql("SELECT 1::bigint, 'a'::text", columns={"number": "bigint", "letter": "text"})
    assert statement.at().columns == ("bigint", "text")
    [row] = statement.named([(1, "a")])
    assert (row.number, row.letter) == (1, "a")


def test_part_without_a_place_is_refused() -> None:
    assert filled("{a} AND {b}", a="true") == "true AND {b}"
    with pytest.raises(AssertionError, match="without a place in the statement: c"):
        filled("{a}", c="true")


@pytest.mark.parametrize("items", [[], [b""], [b"\0\xff'\\{},\"NULL", b"x" * 300, b""]])
def test_array_of_bytes_is_what_the_server_gets(node: Node, items: list[bytes]) -> None:
    def asking() -> Operation[tuple[object, ...]]:
        both = "SELECT %(items)s::bytea[], cardinality(%(items)s::bytea[])"
        [(found, count)] = yield Sql(both, columns=("bytea[]", "integer")).at()(items=bytea_array(items))
        return found, count

    assert run(node.connection, asking()) == (items, len(items))
