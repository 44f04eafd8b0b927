"""An archive of the classes that Spark loads when it starts, for each Java that the tests start.

Java reads, checks and links thousands of classes before a first query has run. From an archive (class-data sharing) a
session with two small queries takes 14 s of a processor instead of 25. It changes nothing of what runs: Java passes
over an archive of other classes, or of another Java.

`python -m tests.spark.java_archive DIRECTORY` is what is recorded: such a session.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).parents[2] / ".cache"


def made(options: str) -> str:
    """Return what a Java with these `options` needs to use the archive, which is made if there is none; "" if it fails.

    It takes half a minute, so whoever needs it at the same time waits.
    """
    HOME.mkdir(exist_ok=True)
    with (HOME / "java.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive = _place(options)
        if not archive.exists():
            for other in HOME.glob("java-*.jsa"):
                other.unlink()
            _record(options, archive)
    return found(options)


def found(options: str) -> str:
    """Return the same without making it: "" if there is none."""
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
        command = [sys.executable, "-m", "tests.spark.java_archive", directory]
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
    _session(Path(sys.argv[1]))
