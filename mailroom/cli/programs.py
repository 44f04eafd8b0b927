"""`mailroom bench` and `mailroom demo`: beside our packages in a checkout, inside this package when installed.

Installed under their own names, `benchmarks` and `examples`, they would be in the way of other people's packages. They
import their own modules relatively, since they have two names.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

PACKAGES = {"bench": ("mailroom._benchmarks", "benchmarks"), "demo": ("mailroom._flights", "examples.flights")}


def __getattr__(name: str) -> Any:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed, in_checkout = PACKAGES[name]
    package = installed if find_spec(installed) else in_checkout
    return getattr(import_module(f"{package}.cli"), name)
