"""The first run of a checkout: pytest compiles each test file with its asserts rewritten, and keeps what it made.

All processes collect all files in the same order, so each of them would rewrite every file at the same time as the
others: 19 s of a processor in each. They begin with a share of their own instead, and find the rest done.
"""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest


def import_share(config: pytest.Config, nth: int, count: int) -> None:
    """Import the `nth` of `count` shares of the test files that are to be collected."""
    for file in files_of(config)[nth::count]:
        # What is wrong with a file is told when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def files_of(config: pytest.Config) -> list[Path]:
    """Return the test files at the places that were named, without those that are to be ignored."""
    places = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    ignored = [Path(place).resolve() for place in config.getoption("ignore") or ()]
    found = {file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])}
    return sorted(file for file in found if not any(file.is_relative_to(place) for place in ignored))
