"""The lanes of one program listen over one session: whichever lane is first opens it, and rings for all of them.

It listens for both of their tables from the start, so a lane that comes later needs no round trip. It rings once itself
then, and scans what was sent before. When the lane that has the session ends, the next one opens another, and all scan
again: as after any lost connection.
"""

import asyncio
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from mailroom.session.home import Home
from mailroom.session.listener import Listener, naming
from mailroom.sql.operation import Operation

TABLES = ("outbox", "outbox_executable")


# D-daemon-2: The lanes of a program listen over one session.
@dataclass(eq=False)
class _Line:
    """What the lanes of one schema share."""

    listeners: list["LaneListener"] = field(default_factory=list)
    host: "LaneListener | None" = None
    channels: dict[str, str] = field(default_factory=dict)  # the table of each
    freed: asyncio.Event = field(default_factory=asyncio.Event)


_lines: WeakKeyDictionary[Home, dict[str, _Line]] = WeakKeyDictionary()


class LaneListener(Listener):
    """The listener of one lane."""

    def __init__(self, home: Home, schema: str, table: str) -> None:
        super().__init__(home, schema, table, "dispatcher listener")
        self._schema = schema
        self._table = table
        self._line = _Line()

    async def run(self) -> None:
        """Listen until cancelled, over the session of whichever lane has it."""
        lines = _lines.setdefault(self._home, {})
        line = self._line = lines.setdefault(self._schema, _Line())
        line.listeners.append(self)
        try:
            while line.host is not None:
                self.ring()
                await line.freed.wait()
            line.host = self
            try:
                await super().run()
            finally:
                line.host = None
                freed, line.freed = line.freed, asyncio.Event()
                freed.set()
        finally:
            line.listeners.remove(self)
            if not line.listeners:
                del lines[self._schema]

    def listen_anew(self) -> None:
        """Reconnect, whichever lane has the session."""
        if self._line.host is self:
            super().listen_anew()
        elif self._line.host is not None:
            self._line.host.listen_anew()

    def rung(self, channel: str | None) -> None:
        """Ring for the lane of that channel; None: for each lane."""
        for each in self._line.listeners:
            if channel is None or self._line.channels.get(channel) == each._table:
                each.ring()

    def _naming(self) -> Operation[list[str]]:
        self._line.channels = {}
        for table in TABLES:
            self._line.channels[(yield from naming(self._schema, table))] = table
        return list(self._line.channels)
