"""What the reference of the public names cannot see in the source: an extension of griffe, named in mkdocs.yml.

`mailroom.sql.methods` makes methods and functions of operations. Who only reads the source sees an assignment; so each
is taken from the module itself, with its signature and docstring. An async form and its sync form lead to each other.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

MAKERS = ("on_connections", "on_connection", "on_async_connection")
# Where each public name is shown; both forms are on one page.
API = (Path(__file__).parents[1] / "docs" / "reference" / "api.md").read_text()
SHOWN = {
    name: module
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", API, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}
SYNC_FORM = re.compile(r"(?<=See )`(?P<path>(?P<name>\w+)(?:\.\w+)?)`")
SPECIAL = ("__init__", "__call__")  # what users call; what else Python calls says nothing here


class Made(griffe.Extension):
    """Puts functions in the place of such assignments."""

    def on_module_members(self, *, node: Any, mod: griffe.Module, **_: Any) -> None:
        """Do it in a module."""
        _take(node, mod, mod.path)
        _link(mod)

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Do it in a class, and leave out what only Python calls."""
        for name in list(cls.members):
            if name.startswith("__") and name.endswith("__") and name not in SPECIAL:
                cls.del_member(name)
        _take(node, cls, cls.module.path, cls.name)
        _link(cls)
        other = cls.name.removeprefix("Async") if cls.name.startswith("Async") else f"Async{cls.name}"
        if cls.docstring and {cls.name, other} <= SHOWN.keys():
            form = "sync" if cls.name.startswith("Async") else "async"
            cls.docstring.value += f"\n\nIts {form} form is [`{other}`][{SHOWN[other]}.{other}]."


def _take(node: Any, holder: griffe.Module | griffe.Class, *place: str) -> None:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            if isinstance(called, ast.Name) and called.id in MAKERS:
                for each in ast.walk(statement.targets[0]):
                    if isinstance(each, ast.Name):
                        holder.set_member(each.id, _function(each.id, *place))


def _link(holder: griffe.Module | griffe.Class) -> None:
    for member in holder.members.values():
        if not member.is_alias and member.is_function and member.docstring:
            member.docstring.value = SYNC_FORM.sub(_linked, member.docstring.value)


def _linked(found: re.Match[str]) -> str:
    module = SHOWN.get(found["name"])
    return f"[{found[0]}][{module}.{found['path']}]" if module else found[0]


def _function(name: str, module: str, of: str | None = None) -> griffe.Function:
    holder = import_module(module)
    made = getattr(getattr(holder, of) if of else holder, name)
    signature = inspect.signature(made)
    parameters = [
        griffe.Parameter(
            each.name,
            annotation=_annotation(each.annotation),
            kind=getattr(griffe.ParameterKind, each.kind.name.lower()),
            default=None if each.default is each.empty else repr(each.default),
        )
        for each in signature.parameters.values()
    ]
    function = griffe.Function(
        name, parameters=griffe.Parameters(*parameters), returns=_annotation(signature.return_annotation)
    )
    function.docstring = griffe.Docstring(inspect.getdoc(made) or "", parent=function)
    if inspect.iscoroutinefunction(made):
        function.labels.add("async")
    return function


def _annotation(given: object) -> str | None:
    if given is inspect.Parameter.empty:
        return None
    return given if isinstance(given, str) else inspect.formatannotation(given)
