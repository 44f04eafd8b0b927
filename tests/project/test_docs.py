"""README and docs/ are true: their Python runs, their commands exist, their links lead somewhere.

Every Python block is executed, those of a page one after another in one namespace, in an empty directory and on a
migrated database of the page's own, named by MAILROOM_DSN (and by DATABASE_URL in SQLAlchemy's form). Every `mailroom`
command of a console block is parsed by the real command line. A comment on the line above a block changes what is
done with it:

- `<!-- test: save as NAME -->`, any block: written to that file, for the commands of a later block, and not executed
- `<!-- test: run -->`, a console block: its commands are run one after another and must succeed. `$NAME` is replaced,
  and so are the address of probes and the port 8000 of services, by what is free
- `<!-- test: run with a server -->`, `<!-- test: run without a server -->`, console blocks: the same, each for one kind
  of reader. A page that has the second is followed twice. Who has a server has named the database already, so that
  their `export` is passed over; who has none gets it from `export NAME=$(mailroom ...)`. `pip` is passed over
- `<!-- test: start -->`, a console block: its commands run beside the rest of the page; at the end of the page all
  that was sent must have been consumed, and SIGTERM must end them with exit code 0. A service with the port 8000 is
  waited for until it answers; servers of the web may end by the signal itself
- `<!-- test: stop when idle -->`, a Python block: the workers it runs are stopped once nothing waits any more
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import sqlalchemy
from click.testing import CliRunner

from inbox import AsyncWorker, Inbox, Worker
from mailroom.cli.root import root as mailroom_command
from mailroom.embedded import Binaries
from mailroom.session.settings import DSN_VARIABLE, LIBPQ_VARIABLES
from tests.cli_reference import PAGE as CLI_PAGE
from tests.support.pages import DOCS, ROOT
from tests.support.port import free_port
from tests.support.waiting import WITHIN_S, eventually

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"(?:^<!-- test: (?P<marker>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`(?P<command>mailroom [a-z][^`]*)`")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SAVE_AS = "save as "
WITH, WITHOUT = "run with a server", "run without a server"
MARKERS = {"run": "console", WITH: "console", WITHOUT: "console", "start": "console", "stop when idle": "python"}
PROBED = "127.0.0.1:9464"  # in pages
SERVED = re.compile(r"\b8000\b")  # the port of web services in pages
ANSWERED_EXPORT = re.compile(r"(?P<name>\w+)=\$\((?P<command>.+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is where its text begins."""

    language: str
    marker: str
    text: str
    line: int

    @property
    def saved_as(self) -> str | None:
        return self.marker.removeprefix(SAVE_AS) if self.marker.startswith(SAVE_AS) else None

    def commands(self) -> list[list[str]]:
        """The words of each command; of a pipe, those of its first part."""
        joined = self.text.replace("\\\n", " ")
        lines = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        assert lines, "a console block has its commands on lines that begin with `$ `"
        split = [shlex.split(line, comments=True) for line in lines]
        return [words[: words.index("|")] if "|" in words else words for words in split]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        block = Block(
            match["language"], match["marker"] or "", match["text"], text.count("\n", 0, match.start("text")) + 1
        )
        allowed = not block.marker or block.saved_as or MARKERS.get(block.marker) == block.language
        assert allowed, f"{page.name}:{block.line}: a {block.language} block cannot be marked {block.marker!r}"
        found.append(block)
    # What is marked is above the fence, and every fence is closed: nothing escapes the pattern above.
    assert len(found) * 2 == len(re.findall(r"^```", text, re.M)), f"{page.name} has a fence that is not understood"
    assert text.count("<!-- test:") == sum(1 for block in found if block.marker), f"{page.name} has a stray marker"
    return found


def ask(words: list[str]) -> None:
    """Do what `curl [-X METHOD] URL` does, and expect success."""
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    with urllib.request.urlopen(urllib.request.Request(words[-1], method=method), timeout=60) as answer:
        assert answer.status // 100 == 2, words


def is_served(port: int) -> bool:
    """Return whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# Each of our processes has one session that listens, a dispatcher two, and opens it when it is ready for SIGTERM.
BELLS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name ~ 'bell|listener' AND application_name !~ 'executor'"
)


def pages_with(wanted: Callable[[Block], bool]) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if any(map(wanted, blocks(page)))]


class Page:
    """A page that is being followed, block by block, as a reader would; without a `dsn`, as one without a server."""

    def __init__(self, path: Path, dsn: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._for_others = WITHOUT if dsn else WITH
        self._dsn = dsn or ""
        self._monkeypatch = monkeypatch
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._started: list[subprocess.Popen[str]] = []
        self._port, self._served = free_port(), free_port()
        self._unused: list[str] = []
        self._workers_run = 0

    def follow(self) -> None:
        try:
            for block in blocks(self._path):
                if block.saved_as:
                    save(block)
                    self._unused.append(block.saved_as)
                elif block.marker == self._for_others:
                    continue
                elif block.marker in ("run", WITH, WITHOUT, "start"):
                    self._unused.clear()
                    for given in block.commands():
                        words = [self._put_in(word) for word in given]
                        self._start(words) if block.marker == "start" else self._run(words)
                elif block.language == "python":
                    self._execute(block)
            assert not self._unused, f"no command after them uses {self._unused}"
            self._end()
        finally:
            for process in self._started:
                process.kill()
                sys.stdout.write(process.communicate()[0])  # shown only if the test fails
            for value in self._namespace.values():
                if isinstance(value, sqlalchemy.Engine):
                    value.dispose()

    def _execute(self, block: Block) -> None:
        # So many empty lines before it that a traceback names the page's own lines.
        code = compile("\n" * (block.line - 1) + block.text, str(self._path), "exec")
        with self._monkeypatch.context() as patch:
            for kind in (Worker, AsyncWorker):
                patch.setattr(kind, "_serve", self._stopped_when_idle(kind) if block.marker else _never_ends)
            self._workers_run = 0
            exec(code, self._namespace)
        assert self._workers_run or not block.marker, f"line {block.line}: no worker was run"

    def _stopped_when_idle(self, kind: type[Worker] | type[AsyncWorker]) -> Any:
        serve = kind._serve

        async def serve_until_idle(worker: Any, home: Any) -> None:
            watcher = threading.Thread(target=lambda: self._when_idle(worker.stop))
            watcher.start()
            self._workers_run += 1
            await serve(worker, home)
            watcher.join()

        return serve_until_idle

    def _when_idle(self, act: Callable[[], None]) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                eventually(lambda: _is_idle(connection))
        finally:
            act()

    def _put_in(self, word: str) -> str:
        return SERVED.sub(str(self._served), os.path.expandvars(word).replace(PROBED, f"127.0.0.1:{self._port}"))

    def _run(self, words: list[str]) -> None:
        if words[0] == "curl":
            ask(words)
        elif words[0] == "mailroom":
            result = CliRunner().invoke(mailroom_command, words[1:])
            # The doctor finds that the tests' server can lose commits.
            assert result.exit_code in ((0, 1) if words[1] == "doctor" else (0,)), (
                f"{shlex.join(words)}: {result.output}"
            )
        elif words[0] == "export":
            self._export(" ".join(words[1:]))
        elif words[0] != "pip":
            done = subprocess.run(_argv(words), capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"

    def _export(self, assignment: str) -> None:
        if found := ANSWERED_EXPORT.fullmatch(assignment):
            done = subprocess.run(_argv(found["command"].split()), capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{assignment}: {done.stderr}"
            self._monkeypatch.setenv(found["name"], done.stdout.rstrip("\n"))
            self._dsn = os.environ["MAILROOM_DSN"]
        else:
            assert self._dsn, f"who has no server cannot export {assignment}"

    def _start(self, words: list[str]) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:

            def bells() -> int:
                [(number,)] = connection.execute(BELLS)
                return int(number)

            before = bells()
            process = subprocess.Popen(_argv(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self._started.append(process)
            if self._serves(process):
                eventually(lambda: is_served(self._served) or self._fallen())
            else:
                eventually(lambda: bells() > before or self._fallen())

    def _serves(self, process: "subprocess.Popen[str]") -> bool:
        assert isinstance(process.args, list)
        return any(str(self._served) in word for word in process.args)

    def _end(self) -> None:
        if self._started:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                eventually(lambda: _is_idle(connection) or self._fallen())
        for process in self._started:
            process.send_signal(signal.SIGTERM)
        for process in self._started:
            output, _ = process.communicate(timeout=WITHIN_S)
            allowed = (0, -signal.SIGTERM) if self._serves(process) else (0,)
            assert process.returncode in allowed, f"{process.args!r}: {output}"

    def _fallen(self) -> list[subprocess.Popen[str]]:
        return [process for process in self._started if process.poll() is not None]


async def _never_ends(worker: object, _dsn: str) -> None:
    raise AssertionError("this runs until it is told to stop: mark the block <!-- test: stop when idle -->")


def _argv(words: list[str]) -> list[str]:
    """What a shell would find, from the interpreter of the tests."""
    modules = {"mailroom": "mailroom", "alembic": "alembic.config", "pytest": "pytest"}
    if words[0] in modules:
        return [sys.executable, "-m", modules[words[0]], *words[1:]]
    assert words[0] == "python", f"a marked block runs python, {', '.join(modules)}, and not {words[0]}"
    return [sys.executable, *words[1:]]


def _is_idle(connection: psycopg.Connection) -> bool:
    # One statement, so that no message is on its way between the two.
    query = "SELECT NOT EXISTS (SELECT FROM mailroom.outbox) AND NOT EXISTS (SELECT FROM mailroom.inbox)"
    readers = connection.execute("SELECT name FROM mailroom.inbox_registry WHERE log IS NOT NULL").fetchall()
    return connection.execute(query).fetchone() == (True,) and not any(
        Inbox(name).backlog(connection) for (name,) in readers
    )


def save(block: Block) -> None:
    assert block.saved_as
    if block.saved_as.endswith(".py"):
        compile(block.text, block.saved_as, "exec")
    path = Path(block.saved_as)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sit in an empty directory."""
    monkeypatch.chdir(tmp_path)
    # Modules of the directory are found and are not compiled into it; our own are where this file is.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def reader(dsn: str, desk: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Page]:
    """Give the page to follow as a reader would who has set the two variables."""
    monkeypatch.setenv("MAILROOM_DSN", dsn)
    monkeypatch.setenv("DATABASE_URL", dsn.replace("postgresql:", "postgresql+psycopg:", 1))
    return lambda path: Page(path, dsn, monkeypatch)


@pytest.fixture
def reader_without_server(
    server_home: Path, binaries: Binaries, desk: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Page]]:
    """Give the page to follow as a reader would who has no server, and set no variable."""
    for name in (DSN_VARIABLE, *LIBPQ_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAILROOM_HOME", str(server_home))
    monkeypatch.setenv("MAILROOM_PG_BIN", str(binaries.path))
    yield lambda path: Page(path, None, monkeypatch)
    stopped = CliRunner().invoke(mailroom_command, ["embedded", "stop"])
    assert (stopped.exit_code, stopped.stdout) == (0, "The embedded server is stopped.\n")


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("page", pages_with(lambda block: block.language == "python" or bool(block.marker)))
def test_a_reader_who_follows_the_page_gets_what_it_says(page: Path, reader: Callable[[Path], Page]) -> None:
    reader(page).follow()


@pytest.mark.nightly
@pytest.mark.parametrize("page", pages_with(lambda block: block.marker == WITHOUT))
def test_a_reader_without_a_server_gets_there_too(page: Path, reader_without_server: Callable[[Path], Page]) -> None:
    reader_without_server(page).follow()


def test_the_readme_is_for_readers_with_and_without_a_server() -> None:
    markers = [block.marker for block in blocks(ROOT / "README.md")]
    assert {WITH, WITHOUT} <= set(markers)


def test_every_command_of_the_pages_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[click.Command] = []
    monkeypatch.setattr(click.Command, "invoke", lambda command, _context: reached.append(command))
    monkeypatch.setenv("ID", "0b3c2a4e-5d5f-4c55-8f4c-6a1c1d0f2a11")
    for page in PAGES:
        directory = tmp_path / "-".join(page.relative_to(ROOT).parts)
        directory.mkdir()
        monkeypatch.chdir(directory)
        for block in blocks(page):
            if block.saved_as:
                save(block)
            elif block.language == "console":
                for words in block.commands():
                    if words[:1] == ["mailroom"]:
                        result = CliRunner().invoke(mailroom_command, [*map(os.path.expandvars, words[1:])])
                        assert result.exit_code == 0, (page.name, words, result.output)
    assert reached
    assert "(not available here)" not in [command.short_help for command in reached]


def test_every_command_named_in_a_sentence_exists() -> None:
    for page, match in _found(INLINE):
        _, *words = match["command"].split()
        command: click.Command | None = mailroom_command
        while words and isinstance(command, click.Group):
            command = command.get_command(click.Context(command), words.pop(0))
            assert command is not None, f"{page}: {match['command']}"
        given = command.params if command else []
        options = {option for each in given for option in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options, f"{page}: {match['command']}"


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page, match in _found(LINK):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        goal = (page.parent / target).resolve() if target else page
        if not goal.exists() or (anchor and anchor not in _anchors(goal)):
            broken.append(f"{page}: {match['target']}")
    assert not broken


def _found(what: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """What stands in the sentences of the pages, and where."""
    for page in PAGES:
        yield from ((page, match) for match in what.finditer(FENCE.sub("", page.read_text())))


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    command = [sys.executable, "-m", "tests.cli_reference", "--print"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True, timeout=WITHIN_S)
    assert CLI_PAGE.read_text() == printed.stdout, "docs/reference/cli.md is out of date: python -m tests.cli_reference"
