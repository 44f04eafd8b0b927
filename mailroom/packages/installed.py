"""Find what our distributions declare, and detect user modules that hide our packages, whose names are plain words.

Python imports the first module of a name that it finds, and looks in the program's directory first.
"""

import os
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from mailroom.errors import ConfigurationError

NAMES = ("outbox", "inbox", "dispatcher", "spark_jobs")

# They stand beside this package, in a checkout and when installed.
_PLACE = os.path.realpath(f"{os.path.dirname(__file__)}/../..")


def in_the_way(name: str) -> str | None:
    """Return the file that hides our package of that name, or None."""
    try:
        spec = find_spec(name)
    except ValueError:  # a stand-in without a spec, as in a test
        return None
    # A directory without an __init__.py has no origin, and our package takes precedence.
    if spec is None or spec.origin is None or os.path.realpath(os.path.dirname(spec.origin)) == f"{_PLACE}/{name}":
        return None
    return spec.origin


def warn_of_hidden() -> None:
    """Warn of each of our packages that is hidden. A program may not need it, so this is not an error yet."""
    for name in NAMES:
        if (file := in_the_way(name)) is not None:
            warnings.warn(_hidden(name, file), RuntimeWarning, stacklevel=3)


@cache
def declared(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, as they were when they were first asked for.

    Python opens a file of every installed distribution for that: 20 ms among 150, and a list of commands asks 30 times.
    """
    return tuple(entry_points(group=group))


def package_of(found: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return found.dist.name if found.dist else found.module.partition(".")[0]


def sole(found: Iterable[EntryPoint], name: str, code: str) -> EntryPoint | None:
    """Return the entry point of a name, None if there is none. If packages declare different ones, it is an error.

    Which one Python lists last is an accident of the path, so neither is taken.
    """
    named = {each.value: each for each in found if each.name == name}
    if len(named) > 1:
        packages = " and ".join(sorted(f"{package_of(each)} ({each.value})" for each in named.values()))
        raise ConfigurationError(f"{name} is declared by {packages}. Uninstall one of these packages.", code=code)
    return next(iter(named.values()), None)


def load(found: EntryPoint) -> Any:
    """Load an entry point; raises `ConfigurationError` if a user's file hides one of our packages that it needs."""
    _check(found.module)
    try:
        return found.load()
    except ImportError as error:
        _check(error.name or "")
        raise


def is_hidden(found: EntryPoint) -> bool:
    """Return whether a user's file hides the package of Mailroom that an entry point needs."""
    return _hiding(found.module) is not None


def _check(module: str) -> None:
    if (file := _hiding(module)) is not None:
        raise ConfigurationError(_hidden(module.partition(".")[0], file), code="MR-package-hidden")


def _hiding(module: str) -> str | None:
    name = module.partition(".")[0]
    return in_the_way(name) if name in NAMES else None


def _hidden(name: str, file: str) -> str:
    return f"Mailroom's package {name} is hidden by {file}: rename that file, or uninstall the package that brought it."
