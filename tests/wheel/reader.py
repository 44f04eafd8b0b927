"""A reader who installed the wheel, and follows the README and the page of processes, or a page about a framework."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psycopg

from tests.project.test_docs import BELLS, SERVED, Block, ask, blocks, is_served
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S, eventually
from tests.wheel.environment import Environment

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SECTION = "## The first message\n"
# The pages about frameworks, and what each needs beside the wheel, as pip takes it; their tests need pytest.
PAGES = {
    "django.md": ["django"],
    "fastapi.md": ["fastapi", "uvicorn", "httpx", "pytest-asyncio", "sqlalchemy[asyncio]"],
    "flask.md": ["flask"],
    "litestar.md": ["litestar", "uvicorn", "httpx"],
    "asyncio.md": [],
    "celery.md": ["celery"],
}


def page(name: str) -> Path:
    """Return the page of this name, in whichever folder of docs/ it stands."""
    [found] = (ROOT / "docs").rglob(name)
    return found


def first_message() -> list[Block]:
    """Return the blocks of that section."""
    before, heading, after = README.read_text().partition(SECTION)
    assert heading
    first = before.count("\n")
    last = first + (SECTION + after.partition("\n## ")[0]).count("\n")
    return [block for block in blocks(README) if first < block.line <= last]


def follow(environment: Environment, dsn: str | None = None) -> None:
    """Do what the section says to who has a server, with the database `dsn`, or to who has none, and see it shipped."""
    if dsn is None:
        dsn = environment.run("sh", "-c", f'{_export_without_a_server()}; printf %s "$MAILROOM_DSN"')
        try:
            _follow_first_program(environment, dsn)
        finally:
            environment.run("mailroom", "embedded", "stop")
    else:
        _follow_first_program(environment, dsn)


def _export_without_a_server() -> str:
    [block] = [block for block in first_message() if block.marker == "run without a server"]
    [line] = [line for line in block.text.splitlines() if line.startswith("$ export ")]
    return line.removeprefix("$ ")


def _follow_first_program(environment: Environment, dsn: str) -> None:
    following = Following(environment, dsn, [*first_message(), *blocks(page("your-server.md"))])
    said = following.follow("SELECT order_id, items FROM shipments", [(42, ["teapot"])] * 2)
    ran = (following.ran.count("python first.py"), following.ran.count("python orders.py"), len(said))
    assert ran == (1, 1, 2), "the section is not what it was: look again"
    assert "shipped order-42" in said[1]


def follow_page(environment: Environment, name: str, dsn: str) -> None:
    """Do what a page about a framework says; at the end nothing waits, and nothing has failed."""
    following = Following(environment, dsn, blocks(page(name)))
    waits = "SELECT (SELECT count(*) FROM mailroom.outbox) + (SELECT count(*) FROM mailroom.inbox)"
    said = following.follow(f"SELECT ({waits}) + (SELECT count(*) FROM mailroom.attempt)", [(0,)])
    assert said, "the page starts nothing: look what has to be checked now"


class Following:
    """Does the blocks of a text, one after another, in an environment and on a database; `ran` has the commands."""

    def __init__(self, environment: Environment, dsn: str, blocks: Sequence[Block]) -> None:
        self._environment = environment
        self._variables = {
            "MAILROOM_DSN": dsn,
            "DATABASE_URL": dsn.replace("postgresql:", "postgresql+psycopg:", 1),
            "PYTHONPATH": str(environment.home),  # pytest would not look there
        }
        self._dsn = dsn
        self._blocks = blocks
        self._port = free_port()
        self.ran: list[str] = []

    def follow(self, query: str, expected: list[object]) -> list[str]:
        """Do the blocks, wait until `query` answers as `expected`, and return what each started process has said."""
        started: list[subprocess.Popen[str]] = []
        try:
            for block in self._blocks:
                if block.saved_as:
                    file = self._environment.home / block.saved_as
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(block.text)
                elif block.marker in ("run", "start"):
                    for given in block.commands():
                        words = [SERVED.sub(str(self._port), word) for word in given]
                        if block.marker == "start":
                            started.append(self._started(words))
                        else:
                            self._run(words)
                elif block.language == "python":
                    self._run(["python", "-c", block.text])
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                eventually(lambda: connection.execute(query).fetchall() == expected)
            for process in started:
                process.send_signal(signal.SIGTERM)
            said = [process.communicate(timeout=WITHIN_S)[0] for process in started]
            for process, text in zip(started, said, strict=True):
                # Servers of the web may end by the signal itself.
                allowed = (0, -signal.SIGTERM) if self._serves(process) else (0,)
                assert process.returncode in allowed, text
            return said
        finally:
            for process in started:
                process.kill()
                process.communicate()

    def _run(self, words: list[str]) -> None:
        if words[0] == "curl":
            ask(words)
        else:
            self._environment.run(*words, **self._variables)
        self.ran.append(" ".join(words))

    def _started(self, words: list[str]) -> "subprocess.Popen[str]":
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            [(before,)] = connection.execute(BELLS)
            process = self._environment.start(*words, **self._variables)
            if self._serves(process):
                eventually(lambda: is_served(self._port) or process.poll() is not None)
            else:
                eventually(lambda: connection.execute(BELLS).fetchone() != (before,) or process.poll() is not None)
        return process

    def _serves(self, process: "subprocess.Popen[str]") -> bool:
        assert isinstance(process.args, tuple)
        return any(str(self._port) in word for word in process.args)
