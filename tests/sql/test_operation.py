"""Statements: their parts, and their results by name."""

import re
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from mailroom.sql.operation import Sql, filled

ROOT = Path(__file__).parents[2]


def test_result_of_named_columns_is_read_by_name() -> None:
    statement = Sql("SELECT 1::bigint, 'a'::text", columns={"number": "bigint", "letter": "text"})
    assert statement.at().columns == ("bigint", "text")
    [row] = statement.named([(1, "a")])
    assert (row.number, row.letter) == (1, "a")


def test_result_of_a_class_is_rows_of_it() -> None:
    class Named(NamedTuple):
        number: int
        letters: tuple[str, ...]
        at: datetime | None

    statement = Sql("SELECT 1::bigint, '{a}'::text[], NULL::timestamptz", into=Named)
    assert statement.at().columns == ("bigint", "text[]", "timestamptz")
    assert statement.named([(1, ["a"], None)]) == [Named(1, ("a",), None)]


def test_table_of_leases_is_read_where_the_lanes_are_and_where_its_figures_are() -> None:
    packages = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py") if file.name != "expected.py"]
    assert {str(file.relative_to(ROOT)) for file in files if re.search(r"schema\}+\.lease\b", file.read_text())} == {
        "dispatcher/housekeeping/set_back.py", "dispatcher/lanes/lease.py", "mailroom/figures/leaders.py",
    }  # fmt: skip


def test_part_without_a_place_is_refused() -> None:
    assert filled("{a} AND {b}", a="true") == "true AND {b}"
    with pytest.raises(AssertionError, match="without a place in the statement: c"):
        filled("{a}", c="true")
