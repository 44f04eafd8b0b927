"""What is in the distributions, and what is not."""

import re
import subprocess
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata

from tests.wheel import environment
from tests.wheel.conftest import ROOT

pytestmark = pytest.mark.xdist_group("alone")

PACKAGES = {"mailroom", "outbox", "inbox", "dispatcher", "spark_jobs"}
# What Spark looks for at the top; the checkout keeps it in a directory.
FORMATS = ROOT / "spark_jobs" / "formats"
# What git keeps and a source distribution has no use for; what is made for it.
LEFT_OUT = {".ci/run", ".github/workflows/release.yml"}
ADDED = {"PKG-INFO"}
# 1.15 MB now. A test's data or a page's picture would show here, and everybody who installs Mailroom would download it.
LARGEST_WHEEL = 1_450_000


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    return environment.metadata(wheel)


def listed_by_git(*options: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    return set(listed.stdout.splitlines())


def test_the_source_distribution_holds_what_git_keeps_and_nothing_else(sdist: Path) -> None:
    kept = listed_by_git()
    not_yet_added = listed_by_git("--others", "--exclude-standard")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert kept - names == LEFT_OUT
    assert names - kept - not_yet_added == ADDED


def test_the_wheel_takes_no_names_but_ours(in_wheel: set[str]) -> None:
    top = {name.partition("/")[0] for name in in_wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES | {
        path.name for path in FORMATS.glob("*.py")
    }


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= LARGEST_WHEEL


def test_the_wheel_holds_all_of_the_packages_and_says_that_they_are_typed(in_wheel: set[str]) -> None:
    for package in PACKAGES:
        kept = {
            str(path.relative_to(FORMATS if path.is_relative_to(FORMATS) else ROOT))
            for path in (ROOT / package).rglob("*.py")
        }
        assert kept <= in_wheel
        assert f"{package}/py.typed" in in_wheel
    for directory, name in (
        ("alembic", "_migrations"),
        ("docs/errors", "_errors"),
        ("examples/flights", "_flights"),
    ):
        files = (path for path in (ROOT / directory).rglob("*") if path.is_file() and path.suffix != ".pyc")
        assert {f"mailroom/{name}/{path.relative_to(ROOT / directory)}" for path in files} <= in_wheel
    assert not [name for name in in_wheel if name.endswith(".pyc")]


def test_the_description_has_no_link_that_needs_the_repository(metadata: Metadata) -> None:
    assert metadata.description is not None
    assert "docs/understand/guarantees.md" in metadata.description
    assert "docs/assets/" not in metadata.description  # a picture would be a broken one there
    assert not [target for target in re.findall(r"\]\(([^)]*)\)", metadata.description) if "://" not in target]


def test_the_project_names_where_it_runs_and_no_place_that_there_is_not(metadata: Metadata) -> None:
    assert not metadata.project_urls  # it has no home yet
    assert "Operating System :: POSIX" in (metadata.classifiers or [])
