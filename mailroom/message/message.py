"""A delivered message as a consumer sees it."""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from uuid import UUID

from mailroom.errors import DecodeError
from mailroom.message.columns import DELIVERY_ROW, MESSAGE_ROW
from mailroom.sql.operation import Row

STATUS = re.compile(r"[0-9]{3}\Z")
UNREADABLE = 600

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_UNDECODED = object()

if TYPE_CHECKING:
    # Only a checker knows a default before Python 3.13: with it a bare `Message` is a `Message[Any]`.
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", covariant=True, default=Any)
else:
    V = TypeVar("V", covariant=True)

T = TypeVar("T")


class Message(Generic[V]):
    """One message of an inbox; a `Message[Reserve]` is one whose value a `Topic` has read as that type.

    `clock` is the Lamport clock of its delivery: unique on this node, and rising along each key. `sent_clock` is the
    clock of its sending, on the node `origin`. `id` never changes; use it as the idempotency key for effects outside
    the database. `kind` is M message, E event, C command or R reply; `message_type` and `event_type` are the sender's
    codes. `sent_at` and `delivered_at` are physical times (aware, UTC); they never decide the order. `source` says who
    sent it.
    """

    __slots__ = (  # noqa: RUF023 - the order is that of `__init__`
        "key", "clock", "sent_clock", "origin", "id", "topic", "kind", "message_type", "event_type", "_raw", "_json",
        "_headers", "source", "_sent_at", "_expires_at", "_delivered_at", "_value",
    )  # fmt: skip

    def __init__(
        self, key: str, clock: int, sent_clock: int, origin: UUID, message_id: UUID, topic: str, kind: str,
        message_type: str, event_type: str | None, value: bytes | None, value_json: str | None, headers: str | None,
        source: str | None, sent_at: datetime, expires_at: datetime | None, delivered_at: datetime,
    ) -> None:  # fmt: skip
        self.key = key
        self.clock = clock
        self.sent_clock = sent_clock
        self.origin = origin
        self.id = message_id
        self.topic = topic
        self.kind = kind
        self.message_type = message_type
        self.event_type = event_type
        self._raw = value
        self._json = value_json
        self._headers = headers
        self.source = source
        self._sent_at = sent_at
        self._expires_at = expires_at
        self._delivered_at = delivered_at
        self._value: Any = _UNDECODED

    @property
    def value(self) -> V:
        """The value, decoded on first use. Raises `DecodeError` if the bytes are not a value; `raw` still returns them.

        A worker lets go of it once the handler has returned. Asked again, it is decoded anew, and is another object.
        """
        if self._value is _UNDECODED:
            self._value = plain(self)
        return cast(V, self._value)

    @property
    def raw(self) -> bytes:
        """The value as it was sent: CBOR, or JSON text in UTF-8 for a message that was written as `value_json`."""
        return cast(bytes, self._raw) if self._json is None else self._json.encode()

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, text to text."""
        return NO_HEADERS if self._headers is None else MappingProxyType(json.loads(self._headers))

    @property
    def status(self) -> int:
        """What a reply says of its command: 200 done, 400 rejected, 500 failed; 600 if it says nothing readable."""
        text = self.headers.get("status", "")
        return int(text) if STATUS.match(text) else UNREADABLE

    @property
    def sent_at(self) -> datetime:
        """When it was sent, by its sender's database."""
        return self._sent_at.replace(tzinfo=UTC)

    @property
    def delivered_at(self) -> datetime:
        """When it was delivered."""
        return self._delivered_at.replace(tzinfo=UTC)

    @property
    def expires_at(self) -> datetime | None:
        """When it would have been dropped if it had not been delivered; None for never."""
        return None if self._expires_at is None else self._expires_at.replace(tzinfo=UTC)

    def __repr__(self) -> str:
        # Without the value, since a repr ends up in logs.
        return f"Message(clock={self.clock}, topic={self.topic!r}, key={self.key!r}, id={self.id})"


# The columns that a message is made of, in the order of `Message.__init__`: every statement that returns messages
# selects them so. Times are in UTC: in another time zone, the first hours of the year 1 may fall into a year that
# Python does not have.
_COLUMNS = {column.name: column for column in (*DELIVERY_ROW, *MESSAGE_ROW)}
READ = tuple(_COLUMNS[name] for name in list(inspect.signature(Message).parameters))
_IN_UTC = {column: "timestamp" for column in READ if column.type == "timestamptz"}
EXPRESSIONS = {
    column.name: f"{column.name} AT TIME ZONE 'UTC'" if column in _IN_UTC else column.given() for column in READ
}
SELECTED = ", ".join(EXPRESSIONS.values())
COLUMNS = {column.name: _IN_UTC.get(column, column.plain) for column in READ}

# What `Message.__init__` was given, in its order.
_given = attrgetter(*Message.__slots__[: len(READ)])


# The times as they were read: naive, in UTC.
_sent_at, _delivered_at = attrgetter("_sent_at"), attrgetter("_delivered_at")


def sent_times(messages: Iterable[Message]) -> Iterator[datetime]:
    """Give when each was sent, as a naive time in UTC: for those who go over many messages."""
    return map(_sent_at, messages)


def delivered_times(messages: Iterable[Message]) -> Iterator[datetime]:
    """Give when each was delivered, in the same form."""
    return map(_delivered_at, messages)


def plain(message: Message) -> Any:
    """Decode the value of a message, anew with each call. Raises `DecodeError`."""
    return _decoding()(message.raw) if message._json is None else parsed(message._json)


@cache
def _decoding() -> Callable[[bytes], Any]:
    # On demand: code that only moves messages, as claims do, needs no codec.
    decode: Callable[[bytes], Any] = import_module("mailroom.values.codec").decode
    return decode


def let_go(message: Message) -> None:
    """Forget the decoded value: a thousand of them that live until the end of a batch cost 3 us a message.

    That is what the garbage collector takes to walk through them.
    """
    message._value = _UNDECODED


def holding(message: Message, value: T) -> Message[T]:
    """Return the same message with `value` in the place of the decoded one."""
    copied: Message[T] = Message(*_given(message))
    copied._value = value
    return copied


def parsed(text: str) -> object:
    """Return the value of a message that was written as JSON, or raise `DecodeError`."""
    # jsonb allows longer numbers and deeper nesting than Python can parse.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"The JSON cannot be read: {type(error).__name__}. Message.raw has its text.") from None


def messages(rows: Iterable[Row]) -> list[Message]:
    """Return the messages of rows of `SELECTED`, which may have more columns after these."""
    return [Message(*row[: len(READ)]) for row in rows]
