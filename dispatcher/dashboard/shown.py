"""What every page is made from: the node that is shown, and what a request asks for."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from psycopg import Connection

from dispatcher.dashboard.guard import Refused
from dispatcher.dashboard.looks import Looks
from dispatcher.dashboard.reading import PAGE_ROWS
from dispatcher.dashboard.sessions import NodeSessions
from mailroom.metrics.look import Look
from mailroom.values.names import inbox_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShownNode:
    """A node, and whether what messages say may be shown."""

    schema: str
    sessions: NodeSessions
    looks: Looks
    payloads: bool

    def reading(self) -> AbstractContextManager[Connection[Any]]:
        """Lend a session that only reads."""
        return self.sessions.reading()

    def look(self) -> Look:
        """Return the newest look."""
        return self.looks.newest()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the path and the query of a request say, each checked; raises `Refused` for what none of our pages asks."""

    fields: dict[str, str]

    def text(self, name: str) -> str | None:
        """Return a text, None if it is not given or empty."""
        return self.fields.get(name) or None

    def inbox(self) -> str:
        """Return the name of the inbox; raises `InvalidName`."""
        return inbox_name(self.fields.get("inbox", ""))

    def number(self, name: str) -> int | None:
        """Return a number, None if it is not given."""
        text = self.fields.get(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise Refused(400, f"{name} is not a number.")
        return int(text)

    def id(self) -> UUID | None:
        """Return the id of a message, None if it is not given."""
        text = self.fields.get("id", "").strip()
        try:
            return UUID(text) if text else None
        except ValueError:
            raise Refused(400, "That is not a message id: it is the one that the send returned.") from None

    def time(self, name: str) -> datetime | None:
        """Return a time, None if it is not given."""
        try:
            return datetime.fromisoformat(self.fields[name]) if name in self.fields else None
        except ValueError:
            raise Refused(400, f"{name} is not a time.") from None


def page_of(rows: Sequence[T]) -> tuple[list[T], T | None]:
    """Return the rows of a page, and the last of them if more follow: the next page begins after it."""
    return list(rows[:PAGE_ROWS]), rows[PAGE_ROWS - 1] if len(rows) > PAGE_ROWS else None
