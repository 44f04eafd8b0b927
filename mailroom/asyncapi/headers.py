"""The headers of records at a broker as JSON schemas: those that `mailroom.bridges.record` writes, and reads."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from mailroom.bridges.record import CONTENT_TYPE, CONTENT_TYPES, Form, Format

Schema: TypeAlias = dict[str, Any]

_UUID: Schema = {"type": "string", "format": "uuid"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_NUMBER: Schema = {"type": "string", "pattern": "^[1-9][0-9]{0,18}$"}
_TEXT: Schema = {"type": "string"}

# By format, the headers that say which message it is; those of `OPTIONAL` are not in each record.
IDENTITY: Mapping[Format, Mapping[str, Schema]] = {
    "cloudevents": {
        "ce_specversion": {"const": "1.0"},
        "ce_id": _UUID | {"description": "The message's id."},
        "ce_source": _TEXT | {"description": "/mailroom/ and the name of the node."},
        "ce_type": _TEXT | {"description": "The topic."},
        "ce_subject": _TEXT | {"description": "The key, if the message has one."},
        "ce_time": _TIME | {"description": "When it was sent."},
        "ce_partitionkey": _TEXT | {"description": "The key, if the message has one."},
        "ce_traceparent": _TEXT,
        "ce_sequence": {"type": "string", "pattern": "^[0-9]{19}$", "description": "The clock of the send."},
    },
    "debezium": {
        "id": _UUID | {"description": "The message's id."},
        "mailroom-topic": _TEXT | {"description": "The topic."},
        "mailroom-time": _TIME | {"description": "When it was sent."},
    },
    "plain": {
        "mailroom-id": _UUID | {"description": "The message's id."},
        "mailroom-topic": _TEXT | {"description": "The topic."},
        "mailroom-time": _TIME | {"description": "When it was sent."},
    },
}
TOPIC_IN: Mapping[Format, str] = {"cloudevents": "ce_type", "debezium": "mailroom-topic", "plain": "mailroom-topic"}
CARRIAGE: Mapping[str, Schema] = {
    "mailroom-kind": {
        "type": "string",
        "pattern": "^[MECR][ODCU][CUD]?$",
        "description": "Kind, message type and event type.",
    },
    "mailroom-origin": _UUID | {"description": "The node's id."},
    "mailroom-link": _NUMBER | {"description": "The number of the link at that node."},
    "mailroom-clock": _NUMBER | {"description": "The clock of the send, which rises along the link."},
    "mailroom-expires": _TIME | {"description": "When it expires, if it does."},
    "mailroom-headers": {
        "type": "string",
        "contentMediaType": "application/json",
        "description": "A map of headers of the message that cannot stand by themselves.",
    },
}
OPTIONAL = {"ce_subject", "ce_partitionkey", "ce_traceparent", "mailroom-expires", "mailroom-headers"}


def published(form: Form) -> Schema:
    """Return the schema of the headers of records in this form."""
    ours = {**IDENTITY[form.format], **CARRIAGE}
    required = [name for name in ours if name not in OPTIONAL]
    if not form.tombstones:
        required.append(CONTENT_TYPE)
    return {
        "type": "object",
        "properties": {**ours, CONTENT_TYPE: {"const": CONTENT_TYPES[form.encode].decode()}},
        "required": required,
        "additionalProperties": _TEXT,
    }


def read(key: str) -> Schema:
    """Return the schema of the headers of records that are taken in, from any writer; `key` is that of `Intake`."""
    known = {name: schema for names in IDENTITY.values() for name, schema in names.items()} | dict(CARRIAGE)
    # CloudEvents of others have ids, times and versions of their own.
    known |= {"ce_specversion": _TEXT, "ce_id": _TEXT, "ce_time": _TEXT, "ce_sequence": _TEXT, "id": _TEXT}
    place, _, name = key.partition(":")
    return {
        "type": "object",
        "properties": {**known, CONTENT_TYPE: _TEXT},
        **({"required": [name]} if place == "header" else {}),
        "additionalProperties": True,
    }
