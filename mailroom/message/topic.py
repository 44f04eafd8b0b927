"""A typed topic: the type and version of its values, and the type of the answers to its commands."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from mailroom.errors import ConfigurationError, DecodeError
from mailroom.message.message import Message, holding, plain
from mailroom.message.periodic import Missed, PeriodicMessage
from mailroom.message.typed.converter import Schema
from mailroom.message.typed.values import PLAIN, Values, values_of
from mailroom.values.names import Key, shown, topic_name, topic_pattern
from mailroom.values.numbers import whole

if TYPE_CHECKING:
    # Only a checker knows defaults before Python 3.13: with them a `Topic[Reserve]` is a `Topic[Reserve, Any]`.
    from typing_extensions import TypeVar as TypeVarWithDefault

    T = TypeVarWithDefault("T", default=Any)
    A = TypeVarWithDefault("A", default=Any)
else:
    T = TypeVar("T")
    A = TypeVar("A")

Upcaster = TypeVar("Upcaster", bound=Callable[[Any], Any])

SCHEMA = "schema"
MAX_VERSION = 999_999
VERSION = re.compile(r"[1-9][0-9]{0,5}\Z")

# What a `read` of a user raises for a value that does not fit. Any other exception means what it means in a handler: a
# `read` may ask another service, which may be down.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ExceptionGroup)


# D-messages-2: A `Topic` is taken apart when an `Outgoing` is made.
class Topic(Generic[T, A]):
    """A topic whose values have a type: every method that sends takes one in the place of text, as do subscriptions and
    `Handlers`.

    `value_type` is a dataclass, a pydantic model, a struct of msgspec or a plain type, such as `dict[str, int]`. It
    holds such types, lists, tuples, sets, dicts, enums and whatever the codec sends. For any other type `read` makes a
    value from a plain one, and `write` a plain one from a value; without one of them, the type decides. `replies` is
    the type of the answers to commands of this topic, by default plain values.

    `version` counts the forms that the values had. Above 1 it is sent as the header `schema`, and `upcast` says how
    values of older versions become newer ones.

    Raises `InvalidMessage` for an invalid name, `ConfigurationError` for a type that needs `read` and `write`.
    """

    __slots__ = ("_replies", "_upcasters", "_values", "name", "version")

    if not TYPE_CHECKING:
        # Plain type variables have no defaults, and `Topic[Reserve]` may stand in an annotation all the same.
        __class_getitem__ = classmethod(GenericAlias)

    def __init__(
        self,
        name: str,
        value_type: type[T] | UnionType,
        *,
        replies: type[A] | UnionType | None = None,
        version: int = 1,
        read: Callable[[Any], T] | None = None,
        write: Callable[[T], object] | None = None,
    ) -> None:
        self.name = topic_name(name)
        self.version = _version(version)
        self._values: Values[T] = _values(value_type, read, write)
        self._replies: Values[A] = PLAIN if replies is None else values_of(replies, "make a dataclass of it")
        self._upcasters: dict[int, Callable[[Any], Any]] = {}

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, version={self.version})"

    def upcast(self, version: int) -> Callable[[Upcaster], Upcaster]:
        """Register the decorated function: it makes a plain value of the next version of one of this version.

        A message of an older version goes through all upcasters from there. What one raises is a `DecodeError`. Raises
        `ConfigurationError` if this version is not below the topic's, or has an upcaster already.
        """
        if _version(version) >= self.version:
            raise ConfigurationError(
                f"upcast({version!r}) of {self.name}: give a version below the topic's, which is {self.version}.",
                code="MR-invalid-argument",
            )
        if version in self._upcasters:
            raise ConfigurationError(
                f"Topic {self.name} has an upcaster from version {version} already.", code="MR-registered-twice"
            )

        def register(upcaster: Upcaster) -> Upcaster:
            self._upcasters[version] = upcaster
            return upcaster

        return register

    def read(self, message: Message) -> T:
        """Return the typed value of a message of this topic, made anew with each call.

        Raises `DecodeError` if it does not fit, naming the field and not its content; if it is of a newer version; if
        an upcaster is missing or fails.
        """
        return self._values.read(self._current(message))

    def typed(self, message: Message) -> Message[T]:
        """Return the same message with its typed value as `value`. Raises what `read` raises."""
        return holding(message, self.read(message))

    def write(self, value: T) -> object:
        """Return a value as the plain one that is sent. Raises `EncodeError` if it does not fit, naming the field."""
        return self._values.write(value)

    def periodic(
        self,
        name: str,
        cron: str,
        value: T,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        kind: Literal["M", "E", "C"] = "M",
        time_zone: str = "UTC",
        missed: Missed = "once",
        jitter_s: float = 0.0,
    ) -> PeriodicMessage:
        """Return a periodic message of this topic, for `Periodic.add` or `Periodic.sync`; nothing is sent by this.

        The value is written now, in the topic's version. The other arguments are the fields of `PeriodicMessage`.
        """
        return PeriodicMessage(
            name, cron, self.name, self.write(value), key, topic_headers(self, headers), kind, time_zone, missed,
            jitter_s,
        )  # fmt: skip

    def read_answer(self, message: Message) -> A:
        """Return the typed value of the answer to a command of this topic. Raises `DecodeError`."""
        return self._replies.read(plain(message))

    def write_answer(self, value: A) -> object:
        """Return an answer to a command of this topic as the plain value that `Outbox.reply` takes.

        Raises `EncodeError` if it does not fit, naming the field.
        """
        return self._replies.write(value)

    def _current(self, message: Message) -> Any:
        """Return the plain value of a message in this version."""
        version = self._version_of(message)
        value = plain(message)
        while version < self.version:
            upcaster = self._upcasters.get(version)
            if upcaster is None:
                raise DecodeError(
                    f"The value is of version {version} of {self.name}, which has no upcaster from there: register one "
                    f"by upcast({version}), then replay.",
                    code="MR-upcaster-missing",
                )
            try:
                value = upcaster(value)
            except Exception as error:
                # Not chained: it may quote the payload.
                raise DecodeError(
                    f"The upcaster of {self.name} from version {version} raised {type(error).__name__}: mend it, then "
                    "replay. Message.raw still holds the value's bytes.",
                    code="MR-upcaster-failed",
                ) from None
            version += 1
        return value

    def _version_of(self, message: Message) -> int:
        sent = message.headers.get(SCHEMA)
        if sent is None:
            return 1
        if not VERSION.match(sent):
            raise DecodeError(
                f"The header {SCHEMA} is not a version: it is the text of an int from 1 to {MAX_VERSION:,}.",
                code="MR-value-version-invalid",
            )
        version = int(sent)
        if version > self.version:
            raise DecodeError(
                f"The value is of version {version} of {self.name}, and this program reads up to {self.version}: "
                "deploy one that reads it, then replay.",
                code="MR-value-version-too-new",
            )
        return version


def topic_schema(topic: "Topic[Any, Any]", prefix: str) -> Schema:
    """Return the JSON schema of a topic's values in JSON, and those that it refers to as `prefix` and their names.

    Empty, which any value fits, if nothing is known of what the topic's `write` returns.
    """
    return topic._values.schema(prefix)


def topic_headers(topic: "Topic[Any, Any]", given: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the headers of a message of this topic that is given these: with its version, if that is above 1."""
    if given is None:
        return None if topic.version == 1 else {SCHEMA: str(topic.version)}
    if not isinstance(given, Mapping) or (topic.version == 1 and SCHEMA not in given):
        return given  # what is not a mapping is refused with the other parts of the message
    return {**given, SCHEMA: str(topic.version)}


def topic_text(topic: "Topic[Any, Any] | str") -> str:
    """Return the name of a topic that is given as a `Topic` or as text. Raises `InvalidMessage`."""
    return topic.name if isinstance(topic, Topic) else topic_name(topic)


def pattern_text(topic: "Topic[Any, Any] | str") -> str:
    """Return what is subscribed to or handled, a `Topic`, a topic or a pattern, as text. Raises `InvalidMessage`."""
    return topic.name if isinstance(topic, Topic) else topic_pattern(topic)


def _version(version: int) -> int:
    return whole(version, "version", 1, MAX_VERSION, ConfigurationError)


def _values(value_type: Any, read: Callable[[Any], T] | None, write: Callable[[T], object] | None) -> Values[T]:
    for given, what in ((read, "read"), (write, "write")):
        if given is not None and not callable(given):
            raise ConfigurationError(
                f"{what} is {shown(given)}; give a function of one value.", code="MR-invalid-argument"
            )
    if read is not None and write is not None:
        return Values(_reading(read), write)
    by_type = values_of(value_type, "give read= and write=")
    if write is not None:
        return Values(by_type.read, write)  # what it writes is not known
    return replace(by_type, read=by_type.read if read is None else _reading(read))


def _reading(read: Callable[[Any], T]) -> Callable[[Any], T]:
    def guarded(plain: Any) -> T:
        try:
            return read(plain)
        except DecodeError:
            raise
        except MISFITS as error:
            # Not chained: it may quote the payload.
            raise DecodeError(
                f"The value does not fit: its topic's read raised {type(error).__name__}. Message.raw still holds its "
                "bytes.",
                code="MR-received-value-does-not-fit",
            ) from None

    return guarded
