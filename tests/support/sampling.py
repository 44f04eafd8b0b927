"""Which tests a run has: `--run test`, `--run check` or `--run all`, as the targets of the Makefile call it.

- `test` (`make test`): on the default PostgreSQL, without what is marked `slow`.
- `check` (`make check`, CI): the slow ones, too. On each further PostgreSQL what is marked `both_versions` and is not
  slow, the first case of each test: what differs there are the server's statements, and not drivers or examples. A test
  marked `every_case` has other statements, or other plans, in its cases: all of them run.
- `all` (`make check-all`, for nights and releases): every test and case on every PostgreSQL.

The first two have one case of every rule. They leave out what is marked `nightly`, which says again, at greater length,
what another test says; and of a test that says the same in each of its cases, over drivers, sizes or examples, they run
a sample: `sample(n)`, at the test or its module.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

# D-tests-1: The marks of the tests say in one place what a run has.
RUNS = ("test", "check", "beyond-test", "all")


def left_out(items: Sequence[pytest.Item], run: str, default: int) -> set[pytest.Item]:
    """Return the tests that a run leaves out; `beyond-test` is what `check` has and `test` has not.

    `default` is the version that tests run on which are not of a further one.
    """
    if run == "all":
        return set()
    out = {item for item in items if item.get_closest_marker("nightly")} | {*_beyond_samples(items)}
    further = {item for item in items if major_of(item, default) != default}
    out |= {item for item in further if not item.get_closest_marker("both_versions") or "slow" in item.keywords}
    out |= {*_beyond_first_cases(further, default)}
    if run != "check":
        tested = {item for item in items if item not in further and "slow" not in item.keywords}
        out |= tested if run == "beyond-test" else {*items} - tested
    return out


def _beyond_samples(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that are not in the sample of their test. Each version of PostgreSQL has the same sample."""
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            callspec = getattr(item, "callspec", None)
            tests[_test_of(item), callspec and callspec.params.get("pg_major")].append(item)
    return [case for cases in tests.values() for case in _beyond(cases)]


def _beyond_first_cases(items: Iterable[pytest.Item], default: int) -> list[pytest.Item]:
    """Return of each test all cases but the first, unless every case counts."""
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("every_case"):
            tests[_test_of(item), major_of(item, default)].append(item)
    return [case for cases in tests.values() for case in sorted(cases, key=_position)[1:]]


def major_of(item: pytest.Item, default: int) -> int:
    """Return the version that a test is to run on; one that needs no server counts as one of the default's."""
    callspec = getattr(item, "callspec", None)
    return default if callspec is None else int(callspec.params.get("pg_major", default))


def _beyond(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("sample")
    assert marker
    kept = drawn(_test_of(cases[0]), len(cases), *marker.args)
    return [case for nth, case in enumerate(sorted(cases, key=_position)) if nth not in kept]


def drawn(test: str, count: int, sample: int) -> set[int]:
    """Return the positions of a sample: the first case, and others that are drawn the same way in each run.

    Even distances would leave a parameter of a product as it is.
    """
    others = range(1, count)
    return {0, *random.Random(test).sample(others, min(sample - 1, len(others)))}


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _position(case: pytest.Item) -> list[tuple[str, int]]:
    """Where a case stands among those of its test; pytest-randomly may have mixed them by now."""
    callspec = getattr(case, "callspec", None)
    return sorted(callspec.indices.items()) if callspec else []
