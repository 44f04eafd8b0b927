"""Delivered messages as they are printed, nothing left out: what is printed may be all that is left of them."""

import base64
import sys
from collections.abc import Iterable

from mailroom.cli.output import as_json, json_text, printable, shown
from mailroom.message import Message

FIELDS = (
    "id", "topic", "key", "clock", "sent_clock", "origin", "kind", "message_type", "event_type", "headers", "source",
    "sent_at", "delivered_at", "expires_at",
)  # fmt: skip

# A value that is none of ours; or JSON whose numbers or nesting Python will not read.
UNREADABLE = (ValueError, RecursionError)


def print_messages(messages: Iterable[Message], *, json: bool) -> None:
    """Print messages on stdout, one JSON object per line or for people, and flush; raises OSError if that fails."""
    for message in messages:
        sys.stdout.write((_as_json(message) if json else _for_people(message)) + "\n")
    sys.stdout.flush()


def _as_json(message: Message) -> str:
    fields = {name: getattr(message, name) for name in FIELDS}
    try:
        content = {"value": as_json(message.value)}
    except UNREADABLE as error:
        content = {"raw": _base64(message.raw), "note": str(error)}
    return json_text({**fields, "headers": dict(message.headers), **content})


def _for_people(message: Message) -> str:
    try:
        content = json_text(message.value, ascii_only=False)
    except UNREADABLE as error:
        content = f"{error} They are, as base64: {_base64(message.raw)}"
    heading = f"{message.clock}  {message.topic}  key {message.key}  {shown(message.sent_at)}  {message.id}"
    headers = [f"    {name}: {text}" for name, text in message.headers.items()]
    return printable("\n".join([heading, *headers, f"    {content}"]))


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
