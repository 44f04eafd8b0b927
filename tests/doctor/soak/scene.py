"""The scene of the soak: a durable server, a node with roles of its own, and the processes of a small shop."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.rows import TupleRow

from mailroom.embedded import Server
from mailroom.session.settings import DSN_VARIABLE
from tests.doctor.soak.modes import HANG, VARIABLE
from tests.support import command
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S, eventually

ROOT = Path(__file__).parents[3]
SETTINGS = {"max_prepared_transactions": "5", "max_wal_size": "1GB"}
START_S = 180.0  # for all processes to start, on a busy machine
RATE = 40  # transactions a second of each writer
WRITERS = 2
DAEMONS, WORKERS = ("daemon-1", "daemon-2"), ("orders", "reports")
SHOP, BRANCH = "shop", "branch"  # the nodes
DAEMON, REAPER = "shop_daemon", "shop_reaper"
ROLES = f"""
CREATE ROLE {DAEMON} LOGIN PASSWORD 'weak';
CREATE ROLE {REAPER} LOGIN PASSWORD 'weak';
CREATE TABLE done (nth bigserial PRIMARY KEY, key text NOT NULL);
GRANT INSERT ON done TO {REAPER};
GRANT USAGE ON SEQUENCE done_nth_seq TO {REAPER};
"""
LEADER = "SELECT pid FROM mailroom.lease WHERE role = 'dispatcher' AND until > clock_timestamp()"


class Scene:
    """A node under load; a context manager."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.modes = home / "modes"
        self.schemas = ["mailroom"]
        self.ports = {name: free_port() for name in (*DAEMONS, *WORKERS)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.dsn: str  # of the schema's owner
        self.connection: psycopg.Connection[TupleRow]  # its session, in autocommit
        self._server = Server(home / "server", settings=SETTINGS)
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self.home.mkdir()
            self.home.chmod(0o755)
            self.modes.mkdir()
            self._server.start()
            closing.callback(self._server.stop)
            self.dsn = self._server.dsn()
            self.connection = closing.enter_context(psycopg.connect(self.dsn, autocommit=True))
            closing.callback(self._end_all)
            self._make_node()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def start(self) -> None:
        """Start the processes, and wait until a daemon leads and the workers have handled something."""
        for name in DAEMONS:
            self.daemon(name)
        for name in WORKERS:
            self.worker(name)
        for nth in range(WRITERS):
            self.program(f"writer-{nth}", "-m", "tests.doctor.soak.writing", str(RATE))
        eventually(lambda: self.connection.execute("SELECT FROM done LIMIT 1").fetchone() is not None, START_S)

    def daemon(self, name: str, dsn: str | None = None) -> None:
        """Start a dispatcher."""
        metrics = f"127.0.0.1:{self.ports[name]}"
        self.program(name, "-m", "mailroom", "dispatcher", "run", "--metrics", metrics, dsn=dsn or self.dsn_of(DAEMON))

    def worker(self, name: str, dsn: str | None = None) -> None:
        """Start the worker of an inbox."""
        metrics, which = f"127.0.0.1:{self.ports[name]}", f"tests.doctor.soak.reaping:{name}"
        self.program(
            name, "-m", "mailroom", "worker", "run", "--metrics", metrics, which, dsn=dsn or self.dsn_of(REAPER)
        )

    def program(self, name: str, *arguments: str, dsn: str | None = None, **environment: str) -> None:
        """Start a Python program of the scene."""
        self.end(name)
        given = {**os.environ, DSN_VARIABLE: dsn or self.dsn, VARIABLE: str(self.modes), **environment}
        with (self.home / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process, also one that is paused."""
        if (process := self.running.pop(name, None)) is not None:
            process.send_signal(how)
            process.wait(WITHIN_S)

    def signal(self, name: str, which: signal.Signals) -> None:
        """Send a signal to a process."""
        self.running[name].send_signal(which)

    def leader(self) -> str:
        """Return the name of the daemon that leads, once one of the running ones does."""

        def leading() -> str | None:
            pids = {pid for (pid,) in self.connection.execute(LEADER)}
            return next((name for name in DAEMONS if name in self.running and self.running[name].pid in pids), None)

        return eventually(leading) or ""

    def await_leader(self, name: str) -> None:
        """Wait until this daemon leads."""
        eventually(lambda: self.leader() == name)

    def execute(self, statements: str) -> None:
        """Run statements as the owner of the schema, each in a transaction of its own if it asks for none."""
        for statement in statements.split("; "):
            self.connection.execute(statement.encode())

    def done(self) -> int:
        """Return how many messages the workers have handled."""
        [(number,)] = self.connection.execute("SELECT count(*) FROM done")
        return int(number)

    def widen(self) -> None:
        """Add a second node that reads the first one over a link, with a daemon and a worker of its own."""
        self.mailroom("migrate", "--schema", BRANCH)
        self.mailroom("node", "rename", BRANCH, "--schema", BRANCH)
        self.mailroom("link", "allow", BRANCH)
        self.mailroom("link", "add", SHOP, "--schema", BRANCH)
        self.schemas.append(BRANCH)
        self.ports |= {BRANCH: free_port(), "copies": free_port()}
        metrics = f"127.0.0.1:{self.ports[BRANCH]}"
        self.program(
            BRANCH, "-m", "mailroom", "dispatcher", "run", "--schema", BRANCH, "--metrics", metrics,
            **{f"MAILROOM_DSN_{SHOP.upper()}": self.dsn},
        )  # fmt: skip
        self.mailroom("inbox", "create", "copies", "--subscribe", "order.paid", "--origin", SHOP, "--schema", BRANCH)
        self.worker("copies", self.dsn)

    def mode(self, name: str, *, on: bool) -> None:
        """Turn a mode of the handlers on or off."""
        (self.modes / name).touch() if on else (self.modes / name).unlink(missing_ok=True)

    def mailroom(self, *arguments: str) -> str:
        """Run a command of Mailroom, which must succeed, and return what it printed."""
        return command.done(*arguments, dsn=self.dsn)

    def doctor(self, *options: str, dsn: str | None = None) -> dict[str, dict[str, Any]]:
        """Return what `mailroom doctor` finds, by id."""
        done = command.mailroom("doctor", "--json", *options, dsn=dsn or self.dsn)
        assert done.exit_code in (0, 1), (done.exit_code, done.output)
        return {each["id"]: each for each in json.loads(done.stdout)}

    def dsn_of(self, role: str) -> str:
        """Return the connection string of a role."""
        parts = urlsplit(self.dsn)
        return urlunsplit(parts._replace(netloc=f"{role}:weak@{parts.netloc.rpartition('@')[2]}"))

    def sent(self, topic: str, value: str, key: str) -> None:
        """Send a message."""
        self.mailroom("outbox", "send", topic, "--key", key, "--value", json.dumps(value))

    def hold(self) -> None:
        """Have the worker of `orders` take a message whose handler does not return, and wait until it has it."""
        self.mode(HANG, on=True)
        self.sent("order.paid", HANG, "held")
        held = "SELECT FROM mailroom.worker WHERE inbox = 'orders' AND 'held' = ANY (keys)"
        eventually(lambda: self.connection.execute(held).fetchone() is not None)

    def _make_node(self) -> None:
        self.mailroom("migrate")
        self.mailroom("node", "rename", SHOP)
        self.connection.execute(ROLES)
        # Two attempts at once, so that a poisoned key is parked soon.
        self.mailroom(
            "inbox", "create", "orders", "--subscribe", "order.paid", "--max-attempts", "2", "--backoff-s", "0.1"
        )
        self.mailroom("inbox", "create", "reports", "--subscribe", "report.due")
        self.mailroom("grant", "dispatcher", DAEMON)
        self.mailroom("grant", "reaper", REAPER, "--inbox", "orders", "--inbox", "reports")
        self.mailroom("grant", "metrics", REAPER)  # the page of a worker has figures of the node
        self.mailroom("periodic", "add", "reporting", "* * * * *", "report.due")

    def _end_all(self) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                process.kill()
        for process in self.running.values():
            process.wait(WITHIN_S)
