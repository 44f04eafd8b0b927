"""Public names that are imported when they are asked for: importing a package does not load all of it."""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any


def imported(package: str, homes: Mapping[str, Collection[str]], name: str) -> Any:
    """Return a public name of a package from the module in `homes` that has it. Raises `AttributeError`."""
    for module, names in homes.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
