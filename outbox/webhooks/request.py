"""What a request says: its topic, and of its headers, query and body the message. Nothing here waits for anything."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import parse_qs, unquote

from mailroom.bridges.json_form import check_items
from mailroom.errors import DecodeError
from mailroom.values import codec
from mailroom.values.names import shown
from outbox.webhooks.refusal import RequestRefused, unreadable
from outbox.webhooks.signature import ID, SIGNATURE, TIMESTAMP

PLACE = "/topics/"
JSON, CBOR = "application/json", "application/cbor"
KEY, IDEMPOTENCY = "mailroom-key", "idempotency-key"
CLOUD_EVENT = re.compile(r"ce-[a-z0-9]{1,40}\Z")  # an attribute of CloudEvents in binary mode
ONCE_ONLY = {ID, TIMESTAMP, SIGNATURE, KEY, IDEMPOTENCY, "content-type", "content-encoding", "content-length"}
MOST_PARAMETERS = 20
DIGITS = re.compile(r"[0-9]{1,15}\Z")


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a request that say something here, and the attributes of CloudEvents without their `ce-`."""

    named: Mapping[str, str]
    cloud_event: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Iterable[tuple[bytes, bytes]]) -> "Headers":
        """Read those of ASGI, whose names are in lower case. Raises `RequestRefused` where one is given twice."""
        named: dict[str, str] = {}
        for name_bytes, value in raw:
            name = name_bytes.decode("latin-1")
            if name not in ONCE_ONLY and not CLOUD_EVENT.match(name):
                continue
            if name in named:
                raise unreadable(f"The header {name} is given twice.")
            try:
                named[name] = value.decode()
            except UnicodeDecodeError:
                raise unreadable(f"The header {name} is not UTF-8.") from None
        return cls(named, _cloud_event(named))

    def get(self, name: str) -> str | None:
        """Return a header, or None."""
        return self.named.get(name)


def _cloud_event(named: Mapping[str, str]) -> dict[str, str]:
    try:
        return {name[3:]: unquote(value, errors="strict") for name, value in named.items() if CLOUD_EVENT.match(name)}
    except UnicodeDecodeError:
        raise unreadable("A header ce-... is not percent-encoded UTF-8.") from None


def topic_of(scope: Mapping[str, Any]) -> str:
    """Return the topic in the path, below where the app is mounted. Raises `RequestRefused`."""
    path, mounted_at = str(scope["path"]), str(scope.get("root_path") or "").rstrip("/")
    # Frameworks differ in whether the path still has what the app is mounted at.
    if mounted_at and path.startswith(f"{mounted_at}/"):
        path = path.removeprefix(mounted_at)
    topic = path.removeprefix(PLACE)
    if topic == path or not topic or "/" in topic:
        raise RequestRefused(404, "There is nothing here. Send to POST /topics/TOPIC.", code="MR-webhook-path")
    if scope["method"] != "POST":
        raise RequestRefused(405, "A message is sent by POST.", code="MR-webhook-path", allow="POST")
    return topic


def content_type(headers: Headers) -> str:
    """Return `JSON` or `CBOR`. Raises `RequestRefused` for everything else."""
    kind, *parameters = (each.strip().lower() for each in (headers.get("content-type") or "").split(";"))
    charsets = [each.partition("=")[2].strip('"') for each in parameters if each.startswith("charset=")]
    is_plain = (headers.get("content-encoding") or "identity").lower() == "identity"
    if kind not in (JSON, CBOR) or not is_plain or any(charset != "utf-8" for charset in charsets):
        raise RequestRefused(
            415,
            f"Send content-type: {JSON}, in UTF-8, or {CBOR}, and no content-encoding.",
            code="MR-webhook-content-type",
        )
    return kind


def check_length(headers: Headers, most: int) -> None:
    """Raise `RequestRefused` if the request says itself that its body is too large."""
    length = headers.get("content-length")
    if length is not None and (not DIGITS.match(length) or int(length) > most):
        raise too_large(most)


def too_large(most: int) -> RequestRefused:
    """Return the refusal of a body of more than `most` bytes."""
    return RequestRefused(413, f"The body has more than {most:,} bytes.", code="MR-webhook-too-large")


def value_of(body: bytes, kind: str) -> object:
    """Return the value in the body. Raises `RequestRefused`, which shows nothing of it."""
    if kind == CBOR:
        try:
            return codec.read_item(body)
        except DecodeError as fault:
            raise unreadable(f"The body cannot be read as CBOR: {fault}.") from None
    try:
        text = body.decode()
        check_items(text)
        return json.loads(text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise unreadable("The body is not UTF-8.") from None
    except DecodeError as fault:
        raise RequestRefused(422, f"The body cannot be a value: {fault}.", code="MR-value-too-large") from None
    except json.JSONDecodeError as fault:
        raise unreadable(f"The body is not JSON: {fault.msg} at character {fault.pos + 1}.") from None
    except (ValueError, RecursionError):
        # A number of thousands of digits, too.
        raise unreadable(
            "The body is not JSON that can be read in one way only: it has NaN or Infinity, a name twice in an object, "
            "a number too large, or is nested too deep."
        ) from None


def _no_number(_constant: str) -> NoReturn:
    raise ValueError


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError
    return number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Of two values of one name readers take different ones, and who has checked the one has not checked the other.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def key_of(headers: Headers, query: bytes) -> str | None:
    """Return the key of the message: that of the header or the query, else the subject of CloudEvents, else None."""
    try:
        parameters = parse_qs(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS
        )
    except ValueError:  # UnicodeDecodeError is one
        raise unreadable("The query of the URL cannot be read: percent-encode it, as UTF-8.") from None
    given = {*parameters.get("key", ()), *filter(None, [headers.get(KEY)])}
    if len(given) > 1:
        raise unreadable(f"The request has several keys: give one, as {KEY} or as ?key=.")
    return given.pop() if given else headers.cloud_event.get("subject")


def check_cloud_event(headers: Headers, topic: str) -> None:
    """Raise `RequestRefused` for an event of CloudEvents that is of another topic or version."""
    if headers.cloud_event.get("specversion", "1.0") != "1.0":
        raise unreadable("ce-specversion is not 1.0.")
    if (kind := headers.cloud_event.get("type", topic)) != topic:
        raise RequestRefused(
            422,
            f"ce-type is {shown(kind)}, and the topic in the path is {shown(topic)}: they must be equal, or leave "
            "ce-type out.",
            code="MR-webhook-request-invalid",
        )


def id_of(headers: Headers) -> str:
    """Return the id of a request that is not signed. Raises `RequestRefused` if it has none."""
    event = headers.cloud_event
    of_event = f"{event['source']} {event['id']}" if event.get("source") and event.get("id") else None
    for id in (headers.get(ID), headers.get(IDEMPOTENCY), of_event):
        if id:
            return id
    raise unreadable(
        f"The request has no id, so it could not be sent once: give {ID} or Idempotency-Key, the same at each attempt."
    )
