"""How what a node tells about itself is shown in a console of Python, and in a notebook."""

from dataclasses import MISSING, Field, fields
from textwrap import indent
from typing import Any, cast

WIDTH = 100  # characters of a line


class ReadableRepr:
    """A dataclass whose `repr` people can read: a field per line if it is long, without those that say the usual."""

    __slots__ = ()

    def __repr__(self) -> str:
        given = [
            f"{each.name}={_shown(getattr(self, each.name))}"
            for each in fields(cast(Any, self)) if each.repr and not _is_usual(each, getattr(self, each.name))
        ]  # fmt: skip
        return _broken(f"{type(self).__name__}(", given, ")")


def _is_usual(field: Field[Any], value: object) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and bool(value == default)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return _broken("[", list(map(_shown, value)), "]")
    if isinstance(value, tuple) and type(value) is tuple:
        return _broken("(", list(map(_shown, value)), ",)" if len(value) == 1 else ")")
    return repr(value)


def _broken(begin: str, parts: list[str], end: str) -> str:
    line = f"{begin}{', '.join(parts)}{end}"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    return "\n".join([begin, *(indent(f"{each},", "    ") for each in parts), end.lstrip(",")])
