"""An executable to be sent, and its checks before the database sees it."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias
from uuid import UUID

from mailroom.errors import InvalidMessage
from mailroom.message.carry import headers_json
from mailroom.message.executable import ACCOUNTING, MAX_LEVELS, MAX_PART_BYTES, STORE, VERSION
from mailroom.message.outgoing import aware, clock, given_id
from mailroom.values.names import Key, executable_name, key_text, shown, topic_name
from mailroom.values.numbers import MAX_INT64, MIN_INT64, whole

Raw: TypeAlias = bytes  # in the class, `bytes` is a field
Act: TypeAlias = Literal["put", "increment", "delete", "delete_range", "account", "call"]

# An escaped NUL in JSON, not an escaped backslash before u0000.
NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# The fields that each operation requires (NEEDS) and allows (MAY_HAVE), beside those that every operation allows.
NEEDS: dict[str, frozenset[str]] = {
    "put": frozenset({"key", "value"}),
    "increment": frozenset({"key", "amount"}),
    "delete": frozenset({"key"}),
    "delete_range": frozenset(),
    "account": frozenset({"key", "amount", "bytes"}),
    "call": frozenset(),
}
MAY_HAVE: dict[str, frozenset[str]] = {
    "put": frozenset({"expected"}),
    "delete_range": frozenset({"key", "end_key", "row_limit"}),
    "account": frozenset({"at"}),
    "call": frozenset({"key", "arguments"}),
}
# The default target.
OWN = dict.fromkeys(("put", "increment", "delete", "delete_range"), STORE) | {"account": ACCOUNTING}
SPECIFIC = frozenset().union(*NEEDS.values(), *MAY_HAVE.values())


@dataclass(frozen=True, slots=True)
class Executable:
    """One executable for `Store.send_many`; the fields mean the same as the arguments of the methods of `Store`.

    `target` is by default the node's own store, or its books for `account`; for a `call` it is the function's name.
    `amount` is what `increment` adds, and the count that `account` adds. `key`, `end_key` and `row_limit` are the
    start, the end and the limit of a `delete_range`.
    """

    operation: Act
    key: Key | None = None
    target: str | None = None
    end_key: Key | None = None
    value: Raw | None = field(default=None, repr=False)  # kept out of repr, which ends up in logs
    amount: int | None = None
    bytes: int | None = None
    expected: Raw | None = field(default=None, repr=False)
    arguments: object = field(default=None, repr=False)
    at: datetime | None = None
    row_limit: int | None = None
    notify: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    after_clock: int | None = None
    id: UUID | None = None


def row_of(executable: Executable) -> tuple[Any, ...]:
    """Return what a writer sets of an executable, or raise `InvalidMessage`: what is missing, or the limit broken."""
    _check_parts(executable)
    return (
        UUID(bytes=os.urandom(16), version=4) if executable.id is None else given_id(executable.id),
        VERSION,
        executable.operation,
        executable_name(OWN[executable.operation] if executable.target is None else executable.target),
        "" if executable.key is None or executable.key == "" else _key(executable, executable.key),
        None if executable.end_key is None else key_text(executable.end_key),
        None if executable.value is None else _part(executable.value, "value"),
        None if executable.amount is None else whole(executable.amount, "amount", MIN_INT64, MAX_INT64),
        None if executable.bytes is None else whole(executable.bytes, "bytes", MIN_INT64, MAX_INT64),
        None if executable.expected is None else _part(executable.expected, "expected"),
        None if executable.arguments is None else _json(executable.arguments),
        None if executable.at is None else aware(executable.at, "at"),
        None if executable.row_limit is None else whole(executable.row_limit, "row_limit", 1, MAX_INT64),
        None if executable.notify is None else topic_name(executable.notify),
        headers_json(executable.headers),
        None if executable.after_clock is None else clock(executable.after_clock),
    )


def _check_parts(executable: Executable) -> None:
    if not isinstance(executable.operation, str) or executable.operation not in NEEDS:
        raise InvalidMessage(
            f"{shown(executable.operation)} is not an operation; there are {', '.join(NEEDS)}.",
            code="MR-invalid-executable",
        )
    given = {name for name in SPECIFIC if getattr(executable, name) is not None}
    if executable.key == "" and executable.operation != "delete_range":
        given.discard("key")
    needed = NEEDS[executable.operation]
    if missing := sorted(needed - given):
        raise InvalidMessage(f"{executable.operation} needs {' and '.join(missing)}.", code="MR-invalid-executable")
    if executable.target is None and executable.operation not in OWN:
        raise InvalidMessage(
            f"{executable.operation} needs a target: the name of a registered function.", code="MR-invalid-executable"
        )
    if executable.operation == "account" and executable.target not in (None, ACCOUNTING):
        raise InvalidMessage(
            f"account writes the node's books: give no target, or {ACCOUNTING}.", code="MR-invalid-executable"
        )
    if surplus := sorted(given - needed - MAY_HAVE.get(executable.operation, frozenset())):
        raise InvalidMessage(
            f"{executable.operation} takes no {' and no '.join(surplus)}.", code="MR-invalid-executable"
        )


def _key(executable: Executable, key: Key) -> str:
    text = key_text(key)
    if executable.operation == "account" and text.count("/") >= MAX_LEVELS:
        raise InvalidMessage(
            f"Key {shown(text)} has {text.count('/') + 1} levels; {MAX_LEVELS} can be accounted for.",
            code="MR-invalid-executable",
        )
    return text


def _part(value: bytes, what: str) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidMessage(
            f"{what} is bytes, not {type(value).__name__}: encode it, for example with mailroom.values.codec.encode. "
            "For a number use increment.",
            code="MR-invalid-executable",
        )
    part = bytes(value)
    if len(part) > MAX_PART_BYTES:
        raise InvalidMessage(
            f"{what} has {len(part):,} bytes; {MAX_PART_BYTES:,} are allowed.", code="MR-executable-too-large"
        )
    return part


def _json(arguments: object) -> str:
    try:
        text = json.dumps(arguments, allow_nan=False)
        # Measured like jsonb's text form, as the table's trigger does.
        size = len(json.dumps(arguments, ensure_ascii=False).encode()) + _digits_more(text)
    except (TypeError, ValueError, RecursionError) as error:
        # Not chained: the cause may quote the payload.
        raise InvalidMessage(
            f"The arguments cannot be encoded as JSON: {type(error).__name__}.", code="MR-invalid-executable"
        ) from None
    if NUL.search(text):
        raise InvalidMessage(
            "The arguments contain a NUL character, which PostgreSQL's jsonb cannot store.", code="MR-invalid-text"
        )
    if size > MAX_PART_BYTES:
        raise InvalidMessage(
            f"The arguments have {size:,} bytes as JSON; {MAX_PART_BYTES:,} are allowed.",
            code="MR-executable-too-large",
        )
    return text


def _digits_more(text: str) -> int:
    """Return how many bytes the numbers grow by in jsonb, which writes 1e300 out in full."""
    more = 0

    def measured(number: str) -> None:
        nonlocal more
        more += len(format(Decimal(number), "f")) - len(number)

    json.loads(text, parse_float=measured)
    return more
