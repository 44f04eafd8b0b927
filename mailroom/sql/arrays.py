"""Arrays for a statement in PostgreSQL's binary form; psycopg would write text, at several times the processor time.

Only for sessions of our own, which are psycopg's and have the client encoding UTF-8.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from struct import Struct
from typing import Any

from mailroom.sql.operation import Undecoded

# The head of an array: dimensions, whether it has nulls, the type of its items; and of its one dimension: length, from.
_EMPTY, _HEAD, _LENGTH = Struct("!iiI"), Struct("!iiIii"), Struct("!i")
_NULL = _LENGTH.pack(-1)
_EPOCH, _MICROSECOND = datetime(2000, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
_INT64 = Struct("!q").pack


def _moment(moment: datetime) -> bytes:
    return _INT64((moment - _EPOCH) // _MICROSECOND)


# By name: what every PostgreSQL calls the type and its array, and the binary form of an item.
_TYPES: dict[str, tuple[int, int, Callable[[Any], bytes]]] = {
    "bigint": (20, 1016, _INT64),
    "bytea": (17, 1001, bytes),
    "text": (25, 1009, str.encode),
    "timestamptz": (1184, 1185, _moment),
    "uuid": (2950, 2951, attrgetter("bytes")),
}


def array(kind: str, items: Sequence[object]) -> Undecoded:
    """Return an array of this type: of `int`, `bytes`, `str`, aware `datetime` or `UUID`, or None for null."""
    item, own, form = _TYPES[kind]
    if not items:
        return Undecoded(own, _EMPTY.pack(0, 0, item))
    length = _LENGTH.pack
    parts = [_HEAD.pack(1, None in items, item, len(items), 1)]
    for each in items:
        if each is None:
            parts.append(_NULL)
        else:
            raw = form(each)
            parts += (length(len(raw)), raw)
    return Undecoded(own, b"".join(parts))
