"""Settings for a Java that lives for seconds: it is compiled less, and touches no file that only lasting ones need."""

import os

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

# Else Hadoop runs `readlink` and `chmod` some 50 times per batch of a stream, and writes a checksum beside each file.
FILES = {
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def use() -> None:
    """Let each Java that is started from here on be quick, but for the executors of a cluster."""
    for variable in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
        os.environ.setdefault(variable, JAVA)
