"""The distributions under test, built once, and environments that are removed with the test that asked for them."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.wheel.environment import Environment, install, lowest, made, metadata

ROOT = Path(__file__).parents[2]
NEWEST = "newest"
LOWEST = "lowest"

OF_DEVELOPERS = {"dev", "docs", "peers"}

Installed = Callable[..., Environment]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the source distributions, and of the wheels built from those and not from the checkout."""
    directory = tmp_path_factory.mktemp("dist")
    for source in (ROOT, ROOT / "benchmarks"):
        subprocess.run(
            [sys.executable, "-m", "build", "--installer", "uv", "--outdir", directory, source],
            check=True,
            capture_output=True,
        )
    return directory


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    [wheel] = built.glob("pg_mailroom-*.whl")
    return wheel


@pytest.fixture(scope="session")
def sdist(built: Path) -> Path:
    [sdist] = built.glob("pg_mailroom-*.tar.gz")
    return sdist


@contextmanager
def making(wheel: Path) -> Iterator[Installed]:
    """Return what makes an environment with the wheel and extras, each dependency at its newest or lowest version."""
    # Not in tmp_path: the account that root's embedded server runs as has to reach it.
    directory = Path(tempfile.mkdtemp(prefix="mailroom-wheel-"))
    directory.chmod(0o755)

    def environment(extra: str = "", versions: str = NEWEST, others: Iterable[str] = ()) -> Environment:
        made_here = made(directory, MAILROOM_HOME=str(directory / "embedded"))
        install(made_here, wheel, extra, lowest(wheel, extra) if versions == LOWEST else [], others)
        return made_here

    yield environment
    shutil.rmtree(directory)


@pytest.fixture
def installed(wheel: Path) -> Iterator[Installed]:
    """Return an environment of the test's own."""
    with making(wheel) as installed:
        yield installed


@pytest.fixture(scope="session")
def alone(wheel: Path) -> Iterator[Environment]:
    """The wheel without extras, which tests share."""
    with making(wheel) as installed:
        yield installed()


@pytest.fixture(scope="session")
def complete(wheel: Path) -> Iterator[Environment]:
    """The wheel with all extras for users, which tests share."""
    with making(wheel) as installed:
        # The largest first, which uv's cache has: with the others it may have to ask the index, and fetch all anew.
        environment = installed("spark")
        install(environment, wheel, ",".join(sorted({*(metadata(wheel).provides_extra or ())} - OF_DEVELOPERS)), [])
        yield environment


def at_home(environment: Environment, name: str) -> Environment:
    """Return the environment with a home of its own, since programs save files of the same names."""
    home = environment.home / name
    home.mkdir()
    return replace(environment, home=home)
