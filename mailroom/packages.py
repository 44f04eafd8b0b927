"""Whether our other packages are ours: their names are plain words, which a user's modules may have too.

Python takes the first of a name that it finds, and the first place to look in is the directory of the program.
"""

import os
import warnings
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any

from mailroom.errors import ConfigurationError

NAMES = ("outbox", "inbox", "dispatcher", "spark_jobs")

# They stand beside this package, in a checkout as where they are installed.
_PLACE = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))


def in_the_way(name: str) -> str | None:
    """Return the file that is imported by the name of a package of ours and is not ours, or None if there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # something without a spec stands in for it, as in a test
        return None
    # A directory of that name without an __init__.py has no origin, and gives way to ours wherever that is.
    if spec is None or spec.origin is None or os.path.realpath(os.path.dirname(spec.origin)) == f"{_PLACE}/{name}":
        return None
    return spec.origin


def warn_of_hidden() -> None:
    """Warn of each package of ours that cannot be imported; a program may do without it, so it is no error yet."""
    for name in NAMES:
        if (file := in_the_way(name)) is not None:
            warnings.warn(_told(name, file), RuntimeWarning, stacklevel=3)


def load(found: EntryPoint) -> Any:
    """Load an entry point; raises `ConfigurationError` if what it needs of ours cannot be had for another's file."""
    _check(found.module)
    try:
        return found.load()
    except ImportError as error:
        _check(error.name or "")
        raise


def _check(module: str) -> None:
    name = module.partition(".")[0]
    if name in NAMES and (file := in_the_way(name)) is not None:
        raise ConfigurationError(_told(name, file))


def _told(name: str, file: str) -> str:
    return f"Mailroom's package {name} is hidden by {file}: rename that, or uninstall what brought it."
