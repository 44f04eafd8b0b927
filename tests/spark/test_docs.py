"""The pages about Spark are true: their commands are those of the jobs, and the example of the first page runs."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mailroom import create_inbox
from mailroom.testing import deliver
from outbox import Outbox
from spark_jobs.audit import gather
from spark_jobs.drain import drain, drained
from spark_jobs.node import Node
from spark_jobs.proof.checks import check
from spark_jobs.session import HOW_TO_GET_JDBC, jdbc_jar
from spark_jobs.write.sink import OutboxSink
from tests.logs.support import make, write
from tests.project.test_docs import blocks
from tests.spark.frames import ledger, values
from tests.support.databases import Connect
from tests.support.node import Node as MailroomNode
from tests.support.pages import DOCS, page_named
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOB = re.compile(r"(?:python -m spark_jobs\.|spark_jobs/|/jobs/)(?P<job>\w+)(?:\.py)?(?P<arguments> .*)?$")
CALLS = [
    (page.name, line.removeprefix("$ "))
    for page in sorted(DOCS.rglob("spark*.md"))
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


def test_page_of_the_sink_has_all_that_it_can_be_given() -> None:
    text = page_named("spark-foreachbatch.md").read_text()
    for name in inspect.signature(OutboxSink).parameters:
        assert name == "stream" or re.search(rf"`{name}\b|\b{name}=", text), name


class Page:
    """A page that is followed, block by block in one namespace, with `stand_ins` for what is not at hand here."""

    def __init__(self, name: str, session: "SparkSession", directory: Path, stand_ins: Mapping[str, str]) -> None:
        self.blocks = [block.text for block in blocks(page_named(name)) if block.language == "py"]
        # As a program has it: classes of `__main__` travel to the executors by what they hold.
        self.names: dict[str, Any] = {"__name__": "__main__", "spark": session, "os": os}
        self.directory = directory
        self._stand_ins = stand_ins
        unused = [there for there in stand_ins if not any(there in text for text in self.blocks)]
        assert not unused, f"{name} has no {unused}"

    def follow(self, *, without: Container[int] = ()) -> None:
        """Run the blocks but those of these numbers."""
        for number in range(len(self.blocks)):
            if number not in without:
                self.run(number)

    def run(self, number: int) -> None:
        text = self.blocks[number]
        for there, here in {**self._stand_ins, "/data/": f"{self.directory}/"}.items():
            text = text.replace(there, here)
        exec(text, self.names)


def put(directory: Path, *rows: dict[str, Any]) -> None:
    """Make a file that a stream reads."""
    directory.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{len(list(directory.iterdir()))}.json").write_text(lines)


def test_first_page_runs(spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path) -> None:
    put(tmp_path / "changes", {"number": 42, "state": "sent"})
    with connect() as connection:
        connection.execute("CREATE TABLE payments (number bigint, total float8)")
    there = 'format("outbox")'
    Page("spark.md", spark, tmp_path, {there: f'{there}.option("dsn", "{spark_dsn}")'}).follow()
    assert values(connect) == [
        {"number": 42, "state": "paid", "total": 129.95},
        {"number": 43, "state": "open", "total": 5.0},
        {"number": 42, "state": "sent"},
        {"number": 42},
    ]
    assert ledger(connect) == [("order changes", 0, 1), ("orders-2026-11-21", -1, 2), ("payments-2026-11-21", -1, 1)]
    with connect() as connection:
        assert connection.execute("SELECT * FROM payments").fetchall() == [(42, 129.95)]


def test_page_about_the_sink_runs(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "orders", {"number": 42, "total": 129.95}, {"number": 43, "total": 5})
    with connect() as connection:
        connection.execute("CREATE TABLE orders (number bigint, total numeric(10,2))")
    page = Page("spark-foreachbatch.md", spark, tmp_path, {'topic="order': f'dsn="{spark_dsn}", topic="order'})
    page.follow()
    page.run(1)
    assert capsys.readouterr().out == "1 sent, 0 passed over\n0 sent, 1 passed over\n"
    one_more = spark.sql("SELECT 45 AS number, 7.5 AS total, named_struct('number', 45) AS value")
    page.names["sink"](one_more, 7)  # the one with transact
    assert capsys.readouterr().out == "batch 7: 1 orders\n"
    with connect() as connection:
        orders = connection.execute("SELECT number, total::text FROM orders ORDER BY 1").fetchall()
    assert orders == [(42, "129.95"), (43, "5.00"), (44, "19.90"), (45, "7.50")]
    assert [value["number"] for value in values(connect)] == [42, 43, 44, 45]


def test_page_about_reading_runs(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping")
        for number in range(3):
            Outbox().send(connection, "shipping", {"order": number}, key=f"order-{number}")
        deliver(connection)
        [(history,)] = connection.execute("SELECT concat('shipping@', id, '/', incarnation) FROM mailroom.node")
    stand_ins = {
        '"path", "shipping"': '"path", "/data/shipping"',
        '"checkpoint")': '"/data/checkpoint")',
        'readStream.format("inbox")': 'readStream.format("inbox").option("maxMessages", 2)',
        "addListener(Lag())": "addListener(lag := Lag())",
    }
    page = Page("spark-reading.md", spark, tmp_path, stand_ins)
    page.names["dsn"] = spark_dsn
    [listens] = [number for number, text in enumerate(page.blocks) if "addListener" in text]
    page.run(listens)
    told = ""

    def both_batches_are_told() -> bool:
        nonlocal told
        told += capsys.readouterr().out
        return told.count(history) == 2

    try:
        page.follow(without=[listens])
        eventually(both_batches_are_told)
    finally:
        spark.streams.removeListener(page.names["lag"])
    assert re.findall(r": (\d) clocks, [\d.]+ s behind", told) == ["1", "0"]
    assert spark.read.parquet(f"{tmp_path}/shipping").count() == 3


def test_page_about_logs_runs(
    spark: "SparkSession", spark_dsn: str, node: MailroomNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(node, "lake")
    write(node, ["k1", "k2", "k3"])
    stand_ins = {
        '"path", "lake"': '"path", "/data/lake"',
        '"checkpoint-lake"': '"/data/checkpoint"',
        "2026-11-16": "2000-01-01",
        "2026-11-23": "2200-01-01",
    }
    page = Page("spark-logs.md", spark, tmp_path, stand_ins)
    page.names["dsn"] = spark_dsn
    page.follow()
    assert spark.read.parquet(f"{tmp_path}/lake").count() == 3
    assert re.search(r"order\.paid\| +3\|", capsys.readouterr().out)


def test_page_about_jdbc_runs_and_what_is_written_again_is_passed_over(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    if jdbc_jar() is None:
        pytest.skip(f"Spark has no JDBC driver for PostgreSQL. {HOW_TO_GET_JDBC}")
    put(tmp_path / "changes", {"number": 43, "state": "open", "version": 1})
    put(tmp_path / "changes", {"number": 43, "state": "sent", "version": 2})
    with connect(autocommit=True) as connection:
        at = connection.info
        stand_ins = {
            "jdbc:postgresql://db/shop": f"jdbc:postgresql://{at.host}:{at.port}/{at.dbname}",
            '"user": "spark"': f'"user": "{at.user}"',
            '"service=orders"': f'"{spark_dsn}"',
        }
        page = Page("spark-jdbc.md", spark, tmp_path, stand_ins)
        assert len(page.blocks) == 4
        page.run(0)
        for way in (1, 2, 3):
            page.run(way)
            shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
            page.run(way)  # here a stream begins anew
            rows = connection.execute(
                "SELECT key, value_json ->> 'state', source FROM mailroom.outbox ORDER BY 1, 2"
            ).fetchall()
            expected = [("42", "paid", "orders"), ("43", "open", "orders"), ("43", "sent", "orders")]
            assert rows == expected[: 3 if way == 3 else 2]
            if way == 1:
                connection.execute("TRUNCATE mailroom.outbox, mailroom.outbox_jdbc_id")


RECIPES = {'format("delta")': 'format("parquet")'}


@pytest.fixture
def recipes(spark: "SparkSession", spark_dsn: str, tmp_path: Path) -> Page:
    page = Page("spark-recipes.md", spark, tmp_path, RECIPES)
    page.names["dsn"] = spark_dsn
    return page


def block(page: Page, holds: str) -> int:
    """The number of the block that holds this text."""
    [found] = [number for number, text in enumerate(page.blocks) if holds in text]
    return found


def test_recipes_that_are_not_run_say_so(recipes: Page) -> None:
    assert len(recipes.blocks) == 6
    before, _, _ = (
        page_named("spark-recipes.md").read_text().partition(recipes.blocks[block(recipes, 'format("iceberg")')])
    )
    assert "*Not run*" in before.rpartition("\n## ")[2]


def test_recipes_for_a_lake(recipes: Page, spark: "SparkSession", connect: Connect, tmp_path: Path) -> None:
    def send(*numbers: int) -> None:
        with connect() as connection:
            for number in numbers:
                topic = "order.paid" if number % 2 else "order.sent"
                Outbox().send(connection, topic, {"order": number}, key=f"order-{number}")
            deliver(connection)

    def orders(table: str) -> list[int]:
        return sorted(row.value.order for row in spark.read.parquet(f"{tmp_path}/lake/{table}").collect())

    with connect() as connection:
        create_inbox(connection, "shipping", ["order.paid", "order.sent"])
    send(1, 2, 3)
    recipes.run(block(recipes, "from_cbor"))
    send(4, 5)
    recipes.run(block(recipes, "from_cbor"))
    assert orders("shipping") == [1, 2, 3, 4, 5]
    with connect() as connection:
        connection.execute("DELETE FROM mailroom.spark_stream")  # the recipes are alternatives: each has its own inbox
    send(6, 7)
    recipes.run(block(recipes, "txnAppId"))
    assert (orders("all"), orders("paid")) == ([4, 5, 6, 7], [5, 7])  # another checkpoint: also the last batch before


def test_recipe_for_fewer_files(
    recipes: Page, spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node, drain_dir, archive = Node(dsn=spark_dsn), tmp_path / "shipping", tmp_path / "archive"

    def fill(count: int) -> None:
        with connect() as connection:
            for number in range(count):
                Outbox().send(connection, "shipping", number, key=f"order-{number % 3}")
            deliver(connection)
        drain(node, "shipping", str(drain_dir), max_messages=10)

    def wrong() -> list[str]:
        evidence = gather(spark, node, [str(drain_dir), str(archive)])
        return [name for name in ("files complete", "delivered once") if not check(name, evidence).holds]

    with connect() as connection:
        create_inbox(connection, "shipping")
    fill(30)
    assert len(list(drain_dir.glob("*.parquet"))) > 1
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed_before_it_removes)
        with pytest.raises(InterruptedError):
            recipes.run(block(recipes, "def compact"))
    assert "delivered once" in wrong()
    fill(10)
    recipes.run(block(recipes, "def compact"))
    assert (list(drain_dir.glob("*.parquet")), len(list(archive.iterdir()))) == ([], 2)
    fill(10)
    assert (wrong(), drained(spark, str(archive)).count()) == ([], 40)
    recipes.names["compact"](archive, tmp_path / "all")
    archive.rmdir()
    assert drained(spark, str(tmp_path / "all")).count() == 40
    with pytest.raises(ValueError, match="another directory"):
        recipes.names["compact"](tmp_path / "all", f"{tmp_path}/../{tmp_path.name}/all")


def killed_before_it_removes(file: Path, **_: object) -> None:
    if file.suffix == ".parquet":
        raise InterruptedError


def test_notebook(spark: "SparkSession", spark_dsn: str, connect: Connect) -> None:
    with connect() as connection:
        create_inbox(connection, "shipping", ["order.paid"])
        for number in (1, 2, 3):
            Outbox().send(connection, "order.paid", {"order": number}, key=f"order-{number % 2}")
        deliver(connection)
    cells = json.loads((DOCS.parent / "examples" / "inbox.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            *statements, last = ast.parse("".join(cell["source"])).body
            load = ast.unparse(ast.Module(statements, [])).replace("load()", f"option('dsn', {spark_dsn!r}).load()")
            exec(load, names)
            if isinstance(last, ast.Expr):  # what a notebook shows
                shown.append(eval(ast.unparse(last), names))
            else:
                exec(ast.unparse(last), names)
    topics, keys, first = shown
    assert topics[["topic", "messages"]].values.tolist() == [["order.paid", 3]]
    assert keys.values.tolist() == [["order-1", 2, 1], ["order-0", 1, 2]]
    assert first == ("order-1", {"order": 1})
