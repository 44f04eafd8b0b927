"""PuzzleDB's messages: the bytes that its coordinators exchange, to and from messages of Mailroom.

PuzzleDB's programs write a message object with go-cbor: a Go struct as one CBOR map of field names and values.
"""

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, cast
from uuid import UUID

from mailroom.errors import DecodeError, EncodeError, InvalidMessage
from mailroom.message.message import Message, plain
from mailroom.message.outgoing import EventType, Kind, MessageType, Outgoing
from mailroom.values import codec
from mailroom.values.names import Key, utf8

__all__ = ["MessageObject", "encode"]

NIL = UUID(int=0)
TYPES: tuple[MessageType, ...] = ("O", "D", "C", "U")
EVENTS: tuple[EventType, ...] = ("C", "U", "D")
# The names of the struct's fields, in the order of their bytes.
FIELDS = ("EncBytes", "EvtType", "FromCluster", "FromHost", "FromID", "MsgClock", "MsgType")
MAX_BYTE, MAX_CLOCK = 2**8 - 1, 2**64 - 1
TEXT_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
# PuzzleDB's specification has D for a deleted object, its code O.
DELETED, DELETED_IN_CODE = "D", "O"

# The headers of a message that was a message object. A user's own event is not an event type of Mailroom.
FROM_ID, FROM_CLUSTER, FROM_HOST, USER_EVENT = "from_id", "from_cluster", "from_host", "user_event"


@dataclass(frozen=True, slots=True)
class MessageObject:
    """A message of PuzzleDB: what it is about, what happened, the object, and the node that sent it.

    `type` is O object, D database, C collection or U user. `event` is C created, U updated or D deleted, None for none;
    with type U also any other character of one byte, but not O, which means D in PuzzleDB's code. `object` is the CBOR
    of the object as bytes, as `encode` returns it. `clock` is the sender's Lamport clock, of 64 bits without a sign.

    Raises `InvalidMessage`, which names the field, for what cannot be a message object.
    """

    type: MessageType
    event: str | None = None
    object: bytes = field(default=b"", repr=False)  # kept out of repr, which ends up in logs
    from_id: UUID = NIL
    from_cluster: str = ""
    from_host: str = ""
    clock: int = 0

    def __post_init__(self) -> None:
        """Refuse what could not be written, or would be read as something else."""
        if fault := _fault(self):
            raise InvalidMessage(_no_object(fault), code="MR-puzzledb-object-invalid")
        utf8(self.from_cluster, "from_cluster of a message object")
        utf8(self.from_host, "from_host of a message object")

    @classmethod
    def loads(cls, raw: bytes) -> "MessageObject":
        """Return the message object of these bytes: one CBOR item, as PuzzleDB's programs write it, or an equal one.

        The fields may come in any order, with integers and lengths of any width. The id may be sixteen integers, as
        go-cbor writes it, sixteen bytes, tag 37 or text. Event O is read as D. What is missing is empty, None or 0, as
        for PuzzleDB's own reader. Raises `DecodeError`, and nothing else, for bytes that are no message object: it says
        what is wrong, never what they hold. The limits are those of `mailroom.values.codec.decode`.
        """
        with _reading():
            return cls(**_arguments(codec.read_item(raw)))

    def dumps(self, *, deleted: Literal["D", "O"] = "D") -> bytes:
        """Return the bytes of this message object: what go-cbor writes if it sorts the fields by name.

        They are always the same for the same object. `deleted` is how the event D is written. D is what PuzzleDB's
        specification says; its programs up to version 1.3.6 write and expect O.
        """
        event = deleted if self.event == DELETED else self.event or "\0"
        values = (
            _string(_BYTES, self.object),
            _uint8(ord(event)),
            _text(self.from_cluster),
            _text(self.from_host),
            _head(_ARRAY, 16) + b"".join(map(_uint8, self.from_id.bytes)),
            _uint64(self.clock),
            _uint8(ord(self.type)),
        )
        pairs = (_text(name) + value for name, value in zip(FIELDS, values, strict=True))
        return _head(_MAP, len(FIELDS)) + b"".join(pairs)

    @classmethod
    def of(cls, message: Message) -> "MessageObject":
        """Return a delivered message as a message object, with its `sent_clock` as clock.

        A value of bytes is the object as it is; any other value is encoded by `encode`. The headers `from_id`,
        `from_cluster` and `from_host` say who sent it; without an id it is from the message's `origin`. Raises
        `DecodeError` if the value cannot be read or encoded, or a header is not what `outgoing` writes.
        """
        value = plain(message)
        with _reading():
            return cls(
                cast(MessageType, message.message_type),
                message.event_type or _user_event(message),
                value if isinstance(value, bytes) else encode(value),
                _id(message.headers.get(FROM_ID, message.origin), FROM_ID),
                message.headers.get(FROM_CLUSTER, ""),
                message.headers.get(FROM_HOST, ""),
                message.sent_clock,
            )

    def outgoing(
        self, topic: str, *, key: Key | None = None, kind: Kind = "M", expires_at: datetime | None = None
    ) -> Outgoing:
        """Return a message of Mailroom, for `Outbox.send_many`, which `of` turns back into this one.

        Its value is the object, as bytes; who sent it is in its headers. It is stamped later than `clock`, the clock of
        its cause: `after_clock`. Sending it raises `InvalidMessage` if that is above 2^62, since Mailroom's clocks do
        not begin again at 0; and the database refuses one that is too far beyond the node's clock. The other arguments
        are those of `Outgoing`.
        """
        headers = {FROM_ID: str(self.from_id), FROM_CLUSTER: self.from_cluster, FROM_HOST: self.from_host}
        event = self.event if self.event in EVENTS else None
        if self.event != event:
            headers[USER_EVENT] = str(ord(self.event or "\0"))
        return Outgoing(
            topic, self.object, key, headers, kind, self.type, event,
            expires_at=expires_at, after_clock=self.clock,
        )  # fmt: skip


def encode(value: Any) -> bytes:
    """Return the object of a message object as go-cbor writes it, every integer in eight bytes.

    It takes what `mailroom.values.codec.encode` takes, and `decode` there gives it back equal. But that `encode` writes
    integers as short as they can be, and go-cbor's reader misreads negative ones of them, such as -200. Dates, UUIDs
    and decimals are written as there, and go-cbor's reader refuses them. Raises `EncodeError` for what it would misread
    or not survive: integers below -2^63 and keys that are bytes.
    """
    codec.encode(value)  # raises what is wrong with it, and where
    return _item(value)


def _no_object(fault: object) -> str:
    return f"This cannot be a message object of PuzzleDB: {fault}."


def _fault(given: Any) -> str | None:
    """Return what is wrong with the fields of a `MessageObject`, in words, or None."""
    if given.type not in TYPES:
        return f"its type is none of {', '.join(TYPES)}"
    if given.event is not None and given.event not in EVENTS and not (given.type == "U" and _is_own(given.event)):
        own = ", or with type U another character of one byte" if given.type == "U" else ""
        return f"its event is none of {', '.join(EVENTS)}{own}"
    if not isinstance(given.object, bytes):
        return "its object is not bytes, such as mailroom.puzzledb.encode returns"
    if not isinstance(given.from_id, UUID):
        return "its from_id is not a UUID"
    if not isinstance(given.from_cluster, str) or not isinstance(given.from_host, str):
        return "its from_cluster or from_host is not text"
    if not _is_integer(given.clock, MAX_CLOCK):
        return "its clock is not an integer of 64 bits without a sign"
    return None


def _is_own(event: object) -> bool:
    """Return whether this may be an event that a user has defined: one byte, but not 0, and not what is read as D."""
    return isinstance(event, str) and len(event) == 1 and 0 < ord(event) <= MAX_BYTE and event != DELETED_IN_CODE


def _is_integer(value: object, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest


# --- reading --------------------------------------------------------------------------------------------------------


@contextmanager
def _reading() -> Iterator[None]:
    """Make a `DecodeError` of everything that can be wrong with a message that comes from elsewhere."""
    try:
        yield
    except DecodeError as fault:
        raise DecodeError(_no_object(fault), code="MR-puzzledb-object-invalid") from None
    except InvalidMessage as error:
        raise DecodeError(str(error), code="MR-puzzledb-object-invalid") from None


def _arguments(found: object) -> dict[str, Any]:
    """Return the arguments of `MessageObject` for a decoded map. Raises `DecodeError` with what is wrong, in words."""
    if not isinstance(found, dict):
        raise DecodeError("it is not a map")
    if not found.keys() <= set(FIELDS):
        raise DecodeError(f"it has a field that is none of {', '.join(FIELDS)}")
    event = chr(_integer(found, "EvtType", MAX_BYTE))
    return {
        "type": chr(_integer(found, "MsgType", MAX_BYTE)),
        "event": None if event == "\0" else DELETED if event == DELETED_IN_CODE else event,
        "object": found.get("EncBytes", b""),
        "from_id": _id(found.get("FromID", NIL), "FromID"),
        "from_cluster": found.get("FromCluster", ""),
        "from_host": found.get("FromHost", ""),
        "clock": _integer(found, "MsgClock", MAX_CLOCK),
    }


def _integer(found: dict[str, Any], name: str, largest: int) -> int:
    value = found.get(name, 0)
    if not _is_integer(value, largest):
        raise DecodeError(f"its {name} is not an integer from 0 to {largest}")
    return cast(int, value)


def _id(value: object, name: str) -> UUID:
    match value:
        case UUID():
            return value
        case str() if TEXT_ID.fullmatch(value):
            return UUID(value)
        case bytes() if len(value) == 16:
            return UUID(bytes=value)
        case list() if len(value) == 16 and all(_is_integer(each, MAX_BYTE) for each in value):
            return UUID(bytes=bytes(value))
        case _:
            raise DecodeError(f"its {name} is not a UUID: not 16 integers of a byte or 16 bytes, not tag 37, not text")


def _user_event(message: Message) -> str | None:
    number = message.headers.get(USER_EVENT)
    if number is None:
        return None
    if not re.fullmatch("[0-9]{1,3}", number):
        raise DecodeError(f"its header {USER_EVENT} is not an integer from 1 to {MAX_BYTE}")
    return chr(int(number))


# --- writing, as cbor/encoder.go of go-cbor 1.3 does ----------------------------------------------------------------

_BYTES, _TEXT, _ARRAY, _MAP = 2, 3, 4, 5


def _item(value: Any) -> bytes:
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _integer_of_eight_bytes(value)
        case float():
            return b"\xfb" + struct.pack(">d", value)
        case str():
            return _text(value)
        case bytes() | bytearray():
            return _string(_BYTES, bytes(value))
        case list():
            return _head(_ARRAY, len(value)) + b"".join(map(_item, value))
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise EncodeError(
                    "An object has a key that is bytes, which go-cbor does not survive: send text as keys.",
                    code="MR-value-unsupported",
                )
            return _head(_MAP, len(value)) + b"".join(_text(key) + _item(each) for key, each in value.items())
        case datetime():
            return b"\xc0" + _text(value.isoformat().replace("+00:00", "Z"))
        case _:
            return codec.encode(value)


# D-messages-11: PuzzleDB's messages are written by hand.
def _integer_of_eight_bytes(number: int) -> bytes:
    if number < -(2**63):
        raise EncodeError(
            "An object has an integer below -2^63, which go-cbor misreads: send it as text.",
            code="MR-value-unsupported",
        )
    return _uint64(number) if number >= 0 else b"\x3b" + (-1 - number).to_bytes(8)


def _head(major: int, length: int) -> bytes:
    """Return a head with its length. The largest number of each width, such as 255, takes the next wider form."""
    if length < 24:
        return bytes([major << 5 | length])
    width = next(width for width in (1, 2, 4, 8) if length < 2 ** (8 * width) - 1)
    return bytes([major << 5 | 23 + width.bit_length()]) + length.to_bytes(width)


def _string(major: int, content: bytes) -> bytes:
    return _head(major, len(content)) + content


def _text(text: str) -> bytes:
    return _string(_TEXT, text.encode())


def _uint8(byte: int) -> bytes:
    return bytes([byte]) if byte < 24 else bytes([24, byte])


def _uint64(number: int) -> bytes:
    return b"\x1b" + number.to_bytes(8)  # always eight bytes, however small
