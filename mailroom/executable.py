"""An executable as both outboxes' ends know it: its columns, its limits, and the form it has as a dead letter.

The form is CBOR, a map with the format's version and those columns that are set. An executable of a version that this
release does not know is never guessed at: the executor parks it among the dead letters, from where a release that
knows it takes it back.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mailroom import codec
from mailroom.errors import DecodeError

VERSION = 1
STORE, ACCOUNTING = "store", "accounting"  # the targets that every node has
MAX_PART_BYTES = 4 * 1024 * 1024  # of value, expected and arguments each: together with the rest they fit into CBOR
MAX_WIRE_BYTES = 2**30  # what PostgreSQL holds in a column
MAX_LEVELS = 32  # of a key that is accounted for

# What says what is to be done, each with its type; the other columns are about the message.
PARTS = (
    ("version", "smallint"),
    ("operation", "text"),
    ("target", "text"),
    ("key", "text"),
    ("end_key", "text"),
    ("value", "bytea"),
    ("amount", "bigint"),
    ("bytes", "bigint"),
    ("expected", "bytea"),
    ("arguments", "jsonb"),
    ("at", "timestamptz"),
    ("row_limit", "bigint"),
    ("notify", "text"),
)
NAMES = tuple(name for name, _ in PARTS)
# What each type is once it is decoded; arguments are JSON text.
DECODED: dict[str, type] = {
    "smallint": int, "bigint": int, "text": str, "jsonb": str, "bytea": bytes, "timestamptz": datetime,
}  # fmt: skip


def wired(parts: Mapping[str, Any]) -> bytes:
    """Return an executable's parts (`PARTS`; arguments as JSON text) as CBOR, without those that are None.

    Of any size, for what came past the table's rules is to end as a dead letter too; `unwired` reads 16 MiB.
    """
    return codec.encode({name: parts[name] for name in NAMES if parts[name] is not None}, max_bytes=MAX_WIRE_BYTES)


def unwired(raw: bytes) -> dict[str, Any]:
    """Return the parts that `wired` was given. Raises `DecodeError` for anything else, and for parts not known here."""
    found = codec.decode(raw)
    if (
        not isinstance(found, dict)
        or not {"version", "operation"} <= found.keys() <= set(NAMES)
        or any(type(found[name]) is not DECODED[kind] for name, kind in PARTS if name in found)
    ):
        raise DecodeError("This is no executable that this release knows: a newer one may have written it.")
    return {name: found.get(name) for name in NAMES}
