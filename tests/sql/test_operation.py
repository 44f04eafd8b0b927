"""Statements: their parts, and their results by name."""

import pytest

from mailroom.sql.operation import Sql, filled


def test_result_of_named_columns_is_read_by_name() -> None:
    statement = Sql("SELECT 1::bigint, 'a'::text", columns={"number": "bigint", "letter": "text"})
    assert statement.at().columns == ("bigint", "text")
    [row] = statement.named([(1, "a")])
    assert (row.number, row.letter) == (1, "a")


def test_part_without_a_place_is_refused() -> None:
    assert filled("{a} AND {b}", a="true") == "true AND {b}"
    with pytest.raises(AssertionError, match="without a place in the statement: c"):
        filled("{a}", c="true")
