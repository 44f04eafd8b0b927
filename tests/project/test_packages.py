"""Our packages where others have their names, and where what SQLAlchemy does not bring is not there."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mailroom import __version__
from mailroom.cli import root as cli_root
from mailroom.packages.installed import NAMES
from tests.support.command import done, error_of, mailroom

ROOT = Path(__file__).parents[2]

Ended = subprocess.CompletedProcess[str]


def python(directory: Path, *arguments: str) -> Ended:
    """Run Python in a directory; what is imported is looked for there first."""
    return subprocess.run([sys.executable, *arguments], cwd=directory, capture_output=True, text=True, check=False)


def module(directory: Path, name: str, text: str = "") -> str:
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def test_importing_mailroom_imports_none_of_the_packages_it_looks_at() -> None:
    found = python(ROOT, "-c", f"import sys, mailroom; print([name for name in {NAMES} if name in sys.modules])")
    assert (found.stdout, found.stderr) == ("[]\n", "")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["dispatcher.py", "inbox/__init__.py", "spark_jobs/__init__.py"])
def test_importing_mailroom_warns_of_a_file_that_hides_one_of_its_packages(tmp_path: Path, name: str) -> None:
    file = module(tmp_path, name)
    module(tmp_path, "orders.py", "import mailroom\nfrom outbox import Outbox\nprint(Outbox())\n")
    ran = python(tmp_path, "orders.py")
    assert ran.returncode == 0, ran.stderr  # it does without that package
    package = name.partition("/")[0].removesuffix(".py")
    assert f"orders.py:1: RuntimeWarning: Mailroom's package {package} is hidden by {file}: rename that" in ran.stderr
    assert ran.stderr.count("RuntimeWarning") == 1


@pytest.mark.slow
def test_program_that_has_the_name_of_a_package_itself_is_told(tmp_path: Path) -> None:
    file = module(tmp_path, "dispatcher.py", "from outbox import Outbox\n")
    assert f"dispatcher is hidden by {file}" in python(tmp_path, "dispatcher.py").stderr


@pytest.mark.slow
def test_directory_without_an_init_is_in_nobody_s_way(tmp_path: Path) -> None:
    module(tmp_path, "inbox/letter.txt")
    ran = python(tmp_path, "-c", "import mailroom; from inbox import Worker")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_other_path_to_our_own_packages_is_in_nobody_s_way(tmp_path: Path) -> None:
    (tmp_path / "checkout").symlink_to(ROOT)
    look_there_first = f"sys.path.insert(0, '{tmp_path / 'checkout'}'); mailroom.packages.installed.warn_of_hidden()"
    ran = python(ROOT, "-c", f"import sys, mailroom; {look_there_first}; import inbox; print(inbox.__file__)")
    assert (ran.stderr, ran.stdout) == ("", f"{tmp_path}/checkout/inbox/__init__.py\n")


def test_stand_in_of_a_test_is_in_nobody_s_way(tmp_path: Path) -> None:
    ran = python(tmp_path, "-c", "import sys, types; sys.modules['inbox'] = types.ModuleType('inbox'); import mailroom")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_command_whose_package_is_hidden_names_the_file_in_one_line_and_the_others_work(tmp_path: Path) -> None:
    file = module(tmp_path, "dispatcher.py")
    for command in (("dispatcher", "status"), ("executor", "execute-all"), ("bench",)):
        ran = python(tmp_path, "-W", "ignore", "-m", "mailroom", *command)
        assert ran.returncode == 2
        assert ran.stderr.startswith(f"mailroom: error: Mailroom's package dispatcher is hidden by {file}: rename")
        assert ran.stderr.count("\n") == 1
    assert python(tmp_path, "-W", "ignore", "-m", "mailroom", "outbox", "send", "--help").returncode == 0


@pytest.mark.slow
def test_worker_that_delivers_by_itself_names_the_file_that_hides_the_dispatcher(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("inbox", "create", "shipping", dsn=dsn)
    file = module(tmp_path, "dispatcher.py")
    module(tmp_path, "shipping.py", "from inbox import Worker\nworker = Worker('', 'shipping', print, dispatch=True)\n")
    monkeypatch.setenv("MAILROOM_DSN", dsn)
    # As the command does: the directory is looked in only once it is asked for a module in it.
    program = "import sys; from mailroom.cli import main; sys.argv[1:] = ['worker', 'run', 'shipping:worker']; main()"
    ran = python(tmp_path, "-P", "-c", program)
    assert ran.returncode == 2
    assert "RuntimeWarning: Mailroom's package dispatcher is hidden by" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith(f"mailroom: error: Mailroom's package dispatcher is hidden by {file}")


@pytest.mark.parametrize("name", NAMES)
def test_worker_in_a_module_of_a_package_s_name_is_refused(name: str) -> None:
    assert "rename your module" in error_of(mailroom("worker", "run", f"{name}:worker"))


@pytest.mark.slow
def test_package_that_two_distributions_installed_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "letters-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: letters\nVersion: 1.0\n")
    (information / "top_level.txt").write_text("inbox\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {"inbox": EntryPoint("inbox", "inbox.overwritten:inbox", cli_root.GROUP)}
    monkeypatch.setattr(cli_root.root, "_entry_points", lambda: known)
    said = error_of(mailroom("inbox", "list"))
    assert "inbox was installed by letters too" in said
    assert "pip install --force-reinstall --no-deps pg-mailroom" in said


@pytest.mark.slow
def test_command_that_lacks_a_module_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"ghost": EntryPoint("ghost", "no_such_package.cli:ghost", cli_root.GROUP)}
    monkeypatch.setattr(cli_root.root, "_entry_points", lambda: known)
    assert error_of(mailroom("ghost")).endswith(
        "there is no module 'no_such_package'. Install what it needs: pip install pg-mailroom"
    )


@pytest.mark.slow
def test_command_that_fails_of_something_else_says_what_and_not_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, "broken_command.py", "1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {"broken": EntryPoint("broken", "broken_command:broken", cli_root.GROUP)}
    monkeypatch.setattr(cli_root.root, "_entry_points", lambda: known)
    said = error_of(mailroom("broken"))
    assert "ZeroDivisionError" in said
    assert "pip" not in said


WITHOUT_GREENLET = """
import asyncio, sys
sys.modules["greenlet"] = None  # as where it is not installed: SQLAlchemy 2.1 then refuses to import its asyncio
import sqlalchemy, dispatcher, inbox.cli.inbox, inbox.cli.parked, outbox.cli, mailroom.testing.functions
from mailroom.errors import ConfigurationError, UnsupportedConnection

async def handle(message, connection): ...

inbox.Worker(sqlalchemy.create_engine("postgresql+psycopg://"), "shipping", print)
inbox.AsyncWorker("", "shipping", handle)
try:
    inbox.AsyncWorker(5, "shipping", handle)
except ConfigurationError as error:
    print(error)
try:
    asyncio.run(outbox.AsyncOutbox().send(5, "shipping", 1))
except UnsupportedConnection as error:
    print(error)
"""


@pytest.mark.slow
def test_everything_works_without_greenlet_but_what_is_greenlet_s(tmp_path: Path) -> None:
    ran = python(tmp_path, "-c", WITHOUT_GREENLET)
    assert ran.returncode == 0, ran.stderr
    source, connection = ran.stdout.splitlines()
    assert source.startswith("An AsyncWorker cannot use a int")
    assert connection.startswith("Cannot use a builtins.int here")


def test_the_benchmarks_are_released_with_what_they_measure() -> None:
    project = tomllib.loads((ROOT / "benchmarks" / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"pg-mailroom[embedded]=={__version__}" in project["dependencies"]
