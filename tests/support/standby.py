"""A standby of the test's own server."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from mailroom.embedded import Binaries, Server
from mailroom.embedded.account import server_account
from tests.support.port import free_port
from tests.support.waiting import eventually


class Standby:
    """A server that follows `primary` until it is promoted."""

    def __init__(self, primary: Server, directory: Path, binaries: Binaries) -> None:
        self._programs = binaries.path
        self._data = directory / "data"
        self._primary = conninfo_to_dict(primary.dsn())
        self.port = free_port()
        directory.mkdir()
        account = server_account()
        self._as = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.switched else {}
        if account.switched:
            os.chown(directory, account.uid, account.gid)
        login = {name: str(self._primary[name]) for name in ("host", "port", "user", "password")}
        self._run("pg_basebackup", "-D", self._data, "-d", make_conninfo(**login), "-R", "-c", "fast", "--no-sync")
        settings = (primary.directory / "mailroom.conf").read_text()
        settings = re.sub(r"^port = .*$", f"port = '{self.port}'", settings, flags=re.MULTILINE)
        (directory / "mailroom.conf").write_text(settings)

    @property
    def dsn(self) -> str:
        """The database `mailroom` on this server."""
        return make_conninfo("", **{**self._primary, "port": self.port})

    def start(self) -> None:
        """Start it; it answers reading sessions."""
        self._run("pg_ctl", "-D", self._data, "-l", self._data.with_name("server.log"), "-w", "start")

    def recover_to(self, restore_point: str, wal: Path) -> None:
        """Start it as a server of its own that recovers to a point in time, by the WAL files in that directory."""
        (self._data / "standby.signal").rename(self._data / "recovery.signal")
        with (self._data.with_name("mailroom.conf")).open("a") as settings:
            settings.write(
                f"primary_conninfo = ''\nrestore_command = 'cp {wal}/%f %p'\n"
                f"recovery_target_name = '{restore_point}'\nrecovery_target_action = promote\n"
            )
        with (self._data / "postgresql.auto.conf").open("a") as settings:
            settings.write("primary_conninfo = ''\n")
        self.start()

    def promote(self) -> None:
        """Make a primary of it."""
        self._run("pg_ctl", "-D", self._data, "-w", "promote")

    def stop(self) -> None:
        """End it at once."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def await_replay(self, primary: psycopg.Connection[object]) -> None:
        """Wait until it has all that is committed on the primary."""
        # Of what no commit has flushed, the rest of a page may wait for long.
        primary.execute("SELECT pg_logical_emit_message(true, 'mailroom', '')")
        eventually(
            lambda: primary.execute(
                "SELECT FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_flush_lsn()"
            ).fetchall()
        )

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [self._programs / program, *map(str, arguments)],
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **self._as,  # type: ignore[call-overload]
        )


@contextlib.contextmanager
def standby_of(primary: Server, directory: Path, binaries: Binaries) -> Iterator[Standby]:
    """Give a running standby, in a directory that does not exist yet; it is stopped at the end."""
    standby = Standby(primary, directory, binaries)
    standby.start()
    try:
        yield standby
    finally:
        standby.stop()
