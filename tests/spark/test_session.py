"""The session starts, with what every one of ours sets."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mailroom.errors import ConfigurationError
from spark_jobs.session import java_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_session_runs(spark: "SparkSession") -> None:
    assert spark.range(5).count() == 5


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
