"""Out: the form of a record at a broker, made of one row of `transit`. Pure: no database, and no broker.

The key is the message's key in UTF-8; a message without order has none. The value is JSON (`json_form` says how) or
CBOR, the bytes that the sender wrote. Every message has a value, which may be null; a record has none only as a
tombstone, of event type D, if the form has tombstones: these lose the message's value.

The headers come in this order:

| header | format | what it is |
|---|---|---|
| `ce_specversion` | cloudevents | `1.0` |
| `ce_id` | cloudevents | the message's id |
| `ce_source` | cloudevents | `/mailroom/` and the node's name |
| `ce_type` | cloudevents | the topic |
| `ce_subject` | cloudevents | the key, if there is one |
| `ce_time` | cloudevents | when it was sent (RFC 3339, UTC) |
| `ce_partitionkey` | cloudevents | the key, if there is one |
| `ce_traceparent` | cloudevents | the message's header `traceparent`, if it has one |
| `ce_sequence` | cloudevents | the clock of the send, in 19 digits, since it is compared as text |
| `id` | debezium | the message's id |
| `mailroom-id` | plain | the message's id |
| `mailroom-topic` | debezium, plain | the topic |
| `mailroom-time` | debezium, plain | when it was sent |
| `content-type` | all | `application/json` or `application/cbor`; a tombstone has none |
| `mailroom-kind` | all | kind, message type and event type, if it has one: a letter each, such as `EUD` |
| `mailroom-origin` | all | the node's id |
| `mailroom-link` | all | the number of the link at that node |
| `mailroom-clock` | all | the clock of the send: it rises along the link, also after the node was put back in time |
| `mailroom-expires` | all | when the message expires, if it does |
| `mailroom-headers` | all | a JSON map of the message's headers that cannot stand by themselves, if there are any |
| any other | all | the message's own headers, in UTF-8 |

A header of the message cannot stand by itself if its name is one of these, or begins with `ce_` or `mailroom-`, or
would tell the broker what to do (its descriptor says which do), in whichever case; if its name has anything but
letters, digits, dots, hyphens and underscores; or if its text has control characters, or spaces at its ends. Not in a
record are `source`, which says who sent it within the node, and `after_clock`, which the clock of the send is later
than.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias, get_args
from uuid import UUID

from mailroom.bridges.json_form import NotJson, as_json, of_json
from mailroom.errors import ConfigurationError, DecodeError, EncodeError, MailroomError
from mailroom.links.handshake.wire import MARK, WIRE_COLUMNS
from mailroom.values import codec
from mailroom.values.names import shown

Format: TypeAlias = Literal["cloudevents", "debezium", "plain"]
Encoding: TypeAlias = Literal["json", "cbor"]
Header: TypeAlias = tuple[str, bytes]

# How each format names the broker's topic, unless a template is given.
TEMPLATES: Mapping[Format, str] = {
    "cloudevents": "{topic}",
    "debezium": "outbox.event.{topic}",
    "plain": "{topic}",
}
TEMPLATE = re.compile(r"(?:[^{}\x00-\x1f\x7f]|\{topic\})+\Z")

VERSION: Header = ("ce_specversion", b"1.0")
CONTENT_TYPE = "content-type"
CONTENT_TYPES: Mapping[Encoding, bytes] = {"json": b"application/json", "cbor": b"application/cbor"}
NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")
RESERVED = ("id", CONTENT_TYPE)
PREFIXES = ("ce_", "mailroom-")
IsReserved: TypeAlias = Callable[[str], bool]


class Unencodable(MailroomError):
    """A message has no record in the form that the bridge was given. It says what to do, and never shows the value."""

    code = "MR-bridge-not-encodable"


@dataclass(slots=True)  # frozen, each would take some microseconds more to make
class Carried:
    """One row of `transit`, as a bridge reads it."""

    seq: int
    sent_clock: int
    stamped_at: datetime
    message_id: UUID
    topic: str
    key: str
    kind: str
    message_type: str
    event_type: str | None
    value: bytes | None = field(repr=False)
    value_json: str | None = field(repr=False)
    headers: Mapping[str, str] | None = field(repr=False)
    expires_at: datetime | None
    after_clock: int | None
    source: str | None
    sent_at: datetime

    @property
    def is_mark(self) -> bool:
        """Whether it is not a message, and has no record: it only shows a clock to readers that are nodes."""
        return self.kind == MARK


def carried(columns: Mapping[str, Sequence[Any]]) -> list[Carried]:
    """Return the rows of the decoded arrays of a fetched batch."""
    rows = zip(*(columns[name] or () for name in WIRE_COLUMNS), strict=True)  # no row: null in the place of each array
    made = (dict(zip(WIRE_COLUMNS, row, strict=True)) for row in rows)
    return [Carried(**row | {"headers": row["headers"] and json.loads(row["headers"])}) for row in made]


@dataclass(slots=True)  # not frozen, as above
class Record:
    """What goes to a broker: `topic`, `key`, `value` and `headers`; and of which row it is made.

    `value` is None for a tombstone. `clock` is that of the send, and `at` when the row was stamped. Of a topic that has
    partitions it goes to one of the first `parts`: see `mailroom.bridges.parts`.
    """

    topic: str
    key: bytes | None
    value: bytes | None = field(repr=False)
    headers: tuple[Header, ...] = field(repr=False)
    seq: int
    clock: int
    id: UUID
    at: datetime
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Form:
    """How a bridge writes its records. Raises `ConfigurationError`.

    `topic` is a template of the broker's topic: text, in which `{topic}` stands for the message's. By default it is
    that, and `outbox.event.{topic}` in the format `debezium`. With `tombstones`, the record of a message of event
    type D has no value.
    """

    topic: str = ""
    format: Format = "cloudevents"
    encode: Encoding = "json"
    tombstones: bool = False

    def __post_init__(self) -> None:
        """Check all, and put the format's own template into the place of none."""
        one_of(self.format, "format", get_args(Format))
        one_of(self.encode, "encode", get_args(Encoding))
        if not isinstance(self.tombstones, bool):
            raise ConfigurationError(
                f"tombstones is {shown(self.tombstones)}; give True or False.", code="MR-invalid-argument"
            )
        template = TEMPLATES[self.format] if self.topic == "" else checked_template(self.topic, "topic")
        object.__setattr__(self, "topic", template)


@dataclass(frozen=True, slots=True)
class Sender:
    """Who writes a record: the node, its name, and the number of the link."""

    node_id: UUID
    node: str
    link: int


@cache
def reserving(names: tuple[str, ...] = (), prefixes: tuple[str, ...] = ()) -> IsReserved:
    """Return what says whether a header of a name is not the message's own, in a bridge's record.

    `names` and `prefixes` are those that the broker reserves besides ours, in lower case.
    """
    all_names, all_prefixes = {*RESERVED, *names}, (*PREFIXES, *prefixes)

    @lru_cache(maxsize=4096)  # of each record there are a dozen, and they are the same ones
    def is_reserved(name: str) -> bool:
        name = name.lower()
        return name in all_names or name.startswith(all_prefixes)

    return is_reserved


is_reserved = reserving()


def record_of(message: Carried, form: Form, sender: Sender, is_reserved: IsReserved = is_reserved) -> Record:
    """Return the record of a message; the same message has the same bytes each time.

    `is_reserved` says which headers are not for a message to set at this broker.

    Raises `Unencodable`; and `ValueError` for a mark, which readers of rows pass over.
    """
    if message.is_mark:
        raise ValueError("a mark is not a message")
    id_ = str(message.message_id)
    key = None if message.key == id_ else message.key.encode()  # it has its id as key: no order
    value = None if form.tombstones and message.event_type == "D" else _value(message, form.encode)
    fixed = _fixed(form, sender, message.topic)
    headers = _identity(message, form.format, id_.encode(), key, fixed)
    if value is not None:
        headers.append(fixed.content_type)
    headers += _carriage(message, fixed)
    if message.headers:
        headers += _own(message.headers, is_reserved)
    return Record(
        fixed.at, key, value, tuple(headers), message.seq, message.sent_clock, message.message_id, message.stamped_at
    )


def id_of(headers: Mapping[str, bytes]) -> UUID:
    """Return the message's id from the headers of a bridge's record, whatever its format."""
    return UUID(next(headers[name] for name in ("mailroom-id", "ce_id", "id") if name in headers).decode())


def fill(template: str, topic: str) -> str:
    """Return what a checked template names for a topic."""
    return template.replace("{topic}", topic)


def checked_template(template: str, what: str) -> str:
    """Return a template of topics. Raises `ConfigurationError`, which calls it `what`."""
    if not isinstance(template, str) or not TEMPLATE.match(template):
        raise ConfigurationError(
            f"{what} is {shown(template)}; give text in which {{topic}} may stand for the topic, and no other braces.",
            code="MR-invalid-argument",
        )
    return template


def one_of(given: object, what: str, allowed: tuple[str, ...]) -> None:
    """Raise `ConfigurationError` unless `given`, which is called `what`, is one of those."""
    if given not in allowed:
        raise ConfigurationError(
            f"{what} is {shown(given)}; give one of {', '.join(allowed)}.", code="MR-invalid-argument"
        )


def _value(message: Carried, encode: Encoding) -> bytes:
    if message.value_json is not None:
        # As PostgreSQL writes it: read and written anew, it would say the same.
        return message.value_json.encode() if encode == "json" else _as_cbor(message, message.value_json)
    if message.value is None:
        raise _unencodable(message, "it has no value", "Correct its sender")
    return message.value if encode == "cbor" else _as_json(message, message.value)


def _as_cbor(message: Carried, text: str) -> bytes:
    try:
        return codec.encode(of_json(text))
    except (DecodeError, EncodeError) as error:
        fault = (
            "it is too large" if error.code == "MR-value-too-large" else "it is nested too deep, or has long numbers"
        )
        raise _unencodable(
            message, f"CBOR cannot hold its value: {fault}", "Let the bridge write JSON (--encode json)"
        ) from None


def _as_json(message: Carried, raw: bytes) -> bytes:
    try:
        return as_json(codec.read_item(raw)).encode()
    except NotJson as fault:
        raise _unencodable(
            message, f"JSON cannot hold its value: {fault}", "Let the bridge write CBOR (--encode cbor)"
        ) from None
    except DecodeError as fault:
        raise _unencodable(message, f"its value cannot be read: {fault}", "Correct its sender") from None


def _unencodable(message: Carried, fault: str, advice: str) -> Unencodable:
    return Unencodable(
        f"Message {message.message_id} has no record, since {fault}. {advice}, or let the bridge skip it."
    )


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What all records of a topic have in common: `at`, the broker's topic, and these headers."""

    at: str
    source: Header
    type: Header
    topic: Header
    content_type: Header
    origin: Header
    link: Header


@lru_cache(maxsize=1024)
def _fixed(form: Form, sender: Sender, topic: str) -> _Fixed:
    return _Fixed(
        fill(form.topic, topic),
        ("ce_source", f"/mailroom/{sender.node}".encode()),
        ("ce_type", topic.encode()),
        ("mailroom-topic", topic.encode()),
        (CONTENT_TYPE, CONTENT_TYPES[form.encode]),
        ("mailroom-origin", str(sender.node_id).encode()),
        ("mailroom-link", str(sender.link).encode()),
    )


def _identity(message: Carried, form: Format, id_: bytes, key: bytes | None, fixed: _Fixed) -> list[Header]:
    """Return what says which message it is."""
    sent_at = _moment(message.sent_at)
    if form != "cloudevents":
        return [("id" if form == "debezium" else "mailroom-id", id_), fixed.topic, ("mailroom-time", sent_at)]
    traceparent = message.headers.get("traceparent") if message.headers else None
    return [
        VERSION,
        ("ce_id", id_),
        fixed.source,
        fixed.type,
        *(() if key is None else [("ce_subject", key)]),
        ("ce_time", sent_at),
        *(() if key is None else [("ce_partitionkey", key)]),
        *(() if traceparent is None else [("ce_traceparent", traceparent.encode())]),
        ("ce_sequence", b"%019d" % message.sent_clock),
    ]


def _carriage(message: Carried, fixed: _Fixed) -> list[Header]:
    """Return what only a Mailroom needs."""
    expires = message.expires_at
    return [
        ("mailroom-kind", f"{message.kind}{message.message_type}{message.event_type or ''}".encode()),
        fixed.origin,
        fixed.link,
        # Not its seq: a node that was put back in time gives numbers of a link out again, and never clocks.
        ("mailroom-clock", b"%d" % message.sent_clock),
        *(() if expires is None else [("mailroom-expires", _moment(expires))]),
    ]


def _own(headers: Mapping[str, str], is_reserved: IsReserved) -> list[Header]:
    alone, others = [], {}
    for name, text in headers.items():
        if _stands_alone(name, text, is_reserved):
            alone.append((name, text.encode()))
        else:
            others[name] = text
    return [("mailroom-headers", json.dumps(others, separators=(",", ":")).encode()), *alone] if others else alone


def _stands_alone(name: str, text: str, is_reserved: IsReserved) -> bool:
    # Names and texts that every broker's headers can hold.
    return bool(NAME.match(name)) and not is_reserved(name) and text.isprintable() and text == text.strip()


@lru_cache(maxsize=1024)  # all messages of a transaction have the same one
def _moment(moment: datetime) -> bytes:
    return rfc3339(moment).encode()


def rfc3339(moment: datetime) -> str:
    """Return a time in UTC as RFC 3339 writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
