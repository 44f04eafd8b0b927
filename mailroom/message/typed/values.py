"""How values of a type travel: `write` makes plain values, which the codec takes, and `read` makes them again.

The type alone decides how. What holds a pydantic model is pydantic's (`models`). Dataclasses, msgspec's structs
and plain types are msgspec's (`structures`).

Values are data of users, and so are the keys of dicts. Errors of msgspec and pydantic may quote both, so their texts go
nowhere: an error here names the way to the fault, by names that the type has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from msgspec import inspect

from mailroom.errors import ConfigurationError, DecodeError, EncodeError
from mailroom.message.typed.converter import Converter, Schema, type_name
from mailroom.message.typed.structures import Structures, class_of, parts_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Values(Generic[T]):
    """The values of one type. `read` makes one of a plain value, `write` a plain value of one.

    Those of `values_of` raise `DecodeError` and `EncodeError`, which name the field at fault and show no content.
    `schema` is that of `Converter`.
    """

    read: Callable[[Any], T]
    write: Callable[[T], object]
    schema: Callable[[str], Schema] = lambda _prefix: ({}, {})


PLAIN: Values[Any] = Values(lambda plain: plain, lambda value: value)


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
                f"The value is not a valid {name}: {converter.fault(error)}. Message.raw still holds its bytes.",
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
                f"Cannot send this value: it is not a valid {name}, {converter.fault(error)}.",
                code="MR-sent-value-does-not-fit",
            ) from None
        return plain

    return Values(read, write, converter.schema)


def _converter(value_type: Any) -> Converter:
    # Asked first, since msgspec takes no union of models.
    if not _names_a_model(value_type):
        parts = list(parts_of(inspect.type_info(value_type)))
        if not any(_names_a_model(class_of(part)) for part in parts):
            return Structures(value_type, parts)
    # Code that has a model has imported pydantic. Other code does not need it.
    from mailroom.message.typed.models import Models

    return Models(value_type)


def _names_a_model(value_type: Any) -> bool:
    return hasattr(value_type, "__pydantic_validator__") or any(map(_names_a_model, get_args(value_type)))
