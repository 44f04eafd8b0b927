"""One PostgreSQL cluster in a folder: its data, settings, password, log and server process.

Nothing here checks for other processes: `Server` calls it under its lock.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from mailroom.embedded.account import Account
from mailroom.embedded.binaries import Binaries
from mailroom.errors import EmbeddedServerError

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
DATABASE = "mailroom"
# No Unix socket: its path would have to stay under about 100 bytes, and JDBC needs TCP anyway.
_OWN_SETTINGS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
_RETRY_S = 10
_LOG_TAIL_LINES = 15
# Texts in the log of a failed start that may succeed a moment later: another process has just taken the port, or
# processes of a killed server have not noticed yet that it is gone.
_PASSING = re.compile("Address already in use|pre-existing shared memory block")


@dataclass(frozen=True)
class _Postmaster:
    """A live server process, from its postmaster.pid; without a port until it is ready."""

    pid: int
    port: int | None


class Cluster:
    """The cluster in `directory`, which must exist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "data"
        self._password = directory / "password"
        self._conf = directory / "mailroom.conf"
        self._log = directory / "server.log"

    def major(self) -> int | None:
        """Return the major version that wrote the data, None if there is none yet."""
        version = self._data / "PG_VERSION"
        return int(version.read_text()) if version.exists() else None

    def dsn(self, port: int, database: str) -> str:
        """Return the URL of `database`, password included."""
        password = self._password.read_text().strip()
        return f"postgresql://postgres:{password}@127.0.0.1:{port}/{quote(database, safe='')}"

    def size(self) -> int:
        """Return the size of the folder's files in bytes, without files that disappear meanwhile."""
        total = 0
        for folder, _, files in os.walk(self._directory):
            for file in files:
                with suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, file)).st_size
        return total

    def wait_until_ready(self) -> int | None:
        """Return the port of the running server, None if none runs. Waits for one that is starting or stopping."""
        deadline = time.monotonic() + START_TIMEOUT_S
        # A process that was killed while starting or stopping it may have left it half-way.
        while (postmaster := self._postmaster()) is not None and postmaster.port is None:
            self._wait(deadline, "neither came up nor went down", START_TIMEOUT_S)
        return postmaster.port if postmaster else None

    def launch(self, binaries: Binaries, account: Account, settings: Mapping[str, str]) -> int:
        """Start the server, which must not be running, and return its port. Create data and database if missing."""
        configuration = _configuration(settings)
        if not self._data.exists():
            self._make_data(binaries, account, sync=settings.get("fsync") != "off")
        if not self._password.exists():
            raise EmbeddedServerError(
                f"{self._password} is missing, and without it no login to the data beside it is possible: "
                "bring the file back, or move the folder away to begin anew.",
                code="MR-embedded-password-missing",
            )
        try:
            port = self._run_server(binaries, account, configuration)
            self.make_database(port, DATABASE)
        except BaseException:
            self.shut_down()
            raise
        return port

    def shut_down(self) -> None:
        """Stop the server if it runs: clients are disconnected, and their open transactions rolled back."""
        if (postmaster := self._postmaster()) is None:
            return
        os.kill(postmaster.pid, signal.SIGINT)  # PostgreSQL's "fast" shutdown
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._postmaster() is not None:
            self._wait(deadline, "did not stop", STOP_TIMEOUT_S)

    def _postmaster(self) -> _Postmaster | None:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if not lines or not _is_postmaster(int(lines[0])):
            return None
        # Lines 4 and 8: the port, and the state, which is written last.
        ready = len(lines) >= 8 and lines[7].strip() == "ready"
        return _Postmaster(int(lines[0]), int(lines[3]) if ready else None)

    def _wait(self, deadline: float, failed: str, timeout_s: int) -> None:
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"The embedded server in {self._directory} {failed} in {timeout_s} s.{self._log_tail()}",
                code="MR-embedded-failed",
            )
        time.sleep(0.02)

    def _make_data(self, binaries: Binaries, account: Account, *, sync: bool) -> None:
        if not self._password.exists():
            self._write(self._password, secrets.token_urlsafe(24) + "\n", account)
        # Created under another name and then renamed, so that what a killed initdb leaves is not taken for a database.
        new = self._data.with_name("data.new")
        shutil.rmtree(new, ignore_errors=True)
        command = [binaries.path / "initdb", "-D", new, "-U", "postgres", f"--pwfile={self._password}"]
        # The same sort order and case rules on every machine; initdb would take the caller's locale.
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        if not sync:
            command.append("--no-sync")
        code, output = _run(command, account)
        if code:
            raise EmbeddedServerError(
                f"initdb failed in {self._directory}:\n{output.strip()}", code="MR-embedded-failed"
            )
        with (new / "postgresql.conf").open("a") as conf:
            conf.write(f"include_if_exists = '../{self._conf.name}'\n")
            conf.flush()
            os.fsync(conf.fileno())  # initdb has synced all it wrote; a power cut would leave zeros for this line
        new.rename(self._data)

    def _run_server(self, binaries: Binaries, account: Account, configuration: str) -> int:
        if self._log.exists():
            self._log.replace(self._log.with_name("server.log.1"))
        deadline = time.monotonic() + _RETRY_S
        while True:
            # The file is stale, since no server runs. pg_ctl and postgres would trust it if another process has this
            # process id now, or if a zombie has it: in a container whose PID 1 does not reap, a killed server stays a
            # zombie for ever.
            (self._data / "postmaster.pid").unlink(missing_ok=True)
            port = _free_port(self._last_port())
            self._write(self._conf, configuration + _configuration({**_OWN_SETTINGS, "port": str(port)}), account)
            size = self._log.stat().st_size if self._log.exists() else 0
            # Without a log file the server would keep our output open for as long as it runs.
            command = [binaries.path / "pg_ctl", "-D", self._data, "-l", self._log]
            code, output = _run([*command, "-w", "-t", START_TIMEOUT_S, "start"], account)
            if code == 0:
                return port
            log = self._log.read_bytes()[size:].decode(errors="replace") if self._log.exists() else ""
            if not _PASSING.search(log) or time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"The embedded server in {self._directory} did not start: {output.strip()}{self._log_tail()}",
                    code="MR-embedded-failed",
                )
            time.sleep(0.1)

    def _last_port(self) -> int:
        """Return the port of the previous run, so that a DSN stays valid after a restart; 0 if there was none."""
        found = re.search(r"^port = '(\d+)'$", self._conf.read_text(), re.MULTILINE) if self._conf.exists() else None
        return int(found[1]) if found else 0

    def make_database(self, port: int, database: str) -> None:
        """Create a database of the running server if it is missing."""
        try:
            with psycopg.connect(self.dsn(port, "postgres"), autocommit=True, sslmode="disable") as connection:
                found = connection.execute("SELECT FROM pg_database WHERE datname = %s", [database])
                if not found.rowcount:
                    with suppress(psycopg.errors.DuplicateDatabase):  # made by another command meanwhile
                        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        except psycopg.Error as error:
            raise EmbeddedServerError(
                f"The embedded server in {self._directory} runs but could not be used: {error}{self._log_tail()}",
                code="MR-embedded-failed",
            ) from error

    def _write(self, path: Path, text: str, account: Account) -> None:
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            if account.switched:
                os.fchown(stream.fileno(), account.uid, account.gid)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)

    def _log_tail(self) -> str:
        if not self._log.exists():
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(["", f"End of {self._log}:", *lines])


def _configuration(settings: Mapping[str, str]) -> str:
    """Return `settings` as lines of a configuration file."""
    lines = []
    for name, value in settings.items():
        if not re.fullmatch(r"[a-z][a-z0-9_.]*", name) or "\n" in value:
            raise EmbeddedServerError(
                f"{name!a} with the value {value!a} is not a setting of PostgreSQL.", code="MR-embedded-setting"
            )
        escaped = value.replace("\\", r"\\").replace("'", "''")
        lines.append(f"{name} = '{escaped}'\n")
    return "".join(lines)


def _is_postmaster(pid: int) -> bool:
    """Return whether process `pid` is alive and a PostgreSQL server: no zombie, and no other process with that id."""
    if not Path("/proc/self/cmdline").exists():  # macOS, where launchd leaves no zombies
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        # Everybody may read this, while /proc/<pid>/exe is closed even to the root of a container. Empty for a zombie.
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False
    return os.path.basename(program) == b"postgres"


def _free_port(wanted: int) -> int:
    """Return `wanted` if it is free, else a free port. Another process may still take it first."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(command: list[object], account: Account) -> tuple[int, str]:
    """Run a program of PostgreSQL as `account`; return its exit code and what it printed."""
    # A PGDATA or PGPORT for another server must not reach ours, and no password of a DSN its environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "MAILROOM_"))}
    environment["LC_ALL"] = "C"
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(  # noqa: S603
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,  # a file: a pipe that the server inherited has been seen to hang
                stderr=subprocess.STDOUT,
                cwd="/",  # which every account may enter, unlike the caller's
                env=environment,
                user=account.uid if account.switched else None,
                group=account.gid if account.switched else None,
                extra_groups=[] if account.switched else None,
                check=False,
            )
        except OSError as error:
            raise EmbeddedServerError(
                f"Cannot run {command[0]} as the user {account.name}: {error}.", code="MR-embedded-failed"
            ) from error
        output.seek(0)
        return done.returncode, output.read().decode(errors="replace")
