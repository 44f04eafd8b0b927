"""compose.yaml and the Dockerfile hold together, and what they run exists; no container engine is needed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from zipfile import ZipFile

import click
import pytest
import yaml
from click.testing import CliRunner

from mailroom.cli.root import root as mailroom_command
from mailroom.health import Health
from mailroom.metrics.endpoint import Endpoint
from tests.support.kafka import POM, cluster_id, format_storage, kafka_jars, properties
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
NODE = [name for name in OURS if SERVICES[name]["image"] == "mailroom"]
SPARK = [name for name in OURS if SERVICES[name]["image"] == "mailroom-spark"]
PASSWORD_FROM_OUTSIDE = re.compile(r"\$\{POSTGRES_PASSWORD:\?[^}]+\}")


def dockerfile() -> list[list[tuple[str, str]]]:
    """The instructions and their arguments, by build stage."""
    stages: list[list[tuple[str, str]]] = []
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            instruction, _, arguments = line.partition(" ")
            if instruction == "FROM":
                stages.append([])
            stages[-1].append((instruction, arguments.strip()))
    return stages


def stage_named(name: str) -> list[tuple[str, str]]:
    """The build stage that a service names as its target."""
    [stage] = [stage for stage in dockerfile() if stage[0][1].endswith(f" AS {name}")]
    return stage


def arguments_of(instruction: str, stage: list[tuple[str, str]]) -> list[str]:
    return [arguments for name, arguments in stage if name == instruction]


def health_check(service: str) -> str:
    """The service's health check as a shell would be given it."""
    kind, *words = SERVICES[service]["healthcheck"]["test"]
    assert kind in ("CMD", "CMD-SHELL")
    return str(words[0]) if kind == "CMD-SHELL" else shlex.join(words)


def parsed_by_mailroom(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[click.Command]:
    """Return the groups and the command that the command line reaches for these words; wrong words fail the test."""
    reached: list[click.Command] = []
    monkeypatch.setattr(click.Command, "invoke", lambda command, _context: reached.append(command))
    result = CliRunner().invoke(mailroom_command, words)
    assert result.exit_code == 0, result.output
    return reached


@pytest.mark.parametrize("service", NODE)
def test_command_of_a_service_exists(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_groups, command = parsed_by_mailroom(SERVICES[service]["command"], monkeypatch)
    assert command.name == [word for word in SERVICES[service]["command"] if word.isalpha()][-1]
    assert command.short_help != "(not available here)"


def test_health_check_of_the_dispatcher_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(health_check("dispatcher"))
    assert program == "mailroom"
    assert parsed_by_mailroom(words, monkeypatch)[-1].name == "health"


@pytest.mark.parametrize("ready", [True, False])
def test_dispatcher_is_healthy_while_it_says_that_it_is_ready(ready: bool) -> None:
    class Lane:
        def health(self) -> Health:
            return Health("dispatcher", "standing by", ready, True, datetime.now(UTC))

    _, *words = shlex.split(health_check("dispatcher"))
    with Endpoint("127.0.0.1:0", [Lane()], []) as endpoint:
        found = CliRunner().invoke(mailroom_command, words, env={"MAILROOM_METRICS": f"127.0.0.1:{endpoint.port}"})
    assert found.exit_code == (0 if ready else 1)


def test_dispatcher_has_a_standby() -> None:
    assert SERVICES["dispatcher"]["deploy"]["replicas"] >= 2


def test_what_a_service_depends_on_exists_and_can_be_waited_for() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, name
            wanted = {"service_healthy": "healthcheck", "service_completed_successfully": "command"}
            assert wanted[how["condition"]] in SERVICES[other], name
    assert SERVICES["dispatcher"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert "restart" not in SERVICES["migrate"]


def test_every_volume_is_declared_and_used() -> None:
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert used == set(COMPOSE["volumes"])


def test_services_find_the_database_that_the_server_makes() -> None:
    server = SERVICES["postgres"]["environment"]
    for name in set(OURS) - {"spark-master"}:
        ours = SERVICES[name]["environment"]
        assert ours["PGHOST"] in SERVICES
        assert (ours["PGUSER"], ours["PGDATABASE"]) == (server["POSTGRES_USER"], server["POSTGRES_DB"])
        assert ours["PGPASSWORD"] == server["POSTGRES_PASSWORD"]


def test_no_password_stands_in_the_file() -> None:
    found = [
        value
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if "PASSWORD" in name or "DSN" in name
    ]
    # The master runs nobody's code, and is not told; nor is Kafka.
    assert len(found) == len(SERVICES) - 2
    assert "environment" not in SERVICES["spark-master"]
    assert not any("PASSWORD" in name for name in SERVICES["kafka"]["environment"])
    assert all(PASSWORD_FROM_OUTSIDE.fullmatch(value) for value in found)


def test_services_are_given_time_to_stop_cleanly() -> None:
    assert int(SERVICES["dispatcher"]["stop_grace_period"].removesuffix("s")) > 10


def test_everything_the_image_copies_exists() -> None:
    for stage in dockerfile():
        for copy in arguments_of("COPY", stage):
            *sources, _target = shlex.split(copy)
            assert all((ROOT / source).exists() for source in sources), copy


def test_image_is_built_from_all_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "README.md", "LICENSE"}
    build = stage_named("build")
    assert needed == {source for copy in arguments_of("COPY", build) for source in shlex.split(copy)[:-1]}


def test_what_a_build_makes_that_names_no_target_is_the_command() -> None:
    assert dockerfile()[-1] == stage_named("mailroom")
    # The exec form: with a shell in between, SIGTERM would not reach the program.
    assert arguments_of("ENTRYPOINT", stage_named("mailroom")) == ['["mailroom"]']


@pytest.mark.parametrize("name", ["mailroom", "spark"])
def test_image_runs_as_nobody_special_and_hears_sigterm(name: str) -> None:
    stage = stage_named(name)
    assert [user for user in arguments_of("USER", stage) if user in ("root", "0")] == []
    assert len(arguments_of("USER", stage)) == 1
    assert arguments_of("STOPSIGNAL", stage) == ["SIGTERM"]
    assert all(command.startswith("[") for command in arguments_of("CMD", stage))


def test_every_service_is_built_from_a_stage_that_it_names() -> None:
    assert sorted(NODE + SPARK) == sorted(OURS)
    for names, target in ((NODE, "mailroom"), (SPARK, "spark")):
        for name in names:
            assert SERVICES[name]["build"] == {"context": ".", "target": target}
            assert stage_named(target)


# -- Spark -----------------------------------------------------------------------------------------------------------


def test_spark_is_there_only_for_who_asks_for_it() -> None:
    assert {name: SERVICES[name]["profiles"] for name in SPARK} == {
        "spark-master": ["spark"],
        "spark-worker": ["spark"],
        "spark-submit": ["spark-submit"],  # not by `up`, which would take it for a service that has died
    }
    assert all("profiles" not in SERVICES[name] for name in SERVICES if name not in [*SPARK, "kafka"])
    assert "java" not in " ".join(arguments_of("RUN", stage_named("mailroom")))
    assert "[spark]" not in " ".join(arguments_of("RUN", stage_named("mailroom")))


def test_workers_and_drivers_find_the_master_by_the_name_it_gives_itself() -> None:
    master = SERVICES["spark-master"]["command"]
    host = master[master.index("--host") + 1]
    assert host in SERVICES
    url = f"spark://{host}:7077"
    assert SERVICES["spark-worker"]["command"][-1] == url
    assert SERVICES["spark-submit"]["entrypoint"] == ["spark-submit", "--master", url]
    assert SERVICES["spark-worker"]["deploy"] == {"replicas": 2}


@pytest.mark.parametrize("service", ["spark-master", "spark-worker"])
def test_what_spark_runs_is_in_spark(service: str) -> None:
    pyspark = pytest.importorskip("pyspark", reason="the extra spark is not installed")
    program, name, *_ = SERVICES[service]["command"]
    home = Path(pyspark.__file__).parent
    assert (home / "bin" / program).is_file()
    jars = (home / "jars").glob("spark-core_*.jar")
    assert any(f"{name.replace('.', '/')}.class" in ZipFile(jar).namelist() for jar in jars)


def test_spark_keeps_running_and_its_job_runs_once() -> None:
    for name in ("spark-master", "spark-worker"):
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert "healthcheck" in SERVICES[name]
    assert "restart" not in SERVICES["spark-submit"]


class Page(BaseHTTPRequestHandler):
    """What a master or a worker of Spark tells of itself."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/json/" else 404)
        self.end_headers()
        self.wfile.write(str(self.server.told).encode())  # type: ignore[attr-defined]

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("service", "told", "healthy"),
    [
        ("spark-master", '{"status": "ALIVE"}', True),
        ("spark-master", '{"status": "STANDBY"}', False),
        ("spark-master", None, False),
        ("spark-worker", "{}", True),
        ("spark-worker", None, False),
    ],
)
def test_spark_is_healthy_while_it_answers(service: str, told: str | None, healthy: bool) -> None:
    kind, program, *arguments, script = SERVICES[service]["healthcheck"]["test"]
    assert (kind, program, arguments) == ("CMD", "python", ["-c"])
    port = {"spark-master": 8080, "spark-worker": 8081}[service]
    assert script.count(f":{port}/") == 1
    script = re.sub(r"timeout=\d+", f"timeout={WITHIN_S}", script)  # this machine may be busy

    def checked(at: int) -> "subprocess.CompletedProcess[bytes]":
        command = [sys.executable, "-c", script.replace(f":{port}/", f":{at}/")]
        return subprocess.run(command, capture_output=True, check=False)

    if told is None:
        done = checked(free_port())
    else:
        with HTTPServer(("127.0.0.1", 0), Page) as server:
            server.told = told  # type: ignore[attr-defined]
            answering = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            answering.start()
            done = checked(server.server_port)
            server.shutdown()
            answering.join()
    assert (done.returncode == 0) is healthy, done.stderr


# -- Kafka -----------------------------------------------------------------------------------------------------------


def listeners(name: str) -> dict[str, str]:
    """The addresses of Kafka's listeners in one of its settings."""
    listed = SERVICES["kafka"]["environment"][name].split(",")
    return {listener: address for listener, _, address in (each.partition("://") for each in listed)}


def test_kafka_is_there_only_for_who_asks_for_it_and_keeps_running() -> None:
    kafka = SERVICES["kafka"]
    assert kafka["profiles"] == ["kafka"]
    assert kafka["restart"] == "unless-stopped"
    [volume] = kafka["volumes"]
    assert volume == f"kafka:{kafka['environment']['KAFKA_LOG_DIRS']}"


def test_kafka_is_found_by_services_and_by_this_machine() -> None:
    settings = SERVICES["kafka"]["environment"]
    advertised, bound = listeners("KAFKA_ADVERTISED_LISTENERS"), listeners("KAFKA_LISTENERS")
    assert advertised["SERVICES"] == f"kafka{bound['SERVICES']}"
    [published] = SERVICES["kafka"]["ports"]
    assert published == f"127.0.0.1:{advertised['MACHINE'].removeprefix('localhost:')}{bound['MACHINE']}"
    # Not for the other services: a client that reaches the controller can change the cluster.
    assert settings["KAFKA_CONTROLLER_QUORUM_VOTERS"] == f"1@{bound['CONTROLLER']}"
    assert bound["CONTROLLER"].startswith("localhost:")
    assert shlex.split(health_check("kafka"))[-1] == f"localhost{bound['SERVICES']}"


def test_kafka_is_the_one_that_is_tested() -> None:
    assert f"<version>{SERVICES['kafka']['image'].removeprefix('apache/kafka:')}</version>" in POM.read_text()


@pytest.mark.slow  # so that it runs where `make kafka` has been
def test_kafka_accepts_its_settings(tmp_path: Path) -> None:
    if kafka_jars() is None:
        pytest.skip("Apache Kafka or Java is not installed: Java 17 and make kafka")
    given = SERVICES["kafka"]["environment"] | {"KAFKA_LOG_DIRS": str(tmp_path / "data")}
    # As its image names them.
    settings = {name.removeprefix("KAFKA_").replace("_", ".").lower(): str(value) for name, value in given.items()}
    file = tmp_path / "server.properties"
    file.write_text(properties(settings).replace("${KAFKA_PORT:-9092}", "9092"))
    format_storage(file, cluster_id())
    assert (tmp_path / "data" / "meta.properties").exists()


def test_files_of_jobs_are_the_same_everywhere_and_belong_to_who_writes_them() -> None:
    assert SERVICES["spark-worker"]["volumes"] == SERVICES["spark-submit"]["volumes"] == ["files:/files"]
    assert any("--owner=mailroom /files" in command for command in arguments_of("RUN", stage_named("spark")))


def test_ports_are_published_to_this_machine_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)
    # A client that reaches the master's own port can run code as the workers do.
    assert not any(port.endswith(":7077") for port in published)


def _docker_has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _docker_has_compose(), reason="docker has no compose plugin on this machine")
@pytest.mark.parametrize("profile", [[], ["--profile", "spark"], ["--profile", "kafka"], ["--profile", "*"]])
@pytest.mark.parametrize(("password", "accepted"), [("secret", True), ("", False)])
def test_docker_accepts_the_file_once_there_is_a_password(password: str, accepted: bool, profile: list[str]) -> None:
    done = subprocess.run(
        ["docker", "compose", "--file", "compose.yaml", *profile, "config", "--quiet"],
        cwd=ROOT,
        env=os.environ | {"POSTGRES_PASSWORD": password},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is accepted, done.stderr
