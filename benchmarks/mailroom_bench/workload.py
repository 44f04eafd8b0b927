"""The messages of all measurements: values of 200 bytes over a number of keys."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mailroom.values import codec
from outbox import Outgoing

INBOX = "bench"  # also the topic: an inbox gets the topic of its own name
KEYS = 1_000
VALUE_BYTES = 200

# Neighbouring messages have distant keys, as from independent writers.
_STRIDE = 7_919


def key(nth: int, keys: int = KEYS) -> str:
    """Return the key of the n-th message; all keys come equally often."""
    return f"key-{nth * _STRIDE % keys:07}"


KEY = f"'key-' || lpad((nth::bigint * {_STRIDE} %% %(keys)s)::text, 7, '0')"  # `key` in SQL, of a column `nth`


def value(nth: int) -> dict[str, object]:
    """Return the n-th value, a small record of exactly `VALUE_BYTES` bytes as CBOR."""
    record: dict[str, object] = {"nth": nth + 2**32, "state": "paid", "amount": 12.5, "items": [1, 2, 3], "note": ""}
    # The length of this text takes two bytes more than that of an empty one.
    record["note"] = "x" * (VALUE_BYTES - len(codec.encode(record)) - 1)
    return record


def number(value: Mapping[str, Any]) -> int:
    """Return which message a value of `value` belongs to."""
    return int(value["nth"]) - 2**32


@dataclass(frozen=True, slots=True)
class Event:
    """What a consumer of a peer makes of a row, where it does the work of ours: an object, with its value decoded."""

    id: int | None
    key: str
    value: dict[str, Any]
    sent_at: datetime | None = None


def _record() -> dict[str, object]:
    record = value(0)
    record["note"] = ""
    record["note"] = "x" * (VALUE_BYTES - len(json.dumps(record)))
    return record


def encoded(count: int) -> Iterator[tuple[str, str]]:
    """Yield what `texts` does, but encode each value when its turn comes, as a publisher has to."""
    record = _record()
    for nth in range(count):
        yield key(nth), json.dumps({**record, "nth": nth + 2**32})


def texts(count: int) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each message as ready JSON of the same size, for peers: nobody encodes it."""
    record = _record()
    head, tail = json.dumps(record).split(str(record["nth"]))
    for nth in range(count):
        yield key(nth), f"{head}{nth + 2**32}{tail}"


VALUE = codec.encode(value(0))  # messages written by SQL all have the same value


def outgoing(count: int, keys: int = KEYS, topic: str = INBOX) -> Iterator[Outgoing]:
    """Yield `count` messages to send, each with its value and key."""
    note = value(0)
    for nth in range(count):
        yield Outgoing(topic, {**note, "nth": nth + 2**32}, key=key(nth, keys))
