"""Which parked or failing keys a form means: one, those that are ticked, or all that a filter shows.

Of many that a filter shows those are meant that are parked longest, or tried next.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from dispatcher.dashboard.forms import parsed
from dispatcher.dashboard.guard import Refused
from dispatcher.dashboard.shown import Asked
from inbox.by_key.parked_keys import Changed
from inbox.failing import FailingKeys
from inbox.parked import Parked
from mailroom.figures.failing_keys import reading_next
from mailroom.figures.parked_keys import AGES, ParkedFilter, reading_oldest
from mailroom.order.traits import reading_traits
from mailroom.sql.runner import run
from mailroom.values.names import inbox_name

AT_ONCE = 1_000  # keys or dead letters that one click changes, within the time that a statement has
TICK = "of-"  # the names of tick boxes begin with this: a form has each field once


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Keys of inboxes; None is the whole of a total inbox."""

    keys: Mapping[str, list[str] | None]

    def replay(self, connection: Connection[Any], schema: str, by: Mapping[str, Any]) -> Changed:
        """Replay them, inbox by inbox in the order of names, in the connection's transaction."""
        return _sum(
            Parked(inbox, schema=schema).replay(connection, keys, **by) for inbox, keys in sorted(self.keys.items())
        )

    def retry(self, connection: Connection[Any], schema: str, by: Mapping[str, Any]) -> int:
        """Have them tried at once, as `replay` does; return how many keys that changed."""
        return sum(
            len(FailingKeys(inbox, schema=schema).retry(connection, keys, **by))
            for inbox, keys in sorted(self.keys.items())
        )

    def discard(self, connection: Connection[Any], schema: str, by: Mapping[str, Any], per_key: int | None) -> Changed:
        """Discard their messages, of each key the first `per_key` or all, as `replay` does."""
        return _sum(
            Parked(inbox, schema=schema).discard(connection, keys, per_key=per_key, **by)
            for inbox, keys in sorted(self.keys.items())
        )


def filter_of(asked: Asked) -> ParkedFilter:
    """Return the filter of a page or a form; raises `Refused` for an age that there is not."""
    wanted = asked.text("age")
    age = next((each for each in AGES if each == wanted), None)
    if wanted is not None and age is None:
        raise Refused(400, "There is no such age.")
    inbox = asked.inbox() if asked.text("inbox") else None
    return ParkedFilter(inbox, asked.fields.get("error"), asked.text("matching"), age)


def parked_keys(connection: Connection[Any], schema: str, fields: Mapping[str, str]) -> ChosenKeys:
    """Return which parked keys a form means. Raises `Refused` if it names none."""

    def shown(asked: Asked) -> list[tuple[str, str]]:
        found = run(connection, reading_oldest(schema, filter_of(asked), limit=AT_ONCE))
        return [(each.inbox, each.key) for each in found]

    return _chosen(connection, schema, fields, shown)


def failing_keys(connection: Connection[Any], schema: str, fields: Mapping[str, str]) -> ChosenKeys:
    """Return which failing keys a form means. Raises `Refused` if it names none."""

    def shown(asked: Asked) -> list[tuple[str, str]]:
        return run(connection, reading_next(schema, **failing_filter(asked), limit=AT_ONCE))

    return _chosen(connection, schema, fields, shown)


def failing_filter(asked: Asked) -> dict[str, str | None]:
    """Return which failing keys a page or a form is about, as the readings of them take it."""
    inbox = asked.inbox() if asked.text("inbox") else None
    return {"inbox": inbox, "error": asked.fields.get("error"), "matching": asked.text("matching")}


def _chosen(
    connection: Connection[Any],
    schema: str,
    fields: Mapping[str, str],
    shown: Callable[[Asked], list[tuple[str, str]]],
) -> ChosenKeys:
    if "key" in fields:
        return ChosenKeys({inbox_name(fields["inbox"]): [fields["key"]]})
    pairs = [_pair(value) for name, value in fields.items() if name.startswith(TICK)]
    if not pairs and not fields.get("all"):  # a form that lost its keys must not mean every key
        raise Refused(400, "The form names nothing to change: tick the keys that are meant.")
    if not pairs:
        pairs = shown(Asked(dict(fields)))
    found: dict[str, list[str]] = {}
    for inbox, key in pairs:
        found.setdefault(inbox, []).append(key)
    return ChosenKeys({inbox: _of_inbox(connection, schema, inbox, keys) for inbox, keys in found.items()})


def _pair(value: str) -> tuple[str, str]:
    given = parsed(value)
    return inbox_name(given["inbox"]), given["key"]


def _of_inbox(connection: Connection[Any], schema: str, inbox: str, keys: list[str]) -> list[str] | None:
    if "" not in keys:
        return keys
    # Only a total inbox is parked as a whole. Of another one it would mean every key.
    if run(connection, reading_traits(schema, inbox)).parks_one:
        raise Refused(400, "The form names a key that there cannot be.")
    return None


def _sum(changes: Any) -> Changed:
    keys = messages = freed = 0
    for each in changes:
        keys, messages, freed = keys + each.keys, messages + each.messages, freed + each.freed
    return Changed(keys, messages, freed)
