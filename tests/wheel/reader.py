"""A reader who installed the wheel, and follows the README to the first message and then the page of processes."""

import signal
import subprocess
from pathlib import Path

import psycopg

from tests.project.test_docs import Block, blocks
from tests.support.pages import page_named
from tests.support.waiting import WITHIN_S, eventually
from tests.wheel.environment import Environment

README = Path(__file__).parents[2] / "README.md"
SECTION = "## The first message\n"
PROCESSES = page_named("your-server.md")


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
            _follow(environment, dsn)
        finally:
            environment.run("mailroom", "embedded", "stop")
    else:
        _follow(environment, dsn)


def _export_without_a_server() -> str:
    [block] = [block for block in first_message() if block.marker == "run without a server"]
    [line] = [line for line in block.text.splitlines() if line.startswith("$ export ")]
    return line.removeprefix("$ ")


def _follow(environment: Environment, dsn: str) -> None:
    started: list[subprocess.Popen[str]] = []
    ran = []
    try:
        for block in [*first_message(), *blocks(PROCESSES)]:
            if block.saved_as:
                (environment.home / block.saved_as).write_text(block.text)
            elif block.marker == "start":
                started += [environment.start(*words, MAILROOM_DSN=dsn) for words in block.commands()]
            elif block.marker == "run":
                for words in block.commands():
                    said = environment.run(*words, MAILROOM_DSN=dsn)
                    ran += [(words[1], "shipped order-42" in said)] if words[0] == "python" else []
        assert (ran, len(started)) == ([("first.py", True), ("orders.py", False)], 2), "look what has to be checked now"
        with psycopg.connect(dsn, autocommit=True) as connection:
            query = "SELECT order_id, items FROM shipments"
            eventually(lambda: connection.execute(query).fetchall() == [(42, ["teapot"])] * 2)
        for process in started:
            process.send_signal(signal.SIGTERM)
        logs = [process.communicate(timeout=WITHIN_S)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], logs
        assert "shipped order-42" in logs[1]
    finally:
        for process in started:
            process.kill()
            process.communicate()
