"""The campaign's PostgreSQL server: durable, its own, and killed in every way a server can die."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import psycopg
import sqlalchemy

from mailroom import create_inbox, create_log, schema
from mailroom.embedded import Binaries, Server
from tests.faults import ledger
from tests.faults.load import EVENT, INBOXES, LOG_ROUTES, LOGS, READERS, REFUSED, ROUTES
from tests.faults.scarcity import SlowDisk

KEEP_DAYS = 7  # of a few seconds each (`role_dispatcher.shorten`): about as many segments as one claim reads
FAILING: dict[str, Any] = {"backoff_s": 0.05, "backoff_max_s": 0.3, "max_attempts": 6}
SETTINGS = {
    "max_connections": "120", "max_prepared_transactions": "20", "track_commit_timestamp": "on",
    "wal_level": "minimal", "max_wal_senders": "0", "max_wal_size": "2GB", "shared_buffers": "192MB",
    "deadlock_timeout": "200ms", "log_line_prefix": "%m [%p] %a ", "checkpoint_timeout": "60s",
}  # fmt: skip
UP_WITHIN_S = 60.0


class Host:
    """A server in `directory`, migrated, with the inboxes and logs of the load and the ledgers."""

    def __init__(
        self, directory: Path, binaries: Binaries | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.disk: SlowDisk | None = None
        self._server = Server(directory, binaries=binaries, settings=SETTINGS | dict(settings or {}))
        self.dsn = ""  # the URL of its database, from its first start on, also while its disk is away

    def start(self) -> None:
        """Start it, or bring it back."""
        with contextlib.nullcontext() if self.disk is None else self.disk.beneath():
            self._server.start()
        self.dsn = self._server.dsn()

    def make_node(self) -> None:
        """Migrate the database and make inboxes and ledgers."""
        url = self.dsn.replace("postgresql:", "postgresql+psycopg:", 1)
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        with engine.begin() as migrating:
            schema.migrate(migrating)
        with self.session() as connection, connection.transaction():
            for name in INBOXES:
                # Poisoned keys are parked; elsewhere nothing is to be held up for long.
                topics = [EVENT] if name != "gamma" else []
                create_inbox(connection, name, topics, on_failure="park" if name == "alpha" else "skip", **FAILING)
            for log, (topic, lanes) in LOGS.items():
                create_log(connection, log, [topic, EVENT], lanes=lanes, keep_days=KEEP_DAYS)
            for name, log in READERS.items():
                create_inbox(connection, name, log=log, on_failure="park" if name == "delta" else "skip", **FAILING)
            connection.execute("INSERT INTO mailroom.subscription (topic, inbox) VALUES (%s, 'nowhere')", [REFUSED])
            ledger.create(connection, ROUTES, LOG_ROUTES)
        with self.session() as connection:
            connection.execute("CHECKPOINT")  # all of this lasts, whatever the settings promise for what comes

    @contextlib.contextmanager
    def session(self, **options: Any) -> Iterator[psycopg.Connection[Any]]:
        """Give an autocommit session of the campaign's own."""
        with psycopg.connect(
            self.dsn, autocommit=True, application_name="faults campaign", connect_timeout=10, **options
        ) as connection:
            yield connection

    def postmaster(self) -> psutil.Process:
        """Return the server's first process."""
        return psutil.Process(int((self.directory / "data" / "postmaster.pid").read_text().splitlines()[0]))

    def kill(self) -> None:
        """Kill all its processes at once, as the kernel would."""
        first = self.postmaster()
        first.suspend()  # so that it starts no further ones
        for process in [*first.children(recursive=True), first]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._await_end(first)

    def stop(self, mode: signal.Signals) -> None:
        """Stop it: SIGINT is fast, SIGQUIT immediate."""
        first = self.postmaster()
        os.kill(first.pid, mode)
        self._await_end(first)

    def await_sessions(self, timeout_s: float = UP_WITHIN_S) -> None:
        """Wait until it takes connections."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self.session() as connection:
                    connection.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def log(self) -> str:
        """Return what it has logged since it was started last, and before that."""
        paths = (self.directory / "server.log.1", self.directory / "server.log")
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def close(self) -> None:
        """Stop it for good."""
        self._server.stop()

    @staticmethod
    def _await_end(first: psutil.Process) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        # Where nobody reaps, what was killed stays a zombie.
        while first.is_running() and first.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise TimeoutError("the server did not end")
            time.sleep(0.005)
