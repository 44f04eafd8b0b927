"""What a run leaves out: `make test` and the rest of `make check` are what `make check` runs, each once."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mailroom.embedded import find_binaries
from tests.support.postgres import available_majors
from tests.support.sampling import drawn

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("count", "sample"), [(1, 1), (1, 3), (2, 3), (20, 1), (20, 5), (20, 20)])
def test_sample_has_its_size_and_the_first_case_and_is_drawn_the_same_way_each_time(count: int, sample: int) -> None:
    kept = drawn("test", count, sample)
    assert len(kept) == min(count, sample)
    assert 0 in kept <= set(range(count))
    assert kept == drawn("test", count, sample)


def test_samples_vary_every_parameter_of_a_product() -> None:
    inner = 4
    kept = drawn("test", 5 * inner, 8)
    assert len({nth % inner for nth in kept}) > 2
    assert len({nth // inner for nth in kept}) > 2


FILE = """
import pytest

@pytest.mark.parametrize("case", range(9))
@pytest.mark.sample(2)
def test_sampled(case): ...

@pytest.mark.slow
@pytest.mark.both_versions
def test_slow(dsn): ...

@pytest.mark.nightly
def test_nightly(): ...

@pytest.mark.parametrize("case", range(3))
@pytest.mark.both_versions
def test_of_the_server(dsn, case): ...

@pytest.mark.parametrize("case", range(3))
@pytest.mark.both_versions
@pytest.mark.every_case
def test_of_statements(dsn, case): ...

def test_with_a_database(dsn): ...
"""


@pytest.mark.nightly
def test_each_run_has_what_it_says_and_check_is_test_and_the_rest(tmp_path: Path) -> None:
    default = find_binaries().major
    further = [major for major in available_majors() if major != default]
    if not further:
        pytest.skip("a second PostgreSQL is needed")
    file = tmp_path / "test_runs.py"
    file.write_text(FILE)
    every, check, beyond = (collected(file, "--run", run, "--pg", "all") for run in ("all", "check", "beyond-test"))
    tested = collected(file, "--run", "test")
    assert tested == {"sampled": 2, "of_the_server": 3, "of_statements": 3, "with_a_database": 1}
    on_further = {f"of_the_server pg{major}": 1 for major in further} | {
        f"of_statements pg{major}": 3 for major in further
    }
    assert of_default(beyond, default) == {"slow": 1, **on_further}
    assert of_default(check, default) == {**tested, "slow": 1, **on_further}
    cases = {"sampled": 9, "slow": 1, "nightly": 1, "of_the_server": 3, "of_statements": 3, "with_a_database": 1}
    assert of_default(every, default) == {
        **cases,
        **{
            f"{name} pg{major}": cases[name]
            for name in ("slow", "of_the_server", "of_statements", "with_a_database")
            for major in further
        },
    }


def of_default(found: Counter[str], default: int) -> Counter[str]:
    """Name what runs on the default version without it, as a run on that alone does."""
    return Counter({name.removesuffix(f" pg{default}"): count for name, count in found.items()})


def collected(file: Path, *arguments: str) -> Counter[str]:
    """Count the cases that a run has of each test, by its name and its version of PostgreSQL."""
    options = (
        "--collect-only",
        "--verbosity=-1",
        "--override-ini=addopts=",
        f"--rootdir={ROOT}",
        "-p",
        "tests.conftest",
    )
    command = [sys.executable, "-m", "pytest", *options, f"-c{ROOT / 'pyproject.toml'}", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    found = (
        re.fullmatch(r".*::test_(\w+)(?:\[(?:(pg\d+)|[^\]-]*)(?:-.*)?\])?", line) for line in done.stdout.splitlines()
    )
    return Counter(" ".join(filter(None, each.groups())) for each in found if each)
