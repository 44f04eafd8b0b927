"""Dataclasses, msgspec's structs and plain types, by msgspec. It sets the fields itself, then calls `__post_init__`."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_origin

from msgspec import ValidationError, convert, inspect, json, to_builtins

from mailroom.message.typed.converter import NATIVE, Schema, lists_and_text_keys, path, type_name
from mailroom.values import codec

REFUSED = (inspect.CustomType, inspect.ExtType, inspect.RawType, inspect.MemoryViewType)
TUPLES = (inspect.TupleType, inspect.VarTupleType, inspect.NamedTupleType)
# Keys that the codec takes, and those that are sent as text and read from it.
TEXT_KEYS = (inspect.StrType, inspect.BytesType, inspect.AnyType)
KEYS = (
    *(inspect.IntType, inspect.FloatType, inspect.DecimalType, inspect.UUIDType, inspect.EnumType, inspect.LiteralType),
    *(inspect.DateType, inspect.DateTimeType, inspect.TimeType, inspect.TimeDeltaType),
)

MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
AT = re.compile(r" - at `(?P<key>key` in `)?\$(?P<steps>[^`]*)`\Z")
STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")


def parts_of(info: inspect.Type) -> Iterator[inspect.Type | inspect.Field]:
    """Yield all that a type consists of, each part once: types may hold themselves."""
    seen: set[int] = set()
    waiting: list[Any] = [info]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, inspect.Type | inspect.Field) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for name in part.__struct_fields__:
            inner = getattr(part, name)
            waiting += inner if isinstance(inner, tuple) else [inner]


def class_of(part: inspect.Type | inspect.Field) -> Any:
    """Return the class that a part of a type stands for, without its arguments; None if there is none."""
    found = getattr(part, "cls", None)
    return get_origin(found) or found


class Structures:
    """Dataclasses, msgspec's structs and plain types, by msgspec."""

    def __init__(self, value_type: Any, parts: list[inspect.Type | inspect.Field]) -> None:
        for part in parts:
            _refuse(part)
        self._type = value_type
        self._names = frozenset(
            name for part in parts for name in (getattr(part, "encode_name", None), getattr(part, "tag_field", None))
            if name is not None
        )  # fmt: skip
        # Walked only where the type asks for it, since that is done in Python. Elsewhere the codec refuses a tuple.
        self._has_tuples_or_keys = any(
            isinstance(part, TUPLES) or (isinstance(part, inspect.DictType) and isinstance(part.key_type, KEYS))
            for part in parts
        )

    def read(self, plain: Any) -> Any:
        """See `Converter.read`."""
        # msgspec takes as long to find that argument as to make a small value, so it is given only where it says more.
        return convert(plain, self._type, str_keys=True) if self._has_tuples_or_keys else convert(plain, self._type)

    def write(self, value: Any) -> Any:
        """See `Converter.write`."""
        plain = to_builtins(value, builtin_types=NATIVE, enc_hook=_plain)
        return lists_and_text_keys(plain) if self._has_tuples_or_keys else plain

    def fault(self, error: Exception) -> str:
        """See `Converter.fault`."""
        text = str(error) if isinstance(error, ValidationError) else ""
        if error.__cause__ is not None:
            # What a `__post_init__` has raised, and after its text what msgspec put there.
            text = text[len(str(error.__cause__)) :]
        at = AT.search(text)
        steps = [_step(found) for found in STEP.finditer(at["steps"])] if at else []
        missing = MISSING.match(text)
        if missing and missing["name"] in self._names:
            return f"{path([*steps, missing['name']], self._names)} is missing"
        return f"{'a key of ' if at and at['key'] else ''}{path(steps, self._names)} does not fit"

    def schema(self, prefix: str) -> Schema:
        """See `Converter.schema`."""
        try:
            (schema,), parts = json.schema_components([self._type], ref_template=f"{prefix}{{name}}")
        except TypeError:  # JSON has no such type, as msgspec sees it
            return {}, {}
        return schema, parts


def _step(found: re.Match[str]) -> str | int:
    return int(found["index"]) if (found["index"] or "").isdecimal() else found["name"] or found["index"]


def _plain(item: Any) -> Any:
    """Take over where msgspec knows only the exact type: what subclasses a plain type goes as the codec sends it."""
    return codec.decode(codec.encode(item))


def _refuse(part: inspect.Type | inspect.Field) -> None:
    """Raise `TypeError` for a type whose values do not come back."""
    if isinstance(part, REFUSED) and class_of(part) is not object:  # which is what Any is, to some
        what = class_of(part) or type(part).__name__.removesuffix("Type")
        raise TypeError(f"{type_name(what)} is not a dataclass, model of pydantic, struct of msgspec or plain type")
    if isinstance(part, inspect.DataclassType) and not is_dataclass(class_of(part)):
        # attrs: msgspec would leave out its converters.
        raise TypeError(f"{type_name(class_of(part))} is not a dataclass")
    if isinstance(part, inspect.DictType) and not isinstance(part.key_type, TEXT_KEYS + KEYS):
        raise TypeError("a dict has keys of a type that text cannot stand for")
