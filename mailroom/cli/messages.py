"""Delivered messages as they are printed, with nothing left out: after a reap, this may be all that is left of them."""

import base64
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mailroom.cli.output import as_json, json_text, printable, shown, wrapped
from mailroom.message.message import Message

FIELDS = (
    "id", "topic", "key", "clock", "sent_clock", "origin", "kind", "message_type", "event_type", "source", "sent_at",
    "delivered_at", "expires_at",
)  # fmt: skip

# A value that is not ours, or JSON whose numbers or nesting Python does not read.
UNREADABLE = (ValueError, RecursionError)


class HasContent(Protocol):
    """Something with headers and a value."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""
        ...

    @property
    def value(self) -> Any:
        """The value, decoded."""
        ...

    @property
    def raw(self) -> bytes:
        """The value as it was sent."""
        ...


def print_messages(messages: Iterable[Message], *, json: bool) -> None:
    """Print messages on stdout, one JSON object per line or for people, and flush; raises OSError if that fails."""
    for message in messages:
        sys.stdout.write((json_text(message_json(message)) if json else _for_people(message)) + "\n")
    sys.stdout.flush()


def message_json(message: Message, *, value: bool = True) -> dict[str, Any]:
    """Return a message as a JSON object, with its value or without."""
    content = content_json(message) if value else {"headers": dict(message.headers)}
    return {**{name: as_json(getattr(message, name)) for name in FIELDS}, **content}


def content_json(held: HasContent) -> dict[str, Any]:
    """Return headers and value as parts of a JSON object; `raw` and a `note` replace a value that JSON cannot hold."""
    try:
        content = {"value": as_json(held.value)}
    except UNREADABLE as error:
        content = {"raw": _base64(held.raw), "note": str(error)}
    return {"headers": dict(held.headers), **content}


def content_lines(held: HasContent) -> list[str]:
    """Return headers and value as people read them."""
    try:
        content = json_text(held.value, ascii_only=False)
    except UNREADABLE as error:
        content = f"{error} They are, as base64: {_base64(held.raw)}"
    return [*(f"    {name}: {text}" for name, text in held.headers.items()), f"    {content}"]


def _for_people(message: Message) -> str:
    heading = f"{message.clock}  {message.topic}  key {message.key}  {shown(message.sent_at)}  {message.id}"
    return printable("\n".join([wrapped(heading), *content_lines(message)]))


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
