"""The wheel in clean environments: alone and with all extras; at night with each of them, and with the lowest versions.

`spark` is tried with the newest versions only: each PySpark is another 400 MB to build, and the tests of tests/spark
run on one. `dev` is what runs these tests.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.databases import Databases
from tests.wheel.conftest import LOWEST, NEWEST, Installed, at_home
from tests.wheel.environment import Environment
from tests.wheel.reader import PAGES, follow, follow_page

pytestmark = pytest.mark.timeout(1_800)

# What shares an environment runs in one process.
in_alone = pytest.mark.xdist_group("alone")
in_complete = pytest.mark.xdist_group("complete")

# What imports a library that only an extra brings: the client of a broker, or a framework.
BROKERS = tuple(f"dispatcher/bridges/{broker}/" for broker in ("kafka", "nats", "rabbitmq", "webhook"))
FRAMEWORKS = ("mailroom/django/", "mailroom/testing/django.py", "mailroom/cli/connections.py", "dispatcher/dashboard/")
# All modules of the distribution but those that begin with an argument, each imported after the ones before it.
# Migrations are alembic's to run, the plugin pytest's to load, and `models` is imported where pydantic is.
IMPORT_ALL = """
from importlib import import_module
from importlib.metadata import files
from sys import argv

for file in sorted(map(str, files("pg-mailroom"))):
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    elsewhere = "_migrations" in parts or parts[-1] in ("__main__", "models", "plugin")
    if file.endswith(".py") and not file.startswith(tuple(argv[1:])) and not elsewhere:
        import_module(".".join(parts))
        print(file)
"""

# The client by itself is not enough: its library has to load.
CLIENTS = "import confluent_kafka; confluent_kafka.libversion(); import aio_pika, httpcore, nats"

# As Spark's own look-up does it.
FORMATS = """
from importlib import import_module
from pkgutil import iter_modules

for found in iter_modules():
    if found.name.startswith("pyspark_"):
        print(import_module(found.name).DefaultSource.name())
"""


def imported(environment: Environment, *left_out: str) -> list[str]:
    return environment.run("python", "-c", IMPORT_ALL, *left_out).splitlines()


def runs_the_first_program(environment: Environment, dsn: str) -> None:
    found = imported(environment, "spark_jobs/", *FRAMEWORKS, *BROKERS)
    assert {"inbox/worker/worker.py", "mailroom/_flights/worker.py"} <= set(found)
    follow(environment, dsn)


@in_alone
def test_alone_it_runs_the_first_program(alone: Environment, empty_dsn: str) -> None:
    runs_the_first_program(at_home(alone, "first"), empty_dsn)


@in_alone
def test_with_a_framework_its_page_is_followed(installed: Installed, databases: Databases) -> None:
    """All in one environment, with the newest versions; `make release-check` has the lowest, and each Python."""
    environment = installed("django", others=["pytest", *{each for needed in PAGES.values() for each in needed}])
    for name in PAGES:
        dsn = databases.create(migrated=False)
        follow_page(at_home(environment, name), name, dsn)
        databases.drop(dsn)


@in_alone
def test_alone_it_says_which_extra_each_thing_needs(alone: Environment, empty_dsn: str) -> None:
    needs = {
        ("bench", "--only", "memory"): "bench",
        ("demo",): "demo",
        ("dashboard",): "dashboard",
    }
    for command, extra in needs.items():
        ended = alone.ended("mailroom", *command, "--dsn", empty_dsn)
        assert ended.returncode == 2
        assert f"pip install 'pg-mailroom[{extra}]'" in ended.stderr
        assert ended.stderr.count("\n") == 1
    ended = alone.ended("python", "-c", "import spark_jobs")
    assert "pip install 'pg-mailroom[spark]'" in ended.stderr
    for name in ("demo", "worker", "parked", "dispatcher"):
        assert "not available" not in alone.run("mailroom", name, "--help")


@in_alone
def test_a_user_s_program_is_checked_against_the_types_of_the_wheel(alone: Environment) -> None:
    program = shutil.copy(Path(__file__).with_name("usage.py"), alone.home)
    # No settings, and nothing of this checkout: mypy looks into the environment that it is told.
    told = alone.ended(
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", str(alone.python),
        "--cache-dir", str(alone.home / "cache"), str(program),
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr


# -- All extras --------------------------------------------------------------------------------------------------------


@in_complete
def test_with_all_extras_all_of_it_imports(complete: Environment) -> None:
    found = imported(complete)
    rooms = ("spark_jobs/drain.py", *BROKERS, *FRAMEWORKS)
    assert [room for room in rooms if not any(file.startswith(room) for file in found)] == []
    assert complete.run("python", "-c", FORMATS).split() == ["inbox", "outbox"]
    complete.run("python", "-c", CLIENTS + (", atheris" if sys.platform == "linux" else ""))


@in_complete
def test_with_all_extras_the_first_program_needs_no_server(complete: Environment) -> None:
    needs_no_server(at_home(complete, "first"))


@in_complete
def test_with_all_extras_it_measures_and_shows_flights(complete: Environment) -> None:
    measures(complete)
    shows_flights(complete)


def needs_no_server(environment: Environment) -> None:
    follow(environment)
    assert json.loads(environment.run("mailroom", "status", "--embedded", "--json"))


def measures(environment: Environment) -> None:
    told = environment.run("mailroom", "bench", "--only", "memory", "--runs", "1", "--messages", "300", "--json")
    assert {figure["measurement"] for figure in json.loads(told)["figures"]} == {"memory"}


def shows_flights(environment: Environment) -> None:
    told = json.loads(environment.run("mailroom", "demo", "--flights", "2000", "--json"))
    assert told["checks"]
    assert all(check["ok"] for check in told["checks"])


# -- Each extra by itself, and the lowest versions ---------------------------------------------------------------------

both = pytest.mark.parametrize("versions", [NEWEST, LOWEST])


@pytest.mark.nightly
def test_alone_the_lowest_versions_do(installed: Installed, empty_dsn: str) -> None:
    runs_the_first_program(installed(versions=LOWEST), empty_dsn)


@pytest.mark.nightly
@both
def test_with_embedded_the_first_program_needs_no_server(installed: Installed, versions: str) -> None:
    needs_no_server(installed("embedded", versions))


@pytest.mark.nightly
@both
def test_with_bench_it_measures(installed: Installed, versions: str) -> None:
    environment = installed("bench", versions)
    assert "pip install 'pg-mailroom[spark]'" in environment.ended("mailroom", "bench", "--only", "spark").stderr
    measures(environment)


@pytest.mark.nightly
@both
def test_with_demo_the_flights_arrive(installed: Installed, versions: str) -> None:
    shows_flights(installed("demo", versions))


@pytest.mark.nightly
def test_with_spark_all_of_it_imports(installed: Installed) -> None:
    environment = installed("spark")
    assert "spark_jobs/drain.py" in imported(environment, *FRAMEWORKS, *BROKERS)
    assert environment.run("python", "-c", FORMATS).split() == ["inbox", "outbox"]


@pytest.mark.nightly
@both
def test_with_the_extras_of_brokers_and_frameworks_all_of_it_imports(installed: Installed, versions: str) -> None:
    environment = installed("kafka,rabbitmq,nats,webhook,django,dashboard", versions)
    found = imported(environment, "spark_jobs/")
    assert all(any(file.startswith(room) for file in found) for room in (*BROKERS, *FRAMEWORKS))
    environment.run("python", "-c", CLIENTS)


@pytest.mark.nightly
@both
@pytest.mark.skipif(sys.platform != "linux", reason="atheris is for Linux")
def test_with_fuzz_there_is_atheris(installed: Installed, versions: str) -> None:
    installed("fuzz", versions).run("python", "-c", "import atheris")
