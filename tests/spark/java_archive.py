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
    archive, spark = _place(options), _spark()
    if archive is None or spark is None or archive.exists():
        return
    try:
        HOME.mkdir(exist_ok=True)
        _record(options, archive, spark)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"There is no archive of Java's classes, so the tests are slower: {error}\n")


def found(options: str) -> str:
    """Return what a Java with these options needs to use the archive; "" if there is none."""
    archive = _place(options)
    return _using(archive) if archive is not None and archive.exists() else ""


def _using(archive: Path) -> str:
    # Without the first, a Java that passes over the archive says so on its output.
    return f"-Xlog:disable -XX:SharedArchiveFile={archive}"


def _spark() -> Path | None:
    found = find_spec("pyspark")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _place(options: str) -> Path | None:
    """Return where the archive for this Java and these jars is, or is to be; None without Java or the extra spark."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    try:
        version = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None  # whatever needs Java will say so
    if (spark := _spark()) is None or " " in str(HOME):
        return None
    # Java compares the jars' sizes and times with those of the archive.
    jars = sorted((spark / "jars").iterdir())
    found = [(str(jar), jar.stat().st_size, int(jar.stat().st_mtime)) for jar in jars]
    return HOME / f"java-{hashlib.sha256(repr((version, found, options)).encode()).hexdigest()[:16]}.jsa"


def _record(options: str, archive: Path, spark: Path) -> None:
    with tempfile.TemporaryDirectory(dir=HOME) as directory:
        new = Path(directory) / archive.name
        recording = f"{options} -Xlog:disable -XX:ArchiveClassesAtExit={new}"
        command = [sys.executable, "-m", "tests.spark.java_archive", "record", directory]
        # Java writes the archive after the driver has ended, and holds the output until then.
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": recording}
        subprocess.run(command, env=environment, capture_output=True, cwd=HOME.parent, timeout=600, check=True)
        # With half an archive each Java would abort, and so does this one.
        environment["SPARK_SUBMIT_OPTS"] = f"{options} {_using(new)}"
        submit = [str(spark / "bin" / "spark-submit"), "--version"]
        subprocess.run(submit, env=environment, capture_output=True, timeout=600, check=True)
        for other in HOME.glob("java-*.jsa"):
            other.unlink(missing_ok=True)
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
