"""PgBouncer in transaction mode before the server, if the machine has it."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from mailroom.embedded.account import server_account

CONFIGURATION = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = transaction
max_client_conn = 200
default_pool_size = 8
server_lifetime = 5
ignore_startup_parameters = extra_float_digits,options
logfile = {log}
pidfile = {pid}
"""


class Pooler:
    """A PgBouncer of the campaign's own."""

    def __init__(self, home: Path, dsn: str, port: int) -> None:
        self._program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        parts = urlsplit(dsn)
        account = server_account()
        self._user = account.name if account.switched else None
        directory = home / "pgbouncer"
        directory.mkdir(mode=0o755)
        users = directory / "users.txt"
        users.write_text(f'"{parts.username}" "{parts.password}"\n')
        self._file = directory / "pgbouncer.ini"
        self._file.write_text(
            CONFIGURATION.format(
                host=parts.hostname, port=parts.port, own_port=port, users=users,
                log=directory / "pgbouncer.log", pid=directory / "pgbouncer.pid",
            )
        )  # fmt: skip
        if account.switched:
            for path in (directory, users, self._file):
                os.chown(path, account.uid, account.gid)
        login = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def available() -> bool:
        """Tell whether there is a PgBouncer."""
        return shutil.which("pgbouncer") is not None or Path("/usr/sbin/pgbouncer").exists()

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        command = [self._program, "-q", *(["-u", self._user] if self._user else []), str(self._file)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                psycopg.connect(self.dsn, connect_timeout=3, prepare_threshold=None).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def reload(self) -> None:
        """Have it read its configuration again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
