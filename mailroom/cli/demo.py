"""`mailroom demo`: beside our packages in a checkout, inside this package when installed.

Installed under its own name, `examples`, it would be in the way of other people's packages. It imports its own modules
relatively, since it has two names.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

INSTALLED, IN_CHECKOUT = "mailroom._flights", "examples.flights"


def __getattr__(name: str) -> Any:
    if name != "demo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{INSTALLED if find_spec(INSTALLED) else IN_CHECKOUT}.cli").demo
