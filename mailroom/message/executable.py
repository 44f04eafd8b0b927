"""What the sender and the executor of an executable share: its version, its limits, and its form as a dead letter.

As a dead letter it is a CBOR map of the format's version and the columns that are set. The executor never guesses the
meaning of a version that it does not know: it makes such an executable a dead letter. A release that knows the version
can requeue it.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mailroom.errors import DecodeError
from mailroom.message.columns import PARTS
from mailroom.values import codec

VERSION = 1
STORE, ACCOUNTING = "store", "accounting"  # the targets that every node has
MAX_PART_BYTES = 4 * 1024 * 1024  # of value, expected and arguments each: all of them fit into one CBOR value
MAX_WIRE_BYTES = 2**30  # the limit of a column in PostgreSQL
MAX_LEVELS = 32  # of the key of an account operation

NAMES = tuple(part.name for part in PARTS)
# The Python type of each column after decoding; arguments are JSON text.
DECODED: dict[str, type] = {
    "smallint": int, "bigint": int, "text": str, "jsonb": str, "bytea": bytes, "timestamptz": datetime,
}  # fmt: skip


def wired(parts: Mapping[str, Any]) -> bytes:
    """Return an executable's parts (`PARTS`; arguments as JSON text) as CBOR, without those that are None.

    The size is not limited to 16 MiB, the limit of `unwired`: a row that bypassed the table's rules becomes a dead
    letter too.
    """
    return codec.encode({name: parts[name] for name in NAMES if parts[name] is not None}, max_bytes=MAX_WIRE_BYTES)


def unwired(raw: bytes) -> dict[str, Any]:
    """Return the parts that `wired` got. Raises `DecodeError` for anything else, and for parts not known here."""
    found = codec.decode(raw)
    if (
        not isinstance(found, dict)
        or not {"version", "operation"} <= found.keys() <= set(NAMES)
        or any(type(found[part.name]) is not DECODED[part.type] for part in PARTS if part.name in found)
    ):
        raise DecodeError(
            "It is not an executable that this release knows; a newer one may have written it.",
            code="MR-executable-unknown",
        )
    return {name: found.get(name) for name in NAMES}
