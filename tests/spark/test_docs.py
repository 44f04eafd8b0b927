"""The pages about Spark are true: their commands are those of the jobs, and the example of the first page runs."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.databases import Connect
from tests.spark.frames import ledger, values
from tests.test_docs import blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).parents[2] / "docs"
JOB = re.compile(r"(?:python -m spark_jobs\.|spark_jobs/|/jobs/)(?P<job>\w+)(?:\.py)?(?P<arguments> .*)?$")
CALLS = [
    (page.name, line.removeprefix("$ "))
    for page in sorted(DOCS.glob("spark*.md"))
    for block in blocks(page)
    if block.language in ("console", "text")
    for line in block.text.splitlines()
    if JOB.search(line)
]


def test_there_are_commands() -> None:
    assert {job[1] for _, line in CALLS if (job := JOB.search(line))} == {"send", "drain", "audit", "sweep"}


@pytest.mark.parametrize(("page", "line"), CALLS)
def test_command_of_a_page_is_one(page: str, line: str) -> None:
    found = JOB.search(line)
    assert found
    command = importlib.import_module(f"spark_jobs.{found['job']}").command
    command.make_context(found["job"], shlex.split(found["arguments"] or ""))


def test_first_page_runs(spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path) -> None:
    changes = tmp_path / "changes"
    changes.mkdir()
    (changes / "1.json").write_text(json.dumps({"number": 42, "state": "sent"}))
    names: dict[str, Any] = {}
    written = [block.text for block in blocks(DOCS / "spark.md") if block.language == "py"]
    assert len(written) == 2
    for text in written:
        here = text.replace("/data/", f"{tmp_path}/").replace(
            '.option("topic"', f'.option("dsn", "{spark_dsn}").option("topic"'
        )
        exec(here, names)
    assert values(connect) == [
        {"number": 42, "state": "paid", "total": 129.95},
        {"number": 43, "state": "open", "total": 5.0},
        {"number": 42, "state": "sent"},
    ]
    assert ledger(connect) == [("order changes", 0, 1), ("orders-2026-11-21", -1, 2)]
