"""Processes of Spark that are killed: executors of a cluster, and the driver of a stream."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spark_jobs.node import Node
from spark_jobs.write.staging import sweep
from tests.spark.cluster import ROWS
from tests.spark.frames import ledger, sent, staging_tables
from tests.support.databases import Connect
from tests.support.waiting import eventually

TIMEOUT_S = 240


def start(dsn: str, directory: Path, scenario: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.cluster", dsn, str(directory), scenario],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(driver: "subprocess.Popen[bytes]") -> None:
    """Kill the driver and the JVM that it started, as a machine that fails does."""
    children = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # the JVM's own children end with it
            child.kill()
    driver.kill()
    driver.wait()


def finish(driver: "subprocess.Popen[bytes]") -> None:
    try:
        assert driver.wait(TIMEOUT_S) == 0
    finally:
        end(driver)


@pytest.mark.nightly  # a task that is tried again, as in test_outbox_source.py and below
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(("scenario", "fault"), [("lose_an_executor", "kill-executor"), ("speculate", "straggle")])
def test_executor_killed_and_task_run_twice(
    password: None, spark_dsn: str, connect: Connect, tmp_path: Path, scenario: str, fault: str
) -> None:
    finish(start(spark_dsn, tmp_path, scenario))
    assert not (tmp_path / fault).exists()
    assert sent(connect) == list(range(ROWS))
    assert ledger(connect) == [("job", -1, ROWS)]
    # The attempt that did not count is still at work when the job commits, or not.
    sweep(Node(dsn=spark_dsn))
    assert staging_tables(connect) == 0


@pytest.mark.nightly  # the soak kills executors, too
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_all_executors_killed_and_shuffled_otherwise(
    password: None, spark_dsn: str, connect: Connect, tmp_path: Path
) -> None:
    """A task's COMMIT landed and nobody heard of it; when all is computed anew, its rows are spread over all tasks."""
    finish(start(spark_dsn, tmp_path, "lose_all_executors"))
    assert not (tmp_path / "kill-all").exists()
    assert sorted(sent(connect)) == list(range(ROWS))
    assert ledger(connect) == [("numbers", 0, ROWS)]
    sweep(Node(dsn=spark_dsn))
    assert staging_tables(connect) == 0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_driver_killed_and_started_again(password: None, spark_dsn: str, connect: Connect, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for nth in range(8):
        file = source / f"{nth:04}.json"
        file.write_text("".join(json.dumps({"id": nth * 50 + one}) + "\n" for one in range(50)))
        os.utime(file, (nth, nth))  # Spark takes files in the order of their age
    driver = start(spark_dsn, tmp_path, "stream")
    try:
        eventually(lambda: len(ledger(connect)) >= 2 or driver.poll() is not None, TIMEOUT_S)
        assert driver.poll() is None
    finally:
        end(driver)
    assert 2 <= len(ledger(connect)) < 8
    finish(start(spark_dsn, tmp_path, "stream"))
    assert sent(connect) == list(range(400))
    # Spark notes a file in its source's log before it plans the batch. A driver killed between the two leaves the file
    # to the next batch, which then has two of them: the numbers of the batches are certain, and their sizes are not.
    batches = ledger(connect)
    assert [batch for _, batch, _ in batches] == list(range(len(batches)))
    assert sum(rows for _, _, rows in batches) == 400
    # What the killed driver had staged and not sent is an orphan, of a batch that is in the ledger by now.
    assert staging_tables(connect) == 0
