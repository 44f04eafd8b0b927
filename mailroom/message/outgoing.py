"""A message to be sent, the checks it passes before the database sees it, and its INSERT."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from struct import Struct
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar
from uuid import UUID

from mailroom.errors import InvalidMessage
from mailroom.message.carry import headers_json
from mailroom.message.columns import MESSAGE_ROW, written
from mailroom.message.insert import Insert
from mailroom.message.topic import Topic, topic_headers
from mailroom.sql.operation import Row
from mailroom.values import codec
from mailroom.values.names import MAX_AFTER_CLOCK, Key, key_text, shown, topic_name
from mailroom.values.numbers import TEN_YEARS_S, seconds, whole

T = TypeVar("T")

Kind: TypeAlias = Literal["M", "E", "C", "R"]
MessageType: TypeAlias = Literal["O", "D", "C", "U"]
EventType: TypeAlias = Literal["C", "U", "D"]

# What a writer sets, in the order of `row_of`, each with its type; every other column has a default.
SENT_COLUMNS = written(MESSAGE_ROW)

EARLIEST, LATEST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class Fields(TypedDict, total=False):
    """The optional fields of every message; they mean what the arguments of `Outbox.send` mean."""

    key: Key | None
    headers: Mapping[str, str] | None
    message_type: MessageType
    event_type: EventType | None
    deliver_at: datetime | None
    expires_at: datetime | None
    after_clock: int | None
    id: UUID | None
    deliver_after: timedelta | float | None


@dataclass(frozen=True, slots=True, init=False)
class Outgoing:
    """One message for `send_many`; the fields mean what the arguments of `Outbox.send` mean.

    Made with a `Topic`, it has that one's name as `topic`, the plain value as `value`, and the version in `headers`.
    """

    topic: str
    value: object = field(repr=False)  # kept out of repr, which ends up in logs
    key: Key | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    kind: Kind = "M"
    message_type: MessageType = "U"
    event_type: EventType | None = None
    deliver_at: datetime | None = None
    expires_at: datetime | None = None
    after_clock: int | None = None
    id: UUID | None = None
    deliver_after: timedelta | float | None = None

    def __init__(
        self, topic: Topic[T, Any] | str, value: T, key: Key | None = None, headers: Mapping[str, str] | None = None,
        kind: Kind = "M", message_type: MessageType = "U", event_type: EventType | None = None,
        deliver_at: datetime | None = None, expires_at: datetime | None = None, after_clock: int | None = None,
        id: UUID | None = None, deliver_after: timedelta | float | None = None,
    ) -> None:  # fmt: skip
        """Take a `Topic` apart: what is sent knows of names and plain values only.

        A type checker compares the value with the topic. The `__init__` that a frozen dataclass gets by itself takes
        2.1 us, a third of what `row_of` does; this one takes 1.1.
        """
        plain: object = value
        if isinstance(topic, Topic):
            plain, headers = topic.write(value), topic_headers(topic, headers)
            topic = topic.name
        _set_topic(self, topic)
        _set_value(self, plain)
        _set_key(self, key)
        _set_headers(self, headers)
        _set_kind(self, kind)
        _set_message_type(self, message_type)
        _set_event_type(self, event_type)
        _set_deliver_at(self, deliver_at)
        _set_expires_at(self, expires_at)
        _set_after_clock(self, after_clock)
        _set_id(self, id)
        _set_deliver_after(self, deliver_after)

    def __post_init__(self) -> None:
        """Take a `Topic` apart in a dataclass that inherits from this one: its own `__init__` calls this."""
        topic: object = self.topic
        if isinstance(topic, Topic):
            Outgoing.__init__(self, *(getattr(self, each.name) for each in fields(Outgoing)))


(
    _set_topic, _set_value, _set_key, _set_headers, _set_kind, _set_message_type, _set_event_type, _set_deliver_at,
    _set_expires_at, _set_after_clock, _set_id, _set_deliver_after,
) = (getattr(Outgoing, each.name).__set__ for each in fields(Outgoing))  # fmt: skip


# Gives the headers of a message that is about to be sent, with the context of its span; set by `mailroom.tracing`.
tracing: Callable[[Outgoing], Mapping[str, str] | None] | None = None


def row_of(message: Outgoing, fresh: bytes | None = None) -> Row:
    """Return the values of `SENT_COLUMNS`, or raise `InvalidMessage` naming the limit that is broken.

    With `fresh`, of `fresh_ids`, a message without an id has that one, and the row has its bytes.
    """
    if message.id is not None:
        message_id: UUID | bytes = given_id(message.id)
    elif fresh is not None:
        message_id = fresh
    else:
        message_id = UUID(bytes=os.urandom(16), version=4)
    topic, kind, message_type, event_type = _sort(message.topic, message.kind, message.message_type, message.event_type)
    return (
        message_id,
        topic,
        # An unordered message gets its own id as key, which no other message has.
        _text(message_id) if message.key is None else key_text(message.key),
        kind,
        message_type,
        event_type,
        codec.encode(message.value),
        headers_json(message.headers if tracing is None else tracing(message)),
        not_before(message.deliver_at, message.deliver_after),
        None if message.expires_at is None else aware(message.expires_at, "expires_at"),
        None if message.after_clock is None else clock(message.after_clock),
    )


Sort: TypeAlias = tuple[str, str, str, str | None]


def _sort(topic: str, kind: str, message_type: str, event_type: str | None) -> Sort:
    """Return the checked topic, kind and types of a message. Raises `InvalidMessage`."""
    try:
        return _known_sort(topic, kind, message_type, event_type)
    except TypeError:
        pass  # What has no hash is not text, and is refused as such.
    return _checked_sort(topic, kind, message_type, event_type)


def _checked_sort(topic: str, kind: str, message_type: str, event_type: str | None) -> Sort:
    return (
        topic_name(topic),
        _one_of(kind, "MECR", "kind"),
        _one_of(message_type, "ODCU", "message_type"),
        None if event_type is None else _one_of(event_type, "CUD", "event_type"),
    )


# A program sends few sorts of messages, and to check one takes 0.7 us, a tenth of `row_of`. They are told apart by
# their types too: what is not text may equal one.
_known_sort = lru_cache(maxsize=1024, typed=True)(_checked_sort)


# Random ids of version 4 have six bits that are not random (RFC 9562, 5.4). So many are drawn at once.
DRAWN = 64
RANDOM = int.from_bytes(bytes.fromhex("ffffffffffff0fff3fffffffffffffff") * DRAWN)
FIXED = int.from_bytes(bytes.fromhex("00000000000040008000000000000000") * DRAWN)
SPLIT = Struct("16s" * DRAWN).unpack


def fresh_ids() -> Iterator[bytes]:
    """Yield new ids for many messages, as bytes: making a UUID of each would take longer than drawing it."""
    while True:
        drawn = (int.from_bytes(os.urandom(16 * DRAWN)) & RANDOM | FIXED).to_bytes(16 * DRAWN)
        yield from SPLIT(drawn)


def _text(message_id: UUID | bytes) -> str:
    return str(UUID(bytes=message_id) if isinstance(message_id, bytes) else message_id)


def given_id(given: UUID) -> UUID:
    """Return the given id. Raises `InvalidMessage` if it is not a UUID."""
    if not isinstance(given, UUID):
        raise InvalidMessage(
            f"id is a UUID, not {type(given).__name__}: pass UUID(...) of it, or leave it out.",
            code="MR-invalid-argument",
        )
    return given


def _one_of(code: str, allowed: str, what: str) -> str:
    if isinstance(code, str) and len(code) == 1 and code in allowed:
        return str.__str__(code)  # of a text enum the value, which each driver takes as text
    raise InvalidMessage(f"{what} {shown(code)} is none of {', '.join(allowed)}.", code="MR-invalid-argument")


def aware(moment: datetime, what: str) -> datetime:
    """Return a time that PostgreSQL can store. Raises `InvalidMessage` without a time zone, or out of range."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidMessage(
            f"{what} needs a datetime with a time zone, such as datetime.now(timezone.utc).", code="MR-invalid-time"
        )
    if not EARLIEST <= moment < LATEST:
        raise InvalidMessage(
            f"{what} is outside the years 1 to 9998 in UTC: {moment.isoformat()}.", code="MR-invalid-time"
        )
    return moment


def not_before(at: datetime | None, after: timedelta | float | None) -> datetime | None:
    """Return when a message is due, None for at once; `after` counts from now, by the clock of this machine."""
    if after is None:
        return None if at is None else aware(at, "deliver_at")
    if at is not None:
        raise InvalidMessage(
            "deliver_at and deliver_after say when a message is due: give one of the two.", code="MR-arguments-conflict"
        )
    after_s = after.total_seconds() if isinstance(after, timedelta) else after
    after_s = seconds(after_s, "deliver_after", TEN_YEARS_S, zero=True, error=InvalidMessage)
    return datetime.now(UTC) + timedelta(seconds=after_s)


def clock(clock: int) -> int:
    """Return `after_clock`. Raises `InvalidMessage` if it is not a clock."""
    return whole(clock, "after_clock", 0, MAX_AFTER_CLOCK)


INSERT = Insert("outbox", MESSAGE_ROW)
sending, sending_many = INSERT.one, INSERT.all  # of rows of `row_of`
