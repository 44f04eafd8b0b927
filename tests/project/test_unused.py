"""The product has no name that only tests use: a model that they compare it with stands in `tests/models`."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source import parsed

ROOT = Path(__file__).parents[2]
PRODUCT = ("mailroom", "outbox", "inbox", "dispatcher", "spark_jobs")
USERS = (*PRODUCT, "alembic", "benchmarks", "examples")
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Called by who imports the module, not by name: pytest, and Python itself.
CALLED = ("pytest_", "__")
# Found by Django at their places in an app.
OF_AN_APP = {"MailroomConfig", "Command", "Migration"}

Name = tuple[str, str]


def modules() -> dict[str, ast.Module]:
    files = [path for place in USERS for path in sorted((ROOT / place).rglob("*.py"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): tree
        for path, tree in parsed(files)
    }


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module defines for others or for itself. What a decorator registers needs no other use."""
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not statement.decorator_list:
                yield name, statement
            case ast.ClassDef(name=name):
                yield name, statement
            case ast.Assign(targets=targets):
                for target in targets:
                    names = [target, *(target.elts if isinstance(target, ast.Tuple) else ())]
                    yield from ((each.id, statement) for each in names if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement


def read(node: ast.AST) -> Iterator[str]:
    """The names that are read in a part of a module, also in annotations that are text."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            if isinstance(each.ctx, ast.Load):
                yield each.id
        elif isinstance(each, ast.Assign | ast.arg | ast.FunctionDef | ast.AsyncFunctionDef):
            match each:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    yield from ast.literal_eval(value)
                case (
                    ast.arg(annotation=ast.Constant(value=str(text)))
                    | ast.FunctionDef(returns=ast.Constant(value=str(text)))
                    | ast.AsyncFunctionDef(returns=ast.Constant(value=str(text)))
                ):
                    yield from re.findall(r"\w+", text)


def imported(tree: ast.Module) -> Iterator[Name]:
    """The names of other modules that a module uses, by `from module import name` or as `module.name`."""
    named: dict[str, str] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module is not None:
            for alias in each.names:
                yield each.module, alias.name
                named[alias.asname or alias.name] = f"{each.module}.{alias.name}"
        elif isinstance(each, ast.Import):
            named |= {alias.asname or alias.name: alias.name for alias in each.names}
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in named:
            yield named[each.value.id], each.attr


def described(tree: ast.Module) -> Iterator[Name]:
    """What a broker's descriptor names by text, so that its clients are imported only for a bridge."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and re.fullmatch(r"[\w.]+:\w+", str(each.value)):
            module, _, name = str(each.value).partition(":")
            yield module, name


@pytest.mark.slow
def test_every_name_of_the_product_is_public_or_used_by_more_than_tests() -> None:
    trees = modules()
    used = {name for tree in trees.values() for name in imported(tree)}
    used |= {tuple(each.split(":")) for group in ENTRY_POINTS["entry-points"].values() for each in group.values()}
    used |= {name for module, tree in trees.items() if module.endswith(".broker") for name in described(tree)}
    unused = []
    for module, tree in trees.items():
        if module.partition(".")[0] not in PRODUCT:
            continue
        names = {statement: set(read(statement)) for statement in tree.body}
        unused += [
            f"{module}.{name}"
            for name, statement in defined(tree)
            if not name.startswith(CALLED)
            and not (name in OF_AN_APP and module.startswith("mailroom.django."))
            and (module, name) not in used
            and not any(name in there for other, there in names.items() if other is not statement)
        ]
    assert unused == []
