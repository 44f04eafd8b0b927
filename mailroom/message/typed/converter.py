"""What a library does with the values of a type, and what all that do it have in common."""

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from types import NoneType
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from msgspec import to_builtins

# What the codec sends as it is. Of anything else msgspec makes JSON's texts; it reads those of these types, too.
NATIVE = (bytes, bytearray, datetime, date, Decimal, UUID)
LEAVES = frozenset({str, int, float, bool, NoneType, *NATIVE})


# A JSON schema, and the schemas that it refers to by their names.
Schema: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


class Converter(Protocol):
    """What a library does with a type. Its exceptions may quote content."""

    def read(self, plain: Any) -> Any:
        """Make a value of a plain one."""
        ...

    def write(self, value: Any) -> Any:
        """Make a plain value of one."""
        ...

    def fault(self, error: Exception) -> str:
        """Say of an exception of `read` where in the value the fault is, without content."""
        ...

    def schema(self, prefix: str) -> Schema:
        """Return the JSON schema of the values in JSON; references are `prefix` and a name. Empty if it has none."""
        ...


def type_name(value_type: Any) -> str:
    """Return a type as errors name it."""
    return value_type.__name__ if isinstance(value_type, type) else str(value_type)


def path(steps: Iterable[object], names: frozenset[str]) -> str:
    """Return the way to a fault. What is not a name of the type is a key, and a key is content: it is not shown."""
    shown = (f".{step}" if step in names else f"[{step}]" if isinstance(step, int) else "[...]" for step in steps)
    return "value" + "".join(shown)


def lists_and_text_keys(item: Any) -> Any:
    """Return a plain value with its tuples as lists, and its keys as text where the codec would not take them."""
    # Most parts are leaves. A call for each of them would double the time.
    if isinstance(item, dict):
        return {
            _text_key(key): part if type(part) in LEAVES else lists_and_text_keys(part) for key, part in item.items()
        }
    if isinstance(item, (list, tuple)):
        return [part if type(part) in LEAVES else lists_and_text_keys(part) for part in item]
    return item


def _text_key(key: Any) -> str | bytes:
    return key if isinstance(key, (str, bytes)) else str(to_builtins(key))
