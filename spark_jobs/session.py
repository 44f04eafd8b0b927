"""The Spark session: what it needs before it starts, and what each of our sessions sets."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mailroom.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_AT_LEAST = 17
HOW_TO_GET_JAVA = (
    f"Install Java {JAVA_AT_LEAST} or later (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."
)

# PostgreSQL's JDBC driver, for Spark's own JDBC writer (`outbox_jdbc`).
DRIVER = "org.postgresql.Driver"
JAR_VARIABLE = "MAILROOM_JDBC_JAR"
DEBIANS_JAR = Path("/usr/share/java/postgresql.jar")
PACKAGE = "org.postgresql:postgresql:42.7.13"
HOW_TO_GET_JDBC = (
    f"Install it (Debian: apt-get install libpostgresql-jdbc-java), or name its jar in {JAR_VARIABLE}, or let Spark "
    f"load it: spark.jars.packages={PACKAGE}; with spark-submit, --jars or --packages. It has to be named before the "
    "session starts."
)

# Without a web page, on the loopback, with as many shuffle partitions as one machine needs.
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


def java_version(environment: Mapping[str, str] = os.environ) -> int:
    """Return the major version of the Java that Spark will start.

    Raises `ConfigurationError` if there is none, or it is too old; Spark itself only reports that its gateway exited.
    """
    home = environment.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH"))
    if java is None:
        raise ConfigurationError(f"Spark needs Java, and none was found. {HOW_TO_GET_JAVA}", code="MR-spark-needs-java")
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603 - the Java that Spark runs
    except (OSError, subprocess.SubprocessError):
        raise ConfigurationError(
            f"Spark needs Java, and {java} does not run. {HOW_TO_GET_JAVA}", code="MR-spark-needs-java"
        ) from None
    found = re.search(r'version "(?:1\.)?(\d+)', output.stderr + output.stdout)
    version = int(found[1]) if found else 0
    if version < JAVA_AT_LEAST:
        raise ConfigurationError(
            f"Spark needs Java {JAVA_AT_LEAST}, and {java} is Java {version}. {HOW_TO_GET_JAVA}",
            code="MR-spark-needs-java",
        )
    return version


def jdbc_jar(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the driver's jar: the one that MAILROOM_JDBC_JAR names, else Debian's, else None.

    Raises `ConfigurationError` if MAILROOM_JDBC_JAR names no file.
    """
    named = environment.get(JAR_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{JAR_VARIABLE} names {named}, which is not a file.", code="MR-spark-jar-missing")
        return Path(named)
    return DEBIANS_JAR if DEBIANS_JAR.is_file() else None


def jdbc_config(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a session's configuration needs for the driver: nothing if no jar is found here."""
    jar = jdbc_jar(environment)
    return {} if jar is None else {"spark.jars": str(jar.resolve())}


def spark_session(name: str, master: str | None = None, config: Mapping[str, str] | None = None) -> "SparkSession":
    """Start the session `name`, or return the existing one; it is the active one in this thread.

    Under spark-submit, that names the cluster. Elsewhere the session runs in this process, on `local[*]`, unless
    `master` names another. `config` overrides our settings, among which is PostgreSQL's JDBC driver where one is found.
    Raises `ConfigurationError` without Java 17.
    """
    java_version()
    # Otherwise executors run the PATH's python3, which may not have Mailroom.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # set by spark-submit
        master = master or "local[*]"
        builder = builder.master(master)
        # A cluster's executors could not reach a driver on the loopback.
        for key, value in {**(LOCAL if master.startswith("local") else {}), **jdbc_config()}.items():
            builder = builder.config(key, value)
    for key, value in (config or {}).items():
        builder = builder.config(key, value)
    with _interrupts_held():
        session = builder.getOrCreate()
    jvm = getattr(session, "_jvm", None)  # Spark Connect has none
    if jvm is not None:
        # A batch write finds its format in the session that is active in its thread, and a new thread has none.
        jvm.SparkSession.setActiveSession(session._jsparkSession)
    return session


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay interrupts: PySpark would forget the Java process that it has just started, which would run for ever."""
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives, nor can be set
        yield
        return
    came: list[int] = []
    before = {
        each: signal.signal(each, lambda number, _: came.append(number)) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)
