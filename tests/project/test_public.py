"""The public names: what docs/reference/api.md lists is what the modules export, and each of them is documented."""

import contextlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

from mailroom.events import KINDS
from tests.support.pages import page_named

ROOT = Path(__file__).parents[2]
PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs")
PAGE = page_named("api.md").read_text()
LISTED = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
}
MODULES = [module for module in LISTED if module != "spark_jobs"]  # that one needs Spark: tests/spark/test_public.py


def public(*modules: str) -> Iterator[tuple[str, str, Any]]:
    """The public names of the modules, or all: in which module, and what they are."""
    for module in modules or MODULES:
        found = import_module(module)
        yield from ((module, name, getattr(found, name)) for name in LISTED[module])


def names_are_those_that_are_listed(*modules: str) -> None:
    found = {module: sorted(import_module(module).__all__) for module in modules}
    assert found == {module: LISTED[module] for module in modules}
    for _, name, value in public(*modules):
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or value.__doc__, name


def test_public_names_are_those_that_are_listed() -> None:
    names_are_those_that_are_listed(*MODULES)


def public_calls(name: str, value: object) -> Iterator[tuple[str, inspect.Signature]]:
    """What a public name lets users call: itself, and the methods of a class."""
    if inspect.isfunction(value):
        yield name, inspect.signature(value)
    if inspect.isclass(value):
        with contextlib.suppress(ValueError):  # an exception, made as its base class is
            yield name, inspect.signature(value)
        for each, method in inspect.getmembers(value, inspect.isfunction):
            if not each.startswith("_") or each == "__call__":
                yield f"{name}.{each}", inspect.signature(method)


KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
# Where a schema may be given by position, and why.
MADE_BY_US = {"Status": "what `status` returns"} | {kind.__name__: "what listeners are given" for kind in KINDS}


def test_schema_is_given_by_its_name_only_and_a_connection_by_its_name_too() -> None:
    for _, listed, value in public():
        for call, signature in public_calls(listed, value):
            kinds = {name: each.kind for name, each in signature.parameters.items()}
            assert kinds.get("schema", KEYWORD_ONLY) is KEYWORD_ONLY or call in MADE_BY_US, call
            for name in {"connection", "source", "target"} & set(kinds):
                assert kinds[name] is not inspect.Parameter.POSITIONAL_ONLY, call


def works_on_connections(signature: inspect.Signature) -> bool:
    """Whether a call takes a connection, or what gives one: then it is sync or async by that."""
    return any(
        name in ("connection", "connect") or "Connection" in str(each.annotation)
        for name, each in signature.parameters.items()
    )


def form(signature: inspect.Signature) -> list[tuple[str, object]]:
    """The names and kinds of parameters."""
    return [(name, each.kind) for name, each in signature.parameters.items()]


def forms(name: str, value: object) -> dict[str, list[tuple[str, object]]]:
    """Those of all that a public name lets users call, without the part that makes a name that of an async twin."""
    return {call.removeprefix(name): form(signature) for call, signature in public_calls(name, value)}


# What is async only, and why.
ASYNC_ONLY = {"WebhookApp": "ASGI is"}


def test_class_that_works_on_connections_has_an_async_one_with_the_same_methods() -> None:
    for module, name, value in public():
        twin = f"Async{name}" if inspect.isclass(value) else f"{name}_async"
        if name.startswith("Async") or name.endswith("_async") or name in ASYNC_ONLY:
            continue
        if any(works_on_connections(signature) for _, signature in public_calls(name, value)):
            assert twin in LISTED[module]
            assert forms(twin, getattr(import_module(module), twin)) == forms(name, value)


def classes(annotation: object) -> set[type]:
    """Mailroom's classes that an annotation names."""
    origin, parts = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Generator:  # of an operation: what comes of it in the end
        parts = parts[-1:]
    found = {each for part in parts for each in classes(part)}
    if inspect.isclass(origin) and origin.__module__.partition(".")[0] in PACKAGES:
        found.add(origin)
    return found


def test_what_public_calls_return_is_public() -> None:
    listed = {name for names in LISTED.values() for name in names}
    for _, name, value in public():
        calls = [method for each, method in inspect.getmembers(value, inspect.isfunction) if not each.startswith("_")]
        for call in [value] if inspect.isfunction(value) else calls:
            function = inspect.unwrap(call)
            returns = function.__annotations__.get("return")
            returned = eval(returns, function.__globals__) if isinstance(returns, str) else returns
            if function is call and get_origin(returned) is Generator:
                continue  # an operation, for our own runners
            assert {each.__name__ for each in classes(returned)} <= listed, f"{name}: {call}"


def test_every_module_that_says_what_it_exports_is_listed() -> None:
    says = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__all__ = [" in path.read_text()
    }
    assert says - {"mailroom.cli"} == set(LISTED)


def test_functions_are_registered_without_loading_the_daemon() -> None:
    loaded = "from dispatcher import Registrations; import sys; print('dispatcher.daemon' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "False\n"


def test_the_name_of_a_class_means_one_class() -> None:
    """Who reads a name in a log, in an annotation or in a search need not ask which of several it is."""
    texts = [path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    # By its text: to parse all modules takes seconds.
    names = Counter(name for text in texts for name in re.findall(r"^class ([^_\W]\w*)", text, re.MULTILINE))
    assert [name for name, times in names.items() if times > 1] == []
