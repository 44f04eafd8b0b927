"""The headers of a record at RabbitMQ: text, and a key, which RabbitMQ itself does not have; and what others write."""

import json
from datetime import datetime
from typing import Any
from uuid import UUID

from pamqp.commands import Basic

from mailroom.bridges.record import CONTENT_TYPE, Record

KEY = "mailroom-key"
ORIGIN = "mailroom-origin"
PERSISTENT = 2
MAX_NAME_BYTES = 255


def properties_of(record: Record) -> Basic.Properties:
    """Return what goes with a record."""
    headers: dict[str, Any] = {name: value.decode() for name, value in record.headers}
    content_type = headers.pop(CONTENT_TYPE, None)
    if record.key is not None:
        headers[KEY] = record.key.decode()
    return Basic.Properties(
        content_type=content_type, headers=headers, delivery_mode=PERSISTENT, message_id=str(record.id),
        timestamp=record.at,
    )  # fmt: skip


def headers_in(properties: Basic.Properties) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message as any broker has them: names, and bytes."""
    found = [(str(name), _bytes(value)) for name, value in (properties.headers or {}).items()]
    if properties.content_type and CONTENT_TYPE not in dict(found):
        found.append((CONTENT_TYPE, properties.content_type.encode()))
    return found


def id_in(properties: Basic.Properties) -> UUID | None:
    """Return the message id, if it is a UUID: other ones may be used again."""
    try:
        return UUID(properties.message_id)
    except (TypeError, ValueError, AttributeError):
        return None


def _bytes(value: Any) -> bytes | None:
    """Return a value of AMQP as bytes: text in UTF-8, and what has parts as JSON."""
    if value is None or isinstance(value, bytes | bytearray):
        return None if value is None else bytes(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, datetime):
        return value.isoformat().encode()
    return json.dumps(value, default=_shown).encode()


def _shown(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else str(value)
