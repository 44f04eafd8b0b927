"""The command lines of the jobs: send, sweep."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from mailroom.cli.failures import tell
from mailroom.values import codec
from spark_jobs import send, sweep
from spark_jobs.node import Node
from spark_jobs.write.ledger import SparkBatch
from spark_jobs.write.staging import stage
from tests.spark.frames import SHAPE, batches
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CSV = "number,tail_number,day\n1,N14,2013-01-01\n2,N24,2013-01-02\n3,,2013-01-03\n"


def run(command: click.Command, *arguments: str) -> int:
    try:
        command.main(list(arguments), standalone_mode=False)
    except Exception as error:
        return tell(error)
    return 0


def messages(connect: Connect) -> list[tuple[Any, ...]]:
    with connect() as connection:
        rows = connection.execute(
            "SELECT topic, key, kind::text, value FROM mailroom.outbox ORDER BY position"
        ).fetchall()
    return [(topic, key, kind, codec.decode(value)) for topic, key, kind, value in rows]


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    file = tmp_path / "flights.csv"
    file.write_text(CSV)
    return file


def test_csv_is_sent_once(
    spark: "SparkSession", spark_dsn: str, connect: Connect, flights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(flights),
        "--topic",
        "flights",
        "--key",
        "tail_number",
        "--name",
        "flights-2013",
        "--dsn",
        spark_dsn,
    ]
    columns = ["--columns", "number int, tail_number string, day date"]
    assert run(send.command, *arguments, *columns, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["messages"], told["passed_over"]) == (3, 0)
    first, second, third = messages(connect)
    assert first[:3] == ("flights", "N14", "M")
    assert first[3]["number"] == 1
    assert first[3]["day"].isoformat() == "2013-01-01"
    assert second[3]["tail_number"] == "N24"
    assert third[3]["tail_number"] is None
    assert len(third[1]) == 36  # no key: the message's id
    assert run(send.command, *arguments, *columns) == 0
    again = capsys.readouterr().out
    assert again.startswith("3 messages of flights-2013 are in the outbox since")
    assert again.endswith(": passed over now.\n")
    flights.write_text(CSV.replace("N24", "N25"))
    assert run(send.command, *arguments, *columns) == 1
    assert run(send.command, *arguments, *columns, "--on-known-batch", "pass", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed_over"] == 3
    assert len(messages(connect)) == 3


def test_rows_are_chosen_shaped_and_ordered(
    spark: "SparkSession", spark_dsn: str, connect: Connect, flights: Path
) -> None:
    chosen = ["--where", "number < 3", "--value", "number * 10", "--order-by", "-number", "--kind", "E"]
    assert run(send.command, str(flights), "--topic", "t", "--name", "n", "--dsn", spark_dsn, *chosen) == 0
    assert [(kind, value) for _, _, kind, value in messages(connect)] == [("E", 20), ("E", 10)]


def test_several_files_are_sent_by_their_names(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    last = 0
    for day, rows in enumerate((2, 30, 3), start=1):  # Spark reads the largest first
        lines = [json.dumps({"n": last + nth}) for nth in range(rows)]
        (tmp_path / f"day{day}.json").write_text("\n".join(lines))
        last += rows
    days = [str(tmp_path / f"day{day}.json") for day in (3, 1, 2)]
    assert run(send.command, *days, "--topic", "t", "--key", "'k'", "--name", "n", "--dsn", spark_dsn) == 0
    assert [value["n"] for *_, value in messages(connect)] == list(range(35))


UNREADABLE: list[tuple[str, str, list[str]]] = [
    ("broken.json", '{"a": 1}\n{"a": 2, "b": \n{"a": 3}\n', ["--columns", "a int, b int"]),
    ("inferred.json", '{"a": 1}\n{"a": 2, "b": \n{"a": 3}\n', []),
    ("pruned.csv", "a,b,c\n1,2,3\n4,five\n", ["--columns", "a int, b int, c int", "--value", "struct(a)"]),
]


def test_row_that_cannot_be_read_fails_the_job(
    spark: "SparkSession", spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    plain = ["--topic", "t", "--name", "n", "--dsn", spark_dsn]
    for name, text, arguments in UNREADABLE:
        (tmp_path / name).write_text(text)
        assert run(send.command, str(tmp_path / name), *plain, *arguments) == 1, name
        assert messages(connect) == []


def test_no_rows(
    spark: "SparkSession", spark_dsn: str, connect: Connect, flights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ["--where", "number > 3", "--topic", "t", "--name", "n", "--dsn", spark_dsn]
    assert run(send.command, str(flights), *nothing) == 0
    assert "There were no rows to send." in capsys.readouterr().out
    assert messages(connect) == []


WRONG: list[tuple[list[str], int, str]] = [
    (["--key", "no_such_column"], 1, "no_such_column"),
    (["--topic", "not a topic"], 1, "Topic 'not a topic' is not valid"),
    (["--option", "sep"], 2, "--option sep is not NAME=VALUE"),
    (["--columns", "number int, tail_number int, day date"], 1, "MALFORMED_RECORD_IN_PARSING"),
    (["--dsn", "postgresql://me:secret@127.0.0.1/x"], 2, "The option dsn holds a password"),
    (["--dsn-variable", "ORDERS_DB"], 2, "--dsn-variable and --dsn name two databases"),
    (["--schema", "nowhere"], 1, "There is no Mailroom schema 'nowhere' in this database"),
]


def test_what_is_wrong_is_told_in_one_line(
    spark: "SparkSession", spark_dsn: str, connect: Connect, flights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["--topic", "t", "--name", "n", "--dsn", spark_dsn]
    for arguments, code, told in WRONG:
        assert run(send.command, str(flights), *plain, *arguments) == code
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
        assert "secret" not in error
        assert messages(connect) == []


def test_format_has_to_be_known(spark_dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(send.command, str(tmp_path), "--topic", "t", "--name", "n", "--dsn", spark_dsn) == 2
    assert "give --format, one of csv, json, parquet, orc" in capsys.readouterr().err


def test_sweep(spark_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    stage(Node(dsn=spark_dsn), SparkBatch("job"), SHAPE, batches(0, 10))
    assert run(sweep.command, "--dsn", spark_dsn) == 0
    assert "Dropped 0 staging tables." in capsys.readouterr().out
    assert run(sweep.command, "--dsn", spark_dsn, "--abandoned-after-h", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"dropped": 1}
    assert run(sweep.command, "--dsn", spark_dsn, "--give-up", "job") == 0
    assert "Gave up 0 messages of 'job'. All others of it are in the outbox." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["send", "sweep", "drain", "audit"])
def test_jobs_run_as_modules(name: str) -> None:
    shown = subprocess.run([sys.executable, "-m", f"spark_jobs.{name}", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert f"Usage: python -m spark_jobs.{name}" in shown.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", f"spark_jobs.{name}", "--no-such-option"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mailroom: error: No such option")
