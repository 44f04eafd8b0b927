"""One Spark session for all tests of this directory; each test has a database of its own, as everywhere."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg import conninfo

from mailroom.embedded import find_binaries
from mailroom.errors import ConfigurationError
from tests.spark import quick
from tests.support.databases import Databases
from tests.support.kafka import Kafka, kafka_jars, spark_kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if find_spec("pyspark") is None:
    collect_ignore_glob = ["test_*.py"]  # the extra spark is not installed

quick.use()


# A test that is interrupted leaves the answer of Java's behind, and all that follow fail. It only matters if one hangs.
TIMEOUT_S = 1_800


def pytest_itemcollected(item: pytest.Item) -> None:
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.spark_session)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let all drivers have Pythons that share what they import."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYSPARK_PYTHON" not in os.environ:
            patch.setenv("PYSPARK_PYTHON", str(quick.python(tmp_path_factory.mktemp("quick"))))
        yield


@pytest.fixture(scope="session")
def password(_databases_of: Callable[[int | None], Databases], pytestconfig: pytest.Config) -> Iterator[None]:
    """Keep the server's password where libpq finds it: no option of Spark may hold one."""
    chosen = pytestconfig.getoption("pg")
    external = os.environ.get("MAILROOM_TEST_DSN")
    dsn = _databases_of(None if external else find_binaries(int(chosen) if chosen else None).major).dsn
    before = os.environ.get("PGPASSWORD")
    os.environ["PGPASSWORD"] = str(conninfo.conninfo_to_dict(dsn).get("password") or "")
    yield
    if before is None:
        del os.environ["PGPASSWORD"]
    else:
        os.environ["PGPASSWORD"] = before


@pytest.fixture(scope="session")
def spark(password: None, quick_python: None) -> "Iterator[SparkSession]":
    """The session: two threads, and a task is tried four times."""
    from spark_jobs.session import java_version, jdbc_config, spark_session

    try:
        java_version()
    except ConfigurationError as error:
        pytest.skip(str(error))
    # A source has to be named before the session starts.
    jars = [*jdbc_config().values(), *map(str, spark_kafka_jars())]
    settings = {"spark.sql.session.timeZone": "UTC", "spark.jars": ",".join(jars), **quick.FILES, **quick.QUERIES}
    session = spark_session("mailroom tests", "local[2,4]", settings)
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def spark_dsn(password: None, dsn: str) -> str:
    """The connection string of the test's database without its password."""
    parts = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo("", **{name: value for name, value in parts.items() if name != "password"})


@pytest.fixture(scope="session")
def kafka(shared_home: Path) -> Iterator[Kafka]:
    """A real Apache Kafka."""
    if find_spec("confluent_kafka") is None or kafka_jars() is None:
        pytest.skip("Apache Kafka or its client is not installed: make kafka, and the extra kafka")
    with Kafka(shared_home / "kafka-of-spark") as broker:
        yield broker
