"""PostgreSQL's JDBC driver, for Spark's own JDBC writer (`outbox_jdbc`): where a session finds it."""

import os
from collections.abc import Mapping
from pathlib import Path

from mailroom.errors import ConfigurationError

DRIVER = "org.postgresql.Driver"
JAR_VARIABLE = "MAILROOM_JDBC_JAR"
DEBIANS_JAR = Path("/usr/share/java/postgresql.jar")
PACKAGE = "org.postgresql:postgresql:42.7.13"
HOW_TO_GET_IT = (
    f"Install it (Debian: apt-get install libpostgresql-jdbc-java), or name its jar in {JAR_VARIABLE}, or let Spark "
    f"load it: spark.jars.packages={PACKAGE}; with spark-submit, --jars or --packages. It has to be named before the "
    "session starts."
)


def jdbc_jar(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the driver's jar: the one that MAILROOM_JDBC_JAR names, else Debian's, else None.

    Raises `ConfigurationError` if MAILROOM_JDBC_JAR names no file.
    """
    named = environment.get(JAR_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{JAR_VARIABLE} names {named}, which is no file.")
        return Path(named)
    return DEBIANS_JAR if DEBIANS_JAR.is_file() else None


def jdbc_config(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a session's configuration needs for the driver: nothing if no jar is found here."""
    jar = jdbc_jar(environment)
    return {} if jar is None else {"spark.jars": str(jar.resolve())}
