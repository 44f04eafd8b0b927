"""An archive of the classes that Spark loads when it starts, for each Java that the tests start.

Java reads, checks and links thousands of classes before a first query has run. From an archive (class-data sharing) a
session with two small queries takes 14 s of a processor instead of 25. It changes nothing of what runs: Java passes
over an archive of other classes, or of another Java.

`python -m tests.spark.java_archive` makes it, if there is none for this Java: it records a session, for half a minute.
Without an archive the tests are slower.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).parents[2] / ".cache"


def make(options: str) -> None:
    """Make the archive for Javas with these options, if there is none and there is a Java."""
    archive = _place(options)
    if not archive.exists():
        HOME.mkdir(exist_ok=True)
        for other in HOME.glob("java-*.jsa"):
            other.unlink()
        _record(options, archive)


def found(options: str) -> str:
    """Return what a Java with these options needs to use the archive; "" if there is none."""
    if find_spec("pyspark") is None:  # the extra spark is not installed
        return ""
    archive = _place(options)
    # Else a Java that passes over the archive says so on its output.
    return f"-Xlog:disable -XX:SharedArchiveFile={archive}" if archive.exists() else ""


def _place(options: str) -> Path:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        version = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        version = b""  # whatever needs it will say so
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    jars = Path(spark.origin).parent / "jars"
    name = repr((version, jars, sorted(os.listdir(jars)), options)).encode()
    return HOME / f"java-{hashlib.sha256(name).hexdigest()[:16]}.jsa"


def _record(options: str, archive: Path) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as directory:
        new = Path(directory) / archive.name
        recording = f"{options} -Xlog:disable -XX:ArchiveClassesAtExit={new}"
        command = [sys.executable, "-m", "tests.spark.java_archive", "record", directory]
        # Java writes the archive after the driver has ended, and holds the output until then.
        subprocess.run(
            command, env={**os.environ, "SPARK_SUBMIT_OPTS": recording}, capture_output=True, cwd=HOME.parent
        )
        if new.exists():
            new.rename(archive)


def _session(directory: Path) -> None:
    from spark_jobs.session import spark_session

    session = spark_session("what Java loads", "local[2]")
    rows = session.range(100).selectExpr("id", "id % 3 AS third")
    rows.groupBy("third").count().collect()
    rows.write.parquet(str(directory / "rows"))
    session.read.parquet(str(directory / "rows")).orderBy("id").collect()
    session.stop()


if __name__ == "__main__":
    from tests.spark.quick import JAVA

    if sys.argv[1:2] == ["record"]:
        _session(Path(sys.argv[2]))
    else:
        make(JAVA)
