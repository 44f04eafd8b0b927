"""JDBC: where the driver is found, and what connection strings are for it."""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from mailroom.errors import ConfigurationError
from spark_jobs import jdbc
from spark_jobs.jdbc import check_driver, has_driver, jdbc_config, jdbc_jar, jdbc_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLES = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGSSLMODE", "PGSERVICE")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parts(text: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return where the URL leads, its parameters, and the other options."""
    options = jdbc_options(text)
    url = urlsplit(options.pop("url").removeprefix("jdbc:"))
    assert options.pop("driver") == "org.postgresql.Driver"
    return f"{url.netloc}{url.path}", {name: value for name, [value] in parse_qs(url.query).items()}, options


# -- The driver -------------------------------------------------------------------------------------------------------


def test_jar_that_is_named_goes_before_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debians, named = tmp_path / "debian.jar", tmp_path / "named.jar"
    monkeypatch.setattr(jdbc, "DEBIANS_JAR", debians)
    assert (jdbc_jar({}), jdbc_config({})) == (None, {})
    debians.touch()
    named.touch()
    assert jdbc_jar({}) == debians
    assert jdbc_config({"MAILROOM_JDBC_JAR": str(named)}) == {"spark.jars": str(named)}


def test_jar_that_is_named_and_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"MAILROOM_JDBC_JAR names .*gone\.jar, which is no file"):
        jdbc_jar({"MAILROOM_JDBC_JAR": str(tmp_path / "gone.jar")})


def test_session_has_the_driver_if_a_jar_is_found(spark: "SparkSession") -> None:
    assert has_driver(spark) is (jdbc_jar() is not None)


def test_driver_that_cannot_be_loaded_is_told_with_where_to_get_it(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jdbc, "DRIVER", "org.postgresql.NoDriver")
    with pytest.raises(ConfigurationError, match=r"libpostgresql-jdbc-java.*spark\.jars\.packages=org\.postgresql:"):
        check_driver(spark)


# -- Connection strings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ada:p%40ss%26word@db:5433/shop?sslmode=verify-full&sslrootcert=/etc/root%20ca.crt",
        "host=db port=5433 dbname=shop user=ada password=p@ss&word sslmode=verify-full sslrootcert='/etc/root ca.crt'",
        "postgresql+psycopg://ada:p%40ss%26word@db:5433/shop?sslmode=verify-full&sslrootcert=/etc/root%20ca.crt",
    ],
)
def test_server_and_its_tls_are_in_the_url_and_the_password_is_not(text: str) -> None:
    server, parameters, others = parts(text)
    assert server == "db:5433/shop"
    assert parameters == {
        "sslmode": "verify-full",
        "sslrootcert": "/etc/root ca.crt",
        "targetServerType": "primary",
        "ApplicationName": "mailroom spark jdbc",
    }
    assert others == {"user": "ada", "password": "p@ss&word"}
    assert "word" not in jdbc_options(text)["url"]


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("host=a,b,c port=1,2,3 dbname=shop", "a:1,b:2,c:3/shop"),
        ("host=a,b port=5433 dbname=shop", "a:5433,b:5433/shop"),
        ("host=a,b dbname=shop", "a:5432,b:5432/shop"),
        ("host=::1 dbname=shop", "[::1]:5432/shop"),
        ("hostaddr=192.0.2.1 dbname=shop", "192.0.2.1:5432/shop"),
        ("host=db hostaddr=192.0.2.1 dbname=shop", "db:5432/shop"),
        ("host=db user=ada", "db:5432/ada"),
        ("host=db dbname='a b/c?'", "db:5432/a%20b%2Fc%3F"),
    ],
)
def test_hosts_ports_and_database(text: str, server: str) -> None:
    assert parts(text)[0] == server


@pytest.mark.parametrize(
    ("attrs", "kind"),
    [
        ("any", "any"),
        ("read-write", "primary"),
        ("primary", "primary"),
        ("read-only", "secondary"),
        ("standby", "secondary"),
        ("prefer-standby", "preferSecondary"),
    ],
)
def test_kind_of_server_is_passed_on(attrs: str, kind: str) -> None:
    assert parts(f"host=a,b target_session_attrs={attrs}")[1]["targetServerType"] == kind


def test_what_is_left_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("db", "", "5433", "shop", "ada", "secret", "require"), strict=False):
        monkeypatch.setenv(name, value)
    server, parameters, others = parts("application_name=nightly")
    assert (server, parameters["sslmode"], parameters["ApplicationName"]) == ("db:5433/shop", "require", "nightly")
    assert others == {"user": "ada", "password": "secret"}
    assert parts("host=other user=bob")[0] == "other:5433/shop"


def test_service_is_left_to_the_driver_and_only_the_password_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("PGPASSWORD", "secret")
    options = jdbc_options("service=orders")
    assert options["url"].startswith("jdbc:postgresql://?service=orders&")
    assert "elsewhere" not in options["url"]
    assert options.keys() == {"driver", "url", "password"}
    assert jdbc_options("service=orders dbname=shop")["url"].startswith("jdbc:postgresql:shop?service=orders&")


@pytest.mark.parametrize(
    "text", ["host=/var/run/postgresql dbname=shop", "host=@socket", "dbname=shop", "host=db,/tmp", "host=db,"]
)
def test_host_that_is_no_tcp_host_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match="JDBC reaches a server by TCP only"):
        jdbc_options(text)


def test_other_number_of_ports_than_hosts_is_told() -> None:
    with pytest.raises(ConfigurationError, match="names 3 hosts and 2 ports"):
        jdbc_options("host=a,b,c port=1,2")


@pytest.mark.parametrize("parameter", ["channel_binding=require", "require_auth=scram-sha-256", "sslcrl=/etc/crl"])
def test_parameter_that_the_driver_lacks_is_told_and_not_dropped(parameter: str) -> None:
    with pytest.raises(ConfigurationError, match=f"has no parameter {parameter.partition('=')[0]}"):
        jdbc_options(f"host=db password=secret {parameter}")


def test_what_only_tunes_the_connection_is_dropped() -> None:
    assert parts("host=db keepalives_idle=5 client_encoding=utf8")[1].keys() == {"targetServerType", "ApplicationName"}
