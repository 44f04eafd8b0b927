"""The public names: what docs/api.md lists is what the modules export, and each of them is documented."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()
LISTED = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("module", LISTED)
def test_public_names_are_those_that_are_listed(module: str) -> None:
    found = import_module(module)
    assert sorted(found.__all__) == LISTED[module]
    for name in LISTED[module]:
        value = getattr(found, name)
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or value.__doc__, name


def test_every_module_that_says_what_it_exports_is_listed() -> None:
    packages = ("mailroom", "outbox", "inbox", "dispatcher")
    says = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "__all__ = [" in path.read_text()
    }
    assert says - {"mailroom.cli"} == set(LISTED)
