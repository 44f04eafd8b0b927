"""Settings for a Spark that lives for seconds: its Java is compiled less, and it touches no file that only lasting
ones need; its Pythons share what they import."""

import os
import shlex
import sys
from pathlib import Path

from tests.spark import daemon

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# Else Hadoop runs `readlink` and `chmod` some 50 times per batch of a stream, and writes a checksum beside each file.
FILES = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

# Spark makes Java of each query and compiles it, for a few rows: that is half of an audit's time, of 13 such queries.
QUERIES = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def use() -> None:
    """Let each Java that is started from here on be quick, but for the executors of a cluster."""
    for variable in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
        os.environ.setdefault(variable, JAVA)


def python(directory: Path) -> Path:
    """Make a Python for PYSPARK_PYTHON whose daemon of Spark is `tests.spark.daemon`.

    `spark.python.daemon.module` does not do: it is asked for tasks, and not for what plans a query.
    """
    this, module = shlex.quote(sys.executable), shlex.quote(daemon.__file__)
    program = directory / "python"
    program.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-m pyspark.daemon" ] || exec {this} "$@"\nshift 2\nexec {this} {module} "$@"\n'
    )
    program.chmod(0o755)
    return program
