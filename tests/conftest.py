"""Fixtures of all tests: a PostgreSQL database each, and a look at what the test has left."""

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg.rows import TupleRow

from inbox.handling.arguments import MOST
from inbox.sessions import unawaited
from inbox.worker import in_flight, pace
from mailroom.embedded import Binaries, Server, find_binaries
from mailroom.errors import EmbeddedServerError
from tests.support.budget import is_whole, record
from tests.support.databases import Connect, Databases
from tests.support.node import Node
from tests.support.port import free_port
from tests.support.postgres import FAST_SETTINGS, Servers, available_majors, remove_with_servers, run_directory
from tests.support.rewriting import import_share
from tests.support.sampling import RUNS, left_out
from tests.support.waiting import WITHIN_S

_RUN_DIRECTORY = pytest.StashKey[Path]()
_MAJORS = pytest.StashKey[list[int]]()
_FAILED = pytest.StashKey[bool]()
_EXTERNAL = "MAILROOM_TEST_DSN"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        metavar="MAJOR|all",
        default=None,
        help="PostgreSQL to test on: 15 to 18, or all this machine has (default: the embedded wheel's, else the "
        f"highest installed). {_EXTERNAL} names a running server to use instead.",
    )
    parser.addoption(
        "--run",
        choices=RUNS,
        default="all",
        help="which tests: those of make test, of make check, what is only in the latter, or all (the default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("COLUMNS", None)  # xdist sets it, and our commands then write for a screen of that width
    # Before tests are imported, whose settings are made of these. Other examples each time are for nights.
    repeats = config.getoption("run") != "all"
    settings.register_profile(
        "tests", derandomize=repeats, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")
    config.stash[_MAJORS] = _chosen_majors(config.getoption("pg"))
    worker_input = getattr(config, "workerinput", None)
    if worker_input is not None:
        config.stash[_RUN_DIRECTORY] = Path(worker_input["run_directory"])
        return
    # Shells have jobs in the background ignore Ctrl-C, and whatever these start would ignore it, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run = ExitStack()
    config.stash[_RUN_DIRECTORY] = run.enter_context(run_directory())
    # Cleanups run after xdist has ended its workers, also after Ctrl-C.
    config.add_cleanup(run.close)
    if _EXTERNAL in os.environ:
        run.callback(_drop_databases_of_run, config.stash[_RUN_DIRECTORY])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["run_directory"] = str(node.config.stash[_RUN_DIRECTORY])


def pytest_collection(session: pytest.Session) -> None:
    worker_input = getattr(session.config, "workerinput", None)
    if worker_input is not None:
        import_share(session.config, int(worker_input["workerid"].removeprefix("gw")), worker_input["workercount"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    majors = metafunc.config.stash[_MAJORS]
    if "pg_major" in metafunc.fixturenames and len(majors) > 1:
        metafunc.parametrize("pg_major", majors, indirect=True, ids=[f"pg{major}" for major in majors])


@pytest.hookimpl(trylast=True)  # behind pytest-randomly, which shuffles
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    default = _default_major() if len(config.stash[_MAJORS]) > 1 else 0
    out = left_out(items, config.getoption("run"), default)
    config.hook.pytest_deselected(items=list(out))
    # The longest first, so that no process is still at one of them when the others have ended.
    items[:] = sorted((item for item in items if item not in out), key=_bound_s, reverse=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have collections of garbage pass over the modules and tests, which stay: up to a third of a test's time."""
    gc.collect()
    gc.freeze()


@cache
def _default_major() -> int:
    """Return the version that is used if none is chosen. To find it, a program is asked: not for each test."""
    return find_binaries().major


def _bound_s(item: pytest.Item) -> float:
    """Return how long a test may take, if that is marked."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    majors = config.stash[_MAJORS]
    if config.getoption("pg") == "all" and len(majors) == 1:
        terminalreporter.line(f"--pg all: only PostgreSQL {majors[0]} was found, so nothing ran on a second version")
    if is_whole(config) and not config.option.collectonly:
        reports = [each for found in terminalreporter.stats.values() for each in found if hasattr(each, "duration")]
        for line in record(config.getoption("run"), reports):
            terminalreporter.line(line)


def _chosen_majors(option: str | None) -> list[int]:
    """Return the versions to run on; none given means the one that is found when a test first needs it."""
    if option is None:
        return []
    if _EXTERNAL in os.environ:
        raise pytest.UsageError(f"--pg chooses among the servers of this machine; unset {_EXTERNAL} to use it")
    try:
        majors = available_majors() if option == "all" else [find_binaries(int(option)).major]
    except (EmbeddedServerError, ValueError) as error:
        raise pytest.UsageError(f"--pg {option}: {error}") from error
    if not majors:
        raise pytest.UsageError("--pg all: no PostgreSQL found")
    return majors


def _drop_databases_of_run(directory: Path) -> None:
    databases = Databases(os.environ[_EXTERNAL], _run_name(directory))
    databases.drop_all()
    databases.close()


def _run_name(directory: Path) -> str:
    return directory.name.rpartition("-")[2].lower()


@pytest.fixture(scope="session")
def _databases_of(pytestconfig: pytest.Config) -> Iterator[Callable[[int | None], Databases]]:
    """Return the databases on the server of a major version; None stands for the external server."""
    run = pytestconfig.stash[_RUN_DIRECTORY]
    servers = Servers(run)
    opened: dict[int | None, Databases] = {}

    def databases_of(major: int | None) -> Databases:
        if major not in opened:
            dsn = os.environ[_EXTERNAL] if major is None else servers.dsn(major)
            opened[major] = Databases(dsn, _run_name(run))
        return opened[major]

    yield databases_of
    for databases in opened.values():
        databases.close()
    servers.stop()


@pytest.fixture
def pg_major(request: pytest.FixtureRequest) -> int | None:
    """The major version this test runs on; None if it is whatever the external server has."""
    if _EXTERNAL in os.environ:
        return None
    chosen = request.config.stash[_MAJORS] or [_default_major()]
    major: int = getattr(request, "param", chosen[0])
    return major


@pytest.fixture
def binaries(pg_major: int | None) -> Binaries:
    """The PostgreSQL programs for a server of the test's own."""
    return find_binaries(pg_major)


@pytest.fixture
def server_home(pytestconfig: pytest.Config) -> Iterator[Path]:
    """An empty directory for servers of the test's own; the server's account can reach it, unlike `tmp_path`."""
    home = Path(tempfile.mkdtemp(dir=pytestconfig.stash[_RUN_DIRECTORY]))
    home.chmod(0o755)
    yield home
    remove_with_servers(home)


@pytest.fixture(scope="session")
def shared_home(pytestconfig: pytest.Config) -> Path:
    """An empty directory for servers that tests of this process share; it is removed with that of the run."""
    home = Path(tempfile.mkdtemp(dir=pytestconfig.stash[_RUN_DIRECTORY]))
    home.chmod(0o755)
    return home


@pytest.fixture(scope="session")
def _initialised(shared_home: Path) -> Callable[[Binaries], Path]:
    """Return the directory of a stopped server to copy: a tenth of what making one costs."""

    @cache
    def initialised(binaries: Binaries) -> Path:
        with Server(shared_home / f"pg{binaries.major}", binaries=binaries, settings=FAST_SETTINGS) as server:
            return server.directory

    return initialised


@pytest.fixture
def private_server(server_home: Path, binaries: Binaries, _initialised: Callable[[Binaries], Path]) -> Iterator[Server]:
    """A started server for this test alone, which may stop, kill and start it: commits survive that."""
    settings = FAST_SETTINGS | {"synchronous_commit": "on"}
    directory = server_home / "private"
    subprocess.run(["cp", "-a", _initialised(binaries), directory], check=True)
    (directory / "mailroom.conf").write_text(f"port = '{free_port()}'\n")  # which nobody takes while it is down
    with Server(directory, binaries=binaries, settings=settings) as server:
        yield server


@pytest.fixture
def databases(pg_major: int | None, _databases_of: Callable[[int | None], Databases]) -> Databases:
    """Databases on the server this test runs on, for a test that needs several of them."""
    return _databases_of(pg_major)


@pytest.fixture
def dsn(request: pytest.FixtureRequest, databases: Databases) -> Iterator[str]:
    """The URL of a database of the test's own, migrated. All further ones of the test have node ids of their own."""
    with _database(request, databases, migrated=True, meets_others=False) as url:
        yield url


@pytest.fixture
def empty_dsn(request: pytest.FixtureRequest, databases: Databases) -> Iterator[str]:
    """The URL of a database of the test's own, without any schema of Mailroom."""
    with _database(request, databases, migrated=False) as url:
        yield url


@pytest.fixture
def target_dsn(request: pytest.FixtureRequest, databases: Databases) -> Iterator[str]:
    """The URL of a second migrated database, for a node that reads the one in `dsn`."""
    with _database(request, databases, migrated=True) as url:
        yield url


@contextmanager
def _database(
    request: pytest.FixtureRequest, databases: Databases, *, migrated: bool, meets_others: bool = True
) -> Iterator[str]:
    url = databases.create(migrated=migrated, meets_others=meets_others)
    try:
        yield url
        # The traceback of a failed test keeps its connections alive, so they say nothing.
        leaks = [] if request.node.stash.get(_FAILED, False) else databases.leaks(url)
    finally:
        databases.drop(url)
    if leaks:
        pytest.fail("left open in the test's database: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """Return a new connection to `dsn`; keyword arguments are psycopg.connect's. Closed after the test."""
    with ExitStack() as connections:

        def open_connection(**options: Any) -> psycopg.Connection[TupleRow]:
            connection: psycopg.Connection[TupleRow] = psycopg.connect(dsn, **options)
            connections.callback(connection.close)
            return connection

        yield open_connection


@pytest.fixture
def node(request: pytest.FixtureRequest, dsn: str, connect: Connect) -> Node:
    """The node at `dsn`, with the inboxes that the marks `inbox` name and after the statements of the marks `node_sql`.

    Those of the module come before those of the test, which may name an inbox of the module again.
    """
    node = Node(dsn, connect(autocommit=True))
    marks = [mark for level in request.node.listchain() for mark in level.own_markers]
    inboxes = {mark.args[0]: mark for mark in marks if mark.name == "inbox"}
    for mark in inboxes.values():
        node.inbox(*mark.args, **mark.kwargs)
    for mark in marks:
        if mark.name == "node_sql":
            for statement in mark.args:
                node.connection.execute(statement)
    return node


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def _tasks_are_checked(request: pytest.FixtureRequest) -> None:
    # Set up before all other fixtures of the test, so looked at after they are torn down.
    if isinstance(request.node, pytest.Function) and inspect.iscoroutinefunction(request.node.obj):
        request.getfixturevalue("_no_task_left")


@pytest.fixture(autouse=True)
def full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let batches be full, however long one takes: most tests are of what is in a batch.

    `tests/worker/test_pace.py` is of how they grow and shrink.
    """
    monkeypatch.setattr(pace, "FIRST", MOST)
    monkeypatch.setattr(pace.Pace, "took", lambda *_: None)


@pytest.fixture(autouse=True)
def _patient_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers wait for their in-flight entries: after a second they would go on without, and count no death."""
    monkeypatch.setattr(unawaited, "WITHIN_S", WITHIN_S)
    monkeypatch.setattr(in_flight, "WITHIN_S", WITHIN_S)


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        pytest.fail("tasks left running: " + "; ".join(map(repr, left)), pytrace=False)
