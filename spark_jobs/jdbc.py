"""Spark's JDBC and PostgreSQL: where the driver comes from, and what a connection string is for it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from psycopg import conninfo, pq

from mailroom.errors import ConfigurationError
from mailroom.settings import dsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = "org.postgresql.Driver"
JAR_VARIABLE = "MAILROOM_JDBC_JAR"
DEBIANS_JAR = Path("/usr/share/java/postgresql.jar")
PACKAGE = "org.postgresql:postgresql:42.7.13"
HOW_TO_GET_IT = (
    f"Install it (Debian: apt-get install libpostgresql-jdbc-java), or name its jar in {JAR_VARIABLE}, or let Spark "
    f"load it: spark.jars.packages={PACKAGE}; with spark-submit, --jars or --packages. It has to be named before the "
    "session starts."
)

# Of libpq's parameters, those that say which server and how, by the names that the driver has for them.
PASSED = {
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "gssencmode": "gssEncMode",
    "krbsrvname": "kerberosServerName",
    "connect_timeout": "connectTimeout",
    "application_name": "ApplicationName",
    "options": "options",
    "service": "service",
}
SERVERS = {
    "any": "any",
    "read-write": "primary",
    "primary": "primary",
    "read-only": "secondary",
    "standby": "secondary",
    "prefer-standby": "preferSecondary",
}
SECRET = {"password": "password", "sslpassword": "sslpassword"}
ADDRESS = ("host", "hostaddr", "port", "dbname", "user", "target_session_attrs")
# What the driver does its own way, and nothing is less safe by it.
OWN_WAY = (
    "client_encoding",
    "fallback_application_name",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "load_balance_hosts",
    "passfile",
    "tcp_user_timeout",
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


def has_driver(spark: "SparkSession") -> bool:
    """Tell whether the session's JVM can load PostgreSQL's JDBC driver, as Spark's own writer would."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    jvm: Any = spark._jvm
    registry = jvm.org.apache.spark.sql.execution.datasources.jdbc.DriverRegistry
    try:
        registry.register(DRIVER)
    except Py4JJavaError as error:
        if "ClassNotFoundException" in str(error.java_exception):
            return False
        raise
    return True


def check_driver(spark: "SparkSession") -> None:
    """Raise `ConfigurationError`, which says how to get the driver, unless the session can load it."""
    if not has_driver(spark):
        raise ConfigurationError(f"Spark has no JDBC driver for PostgreSQL. {HOW_TO_GET_IT}")


def jdbc_options(connection_string: str) -> dict[str, str]:
    """Return the options of Spark's `format("jdbc")` for a libpq connection string or URL, but for the table.

    What the string leaves out comes from libpq's environment (PGHOST, PGPASSWORD, ...). A service the driver looks up
    itself, as it does passwords in ~/.pgpass; beside one, only PGPASSWORD of the environment counts. The password is an
    option of its own and not in the URL; Spark hides both in plans and logs. Of several hosts the primary is meant.
    Raises `ConfigurationError` for a host that is the directory of a Unix socket, and for a parameter that the driver
    lacks.
    """
    given = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn(connection_string)).items()}
    unknown = sorted(set(given) - {*PASSED, *SECRET, *ADDRESS, *OWN_WAY})
    if unknown:
        raise ConfigurationError(
            f"PostgreSQL's JDBC driver has no parameter {unknown[0]}. Leave it out of the connection string for Spark, "
            "if the connection is safe without it."
        )
    around = _environment()
    if "service" in given:
        around = {name: value for name, value in around.items() if name in SECRET}
    known = around | given
    parameters = {PASSED[name]: value for name, value in known.items() if name in PASSED}
    parameters["targetServerType"] = _servers(known.get("target_session_attrs", "read-write"))
    parameters.setdefault("ApplicationName", "mailroom spark jdbc")
    options = {"driver": DRIVER, "url": f"jdbc:postgresql:{_address(known)}?{urlencode(parameters, quote_via=quote)}"}
    return options | {name: known[name] for name in ("user", *SECRET) if name in known}


def _environment() -> dict[str, str]:
    """What libpq's environment says and is not merely built in."""
    options = pq.Conninfo.get_defaults()
    return {
        option.keyword.decode(): option.val.decode()
        for option in options
        if option.val and option.val != option.compiled
    }


def _servers(wanted: str) -> str:
    if wanted not in SERVERS:
        raise ConfigurationError(f"target_session_attrs is none of {', '.join(SERVERS)}.")
    return SERVERS[wanted]


def _address(known: Mapping[str, str]) -> str:
    database = quote(known.get("dbname", known.get("user", "")), safe="")
    hosts = known.get("host") or known.get("hostaddr")
    if hosts is None and "service" in known:
        return database or "//"
    names = (hosts or "").split(",")
    if not all(names) or any(name.startswith(("/", "@")) for name in names):
        raise ConfigurationError(
            "JDBC reaches a server by TCP only, and the connection string names no host, or the directory of a Unix "
            "socket. Name the host, such as host=localhost."
        )
    ports = known.get("port", "5432").split(",")
    if len(ports) == 1:
        ports *= len(names)
    if len(ports) != len(names):
        raise ConfigurationError(f"The connection string names {len(names)} hosts and {len(ports)} ports.")
    pairs = zip((f"[{name}]" if ":" in name else name for name in names), ports, strict=True)
    return f"//{','.join(f'{name}:{port or 5432}' for name, port in pairs)}/{database}"
