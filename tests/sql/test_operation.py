"""Statements: their parts, and their results by name."""

from datetime import datetime
from typing import NamedTuple

import pytest

from mailroom.sql.operation import Sql, filled


def test_result_of_named_columns_is_read_by_name() -> None:
    statement = Sql("SELECT 1::bigint, 'a'::text", columns={"number": "bigint", "letter": "text"})
    assert statement.at().columns == ("bigint", "text")
    [row] = statement.named([(1, "a")])
    assert (row.number, row.letter) == (1, "a")


def test_result_of_a_class_is_rows_of_it() -> None:
    class Named(NamedTuple):
        number: int
        letters: list[str]
        at: datetime | None

    statement = Sql("SELECT 1::bigint, '{a}'::text[], NULL::timestamptz", into=Named)
    assert statement.at().columns == ("bigint", "text[]", "timestamptz")
    assert statement.named([(1, ["a"], None)]) == [Named(1, ["a"], None)]


def test_part_without_a_place_is_refused() -> None:
    assert filled("{a} AND {b}", a="true") == "true AND {b}"
    with pytest.raises(AssertionError, match="without a place in the statement: c"):
        filled("{a}", c="true")
