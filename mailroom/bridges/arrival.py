"""In: the message that a record at a broker is. Pure: no database, and no broker.

A record that a bridge wrote (`record`) becomes the message that it was made of: the same id, topic, key, kind, types,
headers and times, and the same value, byte for byte in CBOR; `json_form` says what JSON loses, and a tombstone has lost
all of it. Any other record is a message, not an event: an event is what its sender has declared to be one. Whoever may
write to the broker's topic may declare it, by `mailroom-kind`; so a broker's rights decide who can.

- id: `mailroom-id`, else `ce_id` or Debezium's `id` if it is a UUID, else what the broker calls it if that is a UUID,
  else one made of the place where the record lies: so who reads it again finds the same id. `place` names the cluster,
  since another one has the same topics and offsets. In a queue nothing has a place, and such a record is a new one.
- key: the record's, in UTF-8; none, or an empty one, is a message without order, whose key is its id.
- headers: of a bridge's record the message's own; of another one all, but for those that begin with `mailroom-`. Of two
  with one name the last one counts. What is not a text, such as a number in binary form, is in base64 as `NAME-base64`.
- value: as `Intake.decode` says. CloudEvents in structured mode are JSON: the envelope is the value.
- without a value, it is a tombstone: its value is null and its event type D.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Literal, TypeAlias, TypeVar, cast, get_args
from uuid import UUID, uuid4, uuid5

from mailroom.bridges.json_form import NotJson, of_json
from mailroom.bridges.record import CONTENT_TYPE, IsReserved, checked_template, fill, is_reserved, one_of
from mailroom.errors import ConfigurationError, DecodeError, EncodeError, InvalidMessage, MailroomError
from mailroom.message.headers import as_json, checked
from mailroom.message.outgoing import aware
from mailroom.values import codec
from mailroom.values.names import MAX_HEADERS_BYTES, MAX_KEY_BYTES, MAX_VALUE_BYTES, TOPIC, key_text, shown, topic_name
from mailroom.values.numbers import MAX_INT64

T = TypeVar("T")

Decoding: TypeAlias = Literal["auto", "json", "cbor", "bytes", "text"]

KEY = re.compile(r"record|header:.+|path:[^.]+(?:\.[^.]+)*")
# Of ids that are made of a place. It never changes: who reads a record again must find its id.
MADE_HERE = UUID("5b9f4a63-7d0e-5c1a-9a55-2f6c1f0f7f2e")
MAX_SOURCE_BYTES = 200
NULL = codec.encode(None)

UUID_TEXT = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", re.IGNORECASE)
KIND = re.compile(r"([MECR])([ODCU])([CUD]?)\Z")
COUNT = re.compile(r"[1-9][0-9]{0,18}\Z")
RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)\Z", re.ASCII)
JSON_TYPE = re.compile(r"application/json|[^/]+/[^/]+\+json\Z")
CBOR_TYPE = re.compile(r"application/cbor|[^/]+/[^/]+\+cbor\Z")


class Undecodable(MailroomError):
    """A record is not a message. It says why, and where the record lies, and never shows content."""

    code = "MR-bridge-not-decodable"


class _Unfit(Exception):
    """What is wrong with a record."""


@dataclass(slots=True)
class Arrived:
    """A record as it lies at the broker: at `offset` of a `part` of its `topic`, since `at` (aware) if known.

    `leader_epoch` is that of the partition's leader when it was written, where the broker has such epochs. `subject` is
    given where the broker calls a record's topic so, and `topic` is only the log in which it lies. `place` is given
    where the log has a name that no other one has, and the cluster has none. `id` is the record's own at the broker,
    which no other one has. With `is_queued` it lay in a queue, and may come again at another offset. `fault` is given
    where its client could not read it, and says why: it is not a message. `log` is that of its `BrokerPosition`.
    """

    topic: str
    part: int
    offset: int
    key: bytes | None
    value: bytes | None = field(repr=False)
    headers: Sequence[tuple[str, bytes | None]] = field(repr=False)
    at: datetime | None
    leader_epoch: int | None = None
    subject: str | None = None
    place: str | None = None
    fault: str | None = None
    id: UUID | None = None
    is_queued: bool = False
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """How a bridge reads records. Raises `ConfigurationError`.

    `as_topic` is a template of the message's topic, in which `{topic}` stands for the broker's; without it the record
    says its topic (`ce_type`, `mailroom-topic`), or it is the broker's. `key` is where the key is: in the `record`, in
    a header (`header:NAME`), or in a map that is the value (`path:order.id`); a record that lacks it there is refused.
    `decode` says what values are; `auto` goes by `content-type`, and without one takes what is JSON as that, else what
    is UTF-8 as text, else bytes.
    """

    as_topic: str | None = None
    key: str = "record"
    decode: Decoding = "auto"

    def __post_init__(self) -> None:
        """Check all."""
        if self.as_topic is not None:
            checked_template(self.as_topic, "as_topic")
        if not isinstance(self.key, str) or not KEY.fullmatch(self.key):
            raise ConfigurationError(
                f"key is {shown(self.key)}; give record, header:NAME, or path: and names of fields with dots between "
                "them.",
                code="MR-invalid-argument",
            )
        one_of(self.decode, "decode", get_args(Decoding))


@dataclass(slots=True)  # frozen, each would take some microseconds more to make
class Incoming:
    """A message that came from a broker: the columns of it that a row moves with, the value as CBOR.

    `sender`, `link` and `clock` are those of the bridge that has written the record, else None, all three.
    With `is_named` the record says its id, and does not get it from where it lies.
    """

    message_id: UUID
    topic: str
    key: str
    kind: str
    message_type: str
    event_type: str | None
    value: bytes = field(repr=False)
    headers: dict[str, str] | None = field(repr=False)
    expires_at: datetime | None
    source: str | None
    sent_at: datetime | None
    sender: UUID | None
    link: int | None
    clock: int | None
    is_named: bool = True


def incoming(record: Arrived, how: Intake, place: str, is_reserved: IsReserved = is_reserved) -> Incoming:
    """Return the message that a record is; `place` names the cluster. Raises `Undecodable`, and nothing else.

    `is_reserved` says which headers are not the message's own in a bridge's record at this broker.
    """
    place = record.place or place
    try:
        return _incoming(record, how, place, is_reserved)
    except _Unfit as fault:
        at = f"{record.topic}[{record.part}]@{record.offset}"
        raise Undecodable(f"The record at {at} of {place} is not a message: {fault}.") from None


def digest(record: Arrived) -> str:
    """Return a hash of what a record is and when it was written, by which it is known again at its offset."""
    given = [
        record.key,
        record.value,
        *(part for name, text in record.headers for part in (name.encode(errors="surrogatepass"), text)),
    ]
    hashed = sha256(f"{record.at} {len(given)}".encode())
    for each in given:
        hashed.update(b"-" if each is None else b"%d:%b" % (len(each), each))
    return hashed.hexdigest()


def undecoded(record: Arrived, place: str) -> Incoming:
    """Return what is kept of a record that is not a message: its value as bytes, under its topic if that can be one."""
    place = record.place or place
    raw = record.value if record.value is not None and len(record.value) <= MAX_VALUE_BYTES - 16 else None
    # Not an id that its headers say: whether that is its own is not known.
    message_id = record.id or _made_id(record, place)
    named = record.subject or record.topic
    topic = named if TOPIC.match(named) else "undecodable"
    at = _in_range(record.at)
    key, value = str(message_id), NULL if raw is None else codec.encode(raw)
    is_named = record.id is not None
    return Incoming(message_id, topic, key, "M", "U", None, value, None, None, None, at, None, None, None, is_named)


def _incoming(record: Arrived, how: Intake, place: str, is_reserved: IsReserved) -> Incoming:
    if record.fault is not None:
        raise _Unfit(record.fault)
    named = dict(record.headers)
    decoded, value = _value(record.value, named, how.decode)
    own_id = _id(record, named)
    message_id = own_id or _made_id(record, place)
    sender, link, clock = _sender(named)
    kind, message_type, event_type = _kind(named)
    return Incoming(
        message_id,
        _topic(record, named, how.as_topic),
        _key(record, named, decoded, how.key) or str(message_id),
        kind,
        message_type,
        "D" if record.value is None else event_type,
        value,
        _headers(named, is_reserved if sender is not None else _is_of_mailroom),
        _time(named, "mailroom-expires"),
        _source(named),
        _sent_at(record, named),
        sender,
        link,
        clock,
        own_id is not None,
    )


def _text(named: Mapping[str, bytes | None], name: str) -> str | None:
    """Return the text of a header, None if there is none."""
    raw = named.get(name)
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _Unfit(f"the header {name} is not UTF-8") from None


def _value_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _Unfit("the value is not UTF-8") from None


def _matched(named: Mapping[str, bytes | None], name: str, form: re.Pattern[str], make: Callable[[str], T]) -> T | None:
    """Return what is made of the text of one of a bridge's headers."""
    text = _text(named, name)
    if text is None:
        return None
    if not form.match(text):
        raise _Unfit(f"the header {name} is not what Mailroom writes")
    return make(text)


def _of_few(named: Mapping[str, bytes | None], name: str, form: re.Pattern[str], make: Callable[[str], T]) -> T | None:
    """Return the same of a header that has few values, in many records."""
    raw = named.get(name)
    return None if raw is None else cast("T | None", _remembered(raw, name, form, make))


@lru_cache(maxsize=256)
def _remembered(raw: bytes, name: str, form: re.Pattern[str], make: Callable[[str], object]) -> object:
    return _matched({name: raw}, name, form, make)


# --- what it is ----------------------------------------------------------------------------------------------------


def _id(record: Arrived, named: Mapping[str, bytes | None]) -> UUID | None:
    """Return the id that a record says."""
    if (given := _matched(named, "mailroom-id", UUID_TEXT, _uuid)) is not None:
        return given
    for name in ("ce_id", "id"):
        text = (named.get(name) or b"").decode(errors="replace")
        if UUID_TEXT.match(text):
            return _uuid(text)
    return record.id


def _made_id(record: Arrived, place: str) -> UUID:
    if record.is_queued:
        return uuid4()  # a count may stand for another one later
    # As JSON: no two places have the same text, whatever characters are in a name.
    return uuid5(MADE_HERE, json.dumps([place, record.topic, record.part, record.offset]))


def _uuid(checked: str) -> UUID:
    return UUID(int=int(checked.replace("-", ""), 16))  # a quarter of the time of UUID(text), which checks it, too


def _topic(record: Arrived, named: Mapping[str, bytes | None], as_topic: str | None) -> str:
    if as_topic is None:
        topic = _text(named, "ce_type") or _text(named, "mailroom-topic") or record.subject or record.topic
    else:
        topic = fill(as_topic, record.subject or record.topic)
    try:
        return topic_name(topic)
    except InvalidMessage:
        raise _Unfit("its topic cannot be one of a message: name one by --as-topic") from None


def _kind(named: Mapping[str, bytes | None]) -> tuple[str, str, str | None]:
    return _of_few(named, "mailroom-kind", KIND, _letters) or ("M", "U", None)


def _letters(text: str) -> tuple[str, str, str | None]:
    return text[0], text[1], text[2:] or None


# D-bridges-20: Our own records are known by (origin, link, clock) per partition.
def _sender(named: Mapping[str, bytes | None]) -> tuple[UUID, int, int] | tuple[None, None, None]:
    sender = _of_few(named, "mailroom-origin", UUID_TEXT, _uuid)
    link = _of_few(named, "mailroom-link", COUNT, int)
    clock = _matched(named, "mailroom-clock", COUNT, int)
    if sender is None and link is None and clock is None:
        return None, None, None
    # Half of them would be a record that looks new each time, or one of nobody whose marks decide what is new.
    if sender is None or link is None or clock is None or max(link, clock) > MAX_INT64:
        raise _Unfit("it has not all of the headers mailroom-origin, mailroom-link and mailroom-clock, or a number of "
                     "them is too large")  # fmt: skip
    return sender, link, clock


def _source(named: Mapping[str, bytes | None]) -> str | None:
    """Return who sent it as CloudEvents say it, if it fits."""
    raw = named.get("ce_source") or b""
    text = raw.decode(errors="replace")
    return text if 0 < len(text.encode()) <= MAX_SOURCE_BYTES and "\0" not in text else None


# --- times ---------------------------------------------------------------------------------------------------------


def _sent_at(record: Arrived, named: Mapping[str, bytes | None]) -> datetime | None:
    if (ours := _time(named, "mailroom-time")) is not None:
        return ours
    # It never decides anything. So one that is not a time costs nobody the message.
    text = (named.get("ce_time") or b"").decode(errors="replace")
    return (_moment(text) if RFC3339.match(text) else None) or _in_range(record.at)


def _time(named: Mapping[str, bytes | None], name: str) -> datetime | None:
    if _text(named, name) is None:
        return None
    moment = _matched(named, name, RFC3339, _moment)
    if moment is None:
        raise _Unfit(f"the header {name} is not a time, or outside the years 1 to 9998")
    return moment


def _moment(text: str) -> datetime | None:
    try:
        return _in_range(datetime.fromisoformat(text.upper()))
    except ValueError:
        return None


def _in_range(moment: datetime | None) -> datetime | None:
    """Return a time in UTC, None if PostgreSQL and Python do not both have it."""
    try:
        return None if moment is None else aware(moment, "time").astimezone(UTC)
    except InvalidMessage:
        return None


# --- key, value and headers ----------------------------------------------------------------------------------------


def _key(record: Arrived, named: Mapping[str, bytes | None], decoded: object, where: str) -> str | None:
    """Return the key, None for a message without order."""
    place, _, name = where.partition(":")
    found: object
    match place:
        case "record":
            if not record.key:
                return None
            try:
                found = record.key.decode()
            except UnicodeDecodeError:
                raise _Unfit("its key is not UTF-8: take it from a header or the value, by --key") from None
        case "header":
            if (found := _text(named, name)) is None:
                raise _Unfit("it lacks the header that has the key")
        case _:
            found = decoded
            for step in name.split("."):
                if not isinstance(found, dict) or step not in found:
                    raise _Unfit("its value lacks the field that is the key")
                found = found[step]
    try:
        return key_text(found)  # type: ignore[arg-type]  # it refuses what cannot be a key
    except InvalidMessage:
        raise _Unfit(
            f"its key is not a text, int or UUID of 1 to {MAX_KEY_BYTES:,} bytes, or has a character that PostgreSQL "
            "cannot store"
        ) from None


def _value(raw: bytes | None, named: Mapping[str, bytes | None], decode: Decoding) -> tuple[object, bytes]:
    """Return the decoded value, and its CBOR."""
    if raw is None:
        return None, NULL
    if len(raw) > MAX_VALUE_BYTES:
        raise _Unfit(f"its value has {len(raw):,} bytes, and {MAX_VALUE_BYTES:,} are allowed")
    if decode == "auto":
        decode = _by_type(named.get(CONTENT_TYPE) or b"")
    if decode in ("json", "cbor") and (schema := _schema(raw)) is not None:
        raise _Unfit(
            f"its value begins as those of a schema registry do (a byte 0, and the number {schema} of its schema), and "
            "a bridge reads no schemas: --decode bytes takes it as it is, and Spark can decode it"
        )
    try:
        if decode == "cbor":
            return codec.read_item(raw), raw
        value = _guessed(raw) if decode == "auto" else _READERS[decode](raw)
        return value, codec.encode(value)
    except EncodeError as error:
        too_large = error.code == "MR-value-too-large"
        # Not the error's own text: it names fields, which here are somebody else's data.
        raise _Unfit(
            "its value has more items or bytes than a value may have" if too_large else
            "its value is nested too deep, or has a number or text that no value can have"
        ) from None  # fmt: skip
    except (DecodeError, NotJson) as fault:
        raise _Unfit(f"its value cannot be read, {fault}") from None


@lru_cache(maxsize=256)  # there are a few, in many records
def _by_type(content_type: bytes) -> Decoding:
    kind = content_type.decode(errors="replace").partition(";")[0].strip().lower()
    if JSON_TYPE.match(kind):
        return "json"
    if CBOR_TYPE.match(kind):
        return "cbor"
    if kind.startswith("text/"):
        return "text"
    return "bytes" if kind == "application/octet-stream" else "auto"


def _schema(raw: bytes) -> int | None:
    """Return the number of the schema in Confluent's wire format, None if it is not that."""
    return int.from_bytes(raw[1:5]) if len(raw) > 5 and raw[0] == 0 else None


def _guessed(raw: bytes) -> object:
    if _schema(raw) is not None:
        return raw  # whichever of them happen to be UTF-8
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw
    try:
        return of_json(text)
    except NotJson:
        return text


_READERS: Mapping[str, Callable[[bytes], object]] = {
    "json": lambda raw: of_json(_value_text(raw)),
    "text": _value_text,
    "bytes": lambda raw: raw,
}


def _is_of_mailroom(name: str) -> bool:
    return name.lower().startswith("mailroom-")


def _headers(named: Mapping[str, bytes | None], is_left_out: IsReserved) -> dict[str, str] | None:
    headers = _set_apart(named)
    for name, raw in named.items():
        if is_left_out(name):
            continue
        found, text = _header(name, raw)
        headers[found] = text
    if is_left_out is _is_of_mailroom and "traceparent" not in headers and "ce_traceparent" in headers:
        headers["traceparent"] = headers["ce_traceparent"]  # a CloudEvent's trace goes on in ours
    if not headers:
        return None
    try:
        as_json(checked(headers))
    except InvalidMessage as error:
        if error.code == "MR-headers-too-large":
            raise _Unfit(f"its headers have more than {MAX_HEADERS_BYTES:,} bytes as JSON") from None
        raise _Unfit("its headers have a character that PostgreSQL cannot store") from None
    return headers


def _set_apart(named: Mapping[str, bytes | None]) -> dict[str, str]:
    """Return the headers that could not stand by themselves."""
    text = _text(named, "mailroom-headers")
    if text is None:
        return {}
    try:
        return checked(json.loads(text))
    except (ValueError, RecursionError):  # InvalidMessage is a ValueError
        raise _Unfit("the header mailroom-headers is not what Mailroom writes") from None


def _header(name: str, raw: bytes | None) -> tuple[str, str]:
    try:
        text = (raw or b"").decode()
    except UnicodeDecodeError:
        text = "\0"
    return (f"{name}-base64", b64encode(raw or b"").decode()) if "\0" in text else (name, text)
