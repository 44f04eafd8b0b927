"""What `make test` leaves out of tests with many cases: nothing that `make check` does not run."""

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


@pytest.mark.slow
def test_make_test_and_the_rest_of_make_check_are_all_tests_and_each_once() -> None:
    chosen = ["tests/interleavings/test_reap.py"]
    every = collected(*chosen)
    tested, beyond = collected(*chosen, "-m", "not slow"), collected(*chosen, "--beyond-test")
    assert len(tested) < len(every) / 2
    assert Counter(every) == Counter(tested) + Counter(beyond)


@pytest.mark.slow
def test_further_versions_run_the_first_case_of_each_test_unless_every_case_counts() -> None:
    default, majors = find_binaries().major, available_majors()
    if majors == [default]:
        pytest.skip("a second PostgreSQL is needed")
    chosen = ["tests/sql/test_plans.py", "tests/sql/test_transaction.py"]
    every = Counter(each.partition("[")[0] for each in collected(*chosen, "--pg", str(default)))
    on_all = collected(*chosen, "--pg", "all")
    for major in majors:
        found = Counter(each.partition("[")[0] for each in on_all if f"pg{major}" in each)
        plans = "tests/sql/test_plans.py::test_hot_statement_reads_large_tables_by_their_indexes_only"
        assert found[plans] == every[plans] > 1
        assert found.keys() <= every.keys()
        if major != default:
            assert {*(found - Counter({plans: every[plans]})).values()} == {1}


def collected(*arguments: str) -> list[str]:
    options = ("--collect-only", "--verbosity=-1", "--override-ini=addopts=")
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return [line for line in done.stdout.splitlines() if "::" in line]
