"""The session starts, with what every one of ours sets."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mailroom.errors import ConfigurationError
from spark_jobs.session import java_version, spark_session
from tests.spark.frames import frame, sent
from tests.support.databases import Connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_session_runs(spark: "SparkSession") -> None:
    assert spark.range(5).count() == 5


def test_thread_of_its_own_writes_by_the_session_there_is(
    spark: "SparkSession", spark_dsn: str, connect: Connect
) -> None:
    """Spark looks for the format in the session of the calling thread; a new one has none."""

    def write() -> None:
        rows = (
            frame(spark_session("another"), 10)
            .write.format("outbox")
            .options(topic="numbers", idempotencyKey="job", dsn=spark_dsn)
        )
        rows.mode("append").save()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert sent(connect) == list(range(10))


def test_java_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none was found\. Install Java 17"):
        java_version({"PATH": str(tmp_path)})
    with pytest.raises(ConfigurationError, match=r"does not run\. Install Java 17"):
        java_version({"JAVA_HOME": str(tmp_path)})


def test_java_that_is_too_old_is_told(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"is Java 8\. Install Java 17"):
        java_version({"JAVA_HOME": str(tmp_path)})


def test_interrupt_waits_until_java_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    started = []

    def interrupted(builder: object) -> None:
        signal.raise_signal(signal.SIGINT)
        started.append(builder)

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spark_session("interrupted", "local[1]")
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_missing_extra_is_told(tmp_path: Path, missing: str) -> None:
    hiding = f"""
import importlib.util, runpy
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else found(name, *rest)
runpy.run_module("spark_jobs.sweep", run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", hiding], capture_output=True, text=True, env=os.environ, check=False)
    assert ran.returncode == 1
    assert "install the extra, pip install 'pg-mailroom[spark]'" in ran.stderr.splitlines()[-1]
