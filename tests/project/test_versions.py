"""What is supported is said once, on docs/reference/versions.md, and is what the project's files say."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from mailroom.bridges.broker import broker_of, brokers
from mailroom.embedded import SUPPORTED_MAJORS
from tests.release.supported import MINORS
from tests.support.nats import nats_program
from tests.support.rabbitmq import rabbitmq_program
from tests.wheel.environment import lower_bound

ROOT = Path(__file__).parents[2]
[PAGE] = (ROOT / "docs").rglob("versions.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORTED = {
    cells[1].strip(): cells[2].strip()
    for line in PAGE.read_text().splitlines()
    if len(cells := line.split("|")) == 5 and cells[1].strip()
}
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def bound(text: str) -> Version:
    return lower_bound(Requirement(text))


def requirement(name: str) -> str:
    every = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    return next(str(each) for each in every if Requirement(each).name == name)


def test_versions_of_python_are_those_of_the_classifiers_and_of_a_release() -> None:
    named = SUPPORTED["Python"].split(", ")
    prefix = "Programming Language :: Python :: "
    assert tuple(named) == MINORS
    assert [f"{prefix}{minor}" for minor in named] == [each for each in PROJECT["classifiers"] if f"{prefix}3." in each]
    assert PROJECT["requires-python"] == f">={named[0]}"
    [set_up] = [step for step in WORKFLOW["jobs"]["check"]["steps"] if "setup-python" in step.get("uses", "")]
    assert set_up["with"]["python-version"].split() == named


def test_versions_of_postgresql_are_those_that_the_doctor_expects() -> None:
    assert SUPPORTED["PostgreSQL"] == ", ".join(map(str, SUPPORTED_MAJORS))


def test_lower_bounds_of_libraries_are_those_of_the_project() -> None:
    for library in ("psycopg", "SQLAlchemy", "Django"):
        assert SUPPORTED[library].removeprefix("from ").partition(",")[0] == str(bound(requirement(library.lower())))
    first, *_, last = SUPPORTED["Spark"].split(", ")
    specifier = Requirement(requirement("pyspark")).specifier
    assert f"{first}.0" in specifier
    assert f"{last}.9" in specifier
    assert f"4.{int(last.partition('.')[2]) + 1}.0" not in specifier


def test_brokers_say_the_versions_of_the_clients_of_their_extras_and_of_the_servers_that_their_tests_run() -> None:
    for broker in brokers():
        library, _, lowest = broker.tested.partition(", ")[2].partition(" from ")
        assert lowest == str(bound(requirement(library))), broker.name
    image = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["kafka"]["image"].partition(":")[2]
    assert f"<version>{image}</version>" in (ROOT / "tests" / "support" / "kafka.pom.xml").read_text()
    assert _server("kafka") == _minor(image)


@pytest.mark.slow  # so that it runs where `make brokers` has been
def test_brokers_say_the_versions_of_the_installed_servers_that_their_tests_run() -> None:
    rabbitmq, nats = rabbitmq_program(), nats_program()
    if rabbitmq is None or nats is None:
        pytest.skip("RabbitMQ or NATS is not installed: make brokers")
    version = subprocess.run([nats, "--version"], capture_output=True, text=True, check=True).stdout
    assert _server("nats") == _minor(version)
    assert _server("rabbitmq") == _minor(str(Path(rabbitmq).resolve()))


def _server(broker: str) -> str:
    return _minor(broker_of(broker).tested.partition(",")[0])


def _minor(text: str) -> str:
    found = re.search(r"\d+\.\d+", text)
    assert found is not None, text
    return found[0]


def test_a_release_is_checked_before_it_is_uploaded_and_keeps_no_secret() -> None:
    check, publish = WORKFLOW["jobs"]["check"], WORKFLOW["jobs"]["publish"]
    assert any("make release-check" in step.get("run", "") for step in check["steps"])
    assert publish["needs"] == "check"
    assert publish["permissions"]["id-token"] == "write"
    assert "id-token" not in check["permissions"]
    [upload] = [step for step in publish["steps"] if "gh-action-pypi-publish" in step["uses"]]
    assert upload["with"]["attestations"] is True
    assert not any(word in str(WORKFLOW) for word in ("secrets.", "password", "token:"))
    for step in (*check["steps"], *publish["steps"]):
        assert "@" in step.get("uses", "@")
        assert not step.get("uses", "").endswith(("@main", "@master"))
