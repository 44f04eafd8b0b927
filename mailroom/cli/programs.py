"""`mailroom bench` and `mailroom demo`, which stand beside our packages in a checkout and inside of this one installed.

Installed they would else be packages named `benchmarks` and `examples`, as other people's are. Their imports of their
own modules are relative, since they go by two names.
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
