"""How values of a type travel: `write` makes plain values, which the codec takes, and `read` makes them again.

The type alone decides how. What holds a pydantic model is pydantic's (`mailroom.models`). Dataclasses, msgspec's
structs and plain types are msgspec's, which sets the fields itself and then calls `__post_init__`.

Values are data of users, and so are the keys of dicts. Errors of msgspec and pydantic may quote both, so their texts go
nowhere: an error here names the way to the fault, by names that the type has.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin
from uuid import UUID

from msgspec import ValidationError, convert, inspect, to_builtins

from mailroom import codec
from mailroom.errors import ConfigurationError, DecodeError, EncodeError

T = TypeVar("T")

# What the codec sends as it is. Of anything else msgspec makes JSON's texts; it reads those of these types, too.
NATIVE = (bytes, bytearray, datetime, date, Decimal, UUID)


@dataclass(frozen=True, slots=True)
class Values(Generic[T]):
    """The values of one type. `read` makes one of a plain value, `write` a plain value of one.

    Those of `values_of` raise `DecodeError` and `EncodeError`, which name the field at fault and show no content.
    """

    read: Callable[[Any], T]
    write: Callable[[T], object]


PLAIN: Values[Any] = Values(lambda plain: plain, lambda value: value)


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


def values_of(value_type: Any, instead: str) -> Values[Any]:
    """Return how the values of a type travel.

    Raises `ConfigurationError` for a type whose values would not come back; `instead` says there what else to do.
    """
    name = type_name(value_type)
    try:
        converter = _converter(value_type)
    except Exception as error:  # of any class: annotations are evaluated now
        raise ConfigurationError(
            f"Values of the type {name} cannot be sent: {error}. So {instead}.", code="MR-type-unsupported"
        ) from None

    def read(plain: Any) -> Any:
        try:
            return converter.read(plain)
        except Exception as error:
            # Not chained, here and below: the causes quote the payload.
            raise DecodeError(
                f"The value is no {name}: {converter.fault(error)}. Message.raw still holds its bytes.",
                code="MR-received-value-does-not-fit",
            ) from None

    def write(value: Any) -> object:
        try:
            plain = converter.write(value)
        except EncodeError:
            raise
        except Exception as error:
            raise EncodeError(
                f"Cannot send this value: it cannot be written as {name}, {type(error).__name__} came out of it.",
                code="MR-sent-value-does-not-fit",
            ) from None
        try:
            # Python checks no types. What no receiver could read is refused while its sender can do something about it.
            converter.read(plain)
        except Exception as error:
            raise EncodeError(
                f"Cannot send this value: it is no {name}, {converter.fault(error)}.", code="MR-sent-value-does-not-fit"
            ) from None
        return plain

    return Values(read, write)


def type_name(value_type: Any) -> str:
    """Return a type as errors name it."""
    return value_type.__name__ if isinstance(value_type, type) else str(value_type)


def path(steps: Iterable[object], names: frozenset[str]) -> str:
    """Return the way to a fault. What is no name of the type is a key, and a key is content: it is not shown."""
    shown = (f".{step}" if step in names else f"[{step}]" if isinstance(step, int) else "[...]" for step in steps)
    return "value" + "".join(shown)


def lists_and_text_keys(item: Any) -> Any:
    """Return a plain value with its tuples as lists, and its keys as text where the codec would not take them."""
    if isinstance(item, dict):
        return {_text_key(key): lists_and_text_keys(part) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return [lists_and_text_keys(part) for part in item]
    return item


def _text_key(key: Any) -> str | bytes:
    return key if isinstance(key, str | bytes) else str(to_builtins(key))


def _converter(value_type: Any) -> Converter:
    # Asked first, since msgspec takes no union of models.
    if not _names_a_model(value_type):
        parts = list(_parts(inspect.type_info(value_type)))
        if not any(_names_a_model(_class(part)) for part in parts):
            return Structures(value_type, parts)
    # Who has a model has imported pydantic. Nobody else needs it.
    from mailroom.models import Models

    return Models(value_type)


def _names_a_model(value_type: Any) -> bool:
    return hasattr(value_type, "__pydantic_validator__") or any(map(_names_a_model, get_args(value_type)))


def _parts(info: inspect.Type) -> Iterator[inspect.Type | inspect.Field]:
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


def _class(part: inspect.Type | inspect.Field) -> Any:
    found = getattr(part, "cls", None)
    return get_origin(found) or found


# --- msgspec --------------------------------------------------------------------------------------------------------

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
        return convert(plain, self._type, str_keys=self._has_tuples_or_keys)

    def write(self, value: Any) -> Any:
        """See `Converter.write`."""
        plain = to_builtins(value, builtin_types=NATIVE, enc_hook=_plain)
        return lists_and_text_keys(plain) if self._has_tuples_or_keys else plain

    def fault(self, error: Exception) -> str:
        """See `Converter.fault`."""
        text = str(error) if isinstance(error, ValidationError) else ""
        if error.__cause__ is not None:
            # What a `__post_init__` has raised, and behind its text what msgspec put there.
            text = text[len(str(error.__cause__)) :]
        at = AT.search(text)
        steps = [_step(found) for found in STEP.finditer(at["steps"])] if at else []
        missing = MISSING.match(text)
        if missing and missing["name"] in self._names:
            return f"{path([*steps, missing['name']], self._names)} is missing"
        return f"{'a key of ' if at and at['key'] else ''}{path(steps, self._names)} does not fit"


def _step(found: re.Match[str]) -> str | int:
    return int(found["index"]) if (found["index"] or "").isdecimal() else found["name"] or found["index"]


def _plain(item: Any) -> Any:
    """Take over where msgspec knows only the exact type: what subclasses a plain type goes as the codec sends it."""
    return codec.decode(codec.encode(item))


def _refuse(part: inspect.Type | inspect.Field) -> None:
    """Raise `TypeError` for a type whose values do not come back."""
    if isinstance(part, REFUSED) and _class(part) is not object:  # which is what Any is, to some
        what = _class(part) or type(part).__name__.removesuffix("Type")
        raise TypeError(f"{type_name(what)} is no dataclass, model of pydantic, struct of msgspec or plain type")
    if isinstance(part, inspect.DataclassType) and not is_dataclass(_class(part)):
        # attrs: msgspec would leave out its converters.
        raise TypeError(f"{type_name(_class(part))} is no dataclass")
    if isinstance(part, inspect.DictType) and not isinstance(part.key_type, TEXT_KEYS + KEYS):
        raise TypeError("a dict has keys of a type that text cannot stand for")
