"""Tests of many cases: `make test` runs a sample of them, and `make check` runs all.

A test marked `sample(n)`, or whose module is, says the same in each of its cases, over drivers, sizes or examples.

On a further version of PostgreSQL each test runs its first case: what differs there are the server's statements, and
not drivers or examples. A test marked `every_case` has other statements, or other plans, in its cases: all of them run.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest


def beyond_samples(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that are not in the sample of their test. Each version of PostgreSQL has the same sample."""
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            callspec = getattr(item, "callspec", None)
            tests[_test_of(item), callspec and callspec.params.get("pg_major")].append(item)
    return [case for cases in tests.values() for case in _beyond(cases)]


def repeated_on_further_versions(items: Iterable[pytest.Item], default: int) -> list[pytest.Item]:
    """Return the cases that are left out on versions that are not the `default`: of each test all but the first."""
    tests: dict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (major := major_of(item, default)) != default and not item.get_closest_marker("every_case"):
            tests[_test_of(item), major].append(item)
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
