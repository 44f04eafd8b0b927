"""Watched tables as tests see them: what was told, and the table that it amounts to."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import TupleRow

SENT = """
DELETE FROM mailroom.outbox
RETURNING position, topic, key, kind::text, message_type::text, event_type::text, value_json::text
"""


@dataclass(frozen=True)
class Told:
    """A message of a watched table."""

    topic: str
    key: str
    codes: str  # kind, message type, event type
    value: Any

    @property
    def event(self) -> str:
        return self.codes[-1]

    @property
    def brief(self) -> tuple[str, str]:
        return self.event, self.key


def told(connection: Connection[TupleRow]) -> list[Told]:
    """Take what is in the outbox, in the order sent."""
    rows = sorted(connection.execute(SENT).fetchall())
    return [Told(topic, key, "".join(codes), json.loads(value)) for _, topic, key, *codes, value in rows]


def brief(connection: Connection[TupleRow]) -> list[tuple[str, str]]:
    """Take what is in the outbox; return event and key of each, sorted within a key's order only."""
    return sorted((message.brief for message in told(connection)), key=lambda found: found[1])


def replayed(messages: Iterable[Told], rows: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the rows, by key, that the messages make of those; fail where one does not follow from those before."""
    rows = dict(rows or {})
    for message in messages:
        if message.topic.endswith(".truncated"):
            rows.clear()
            continue
        old, new = message.value["old"], message.value["new"]
        assert rows.pop(message.key, None) == old, message
        assert message.event == ("C" if old is None else "D" if new is None else "U"), message
        assert message.topic.endswith({"C": ".created", "U": ".updated", "D": ".deleted"}[message.event])
        changed = [] if message.event != "U" else [name for name in new if new[name] != old[name]]
        assert sorted(message.value["changed"]) == sorted(changed)
        if new is not None:
            rows[message.key] = new
    return rows
