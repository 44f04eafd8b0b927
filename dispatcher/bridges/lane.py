"""What the lane of links does beside reading other nodes: it tends the bridges of this node to brokers."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dispatcher.bridges.brokers import publisher_of, source_of
from dispatcher.bridges.publishing import Publishing
from dispatcher.bridges.taking import TakingIn
from dispatcher.links.receive import Reception
from dispatcher.links.receiving import Receiving
from mailroom.bridges.into import InRow, reading_ins
from mailroom.bridges.out import OutRow, reading_outs
from mailroom.session.home import Home

END_S = 1.5


@dataclass(frozen=True, slots=True)
class _Tended:
    tending: Publishing | TakingIn
    task: "asyncio.Task[None]"


# D-bridges-2: The lane of links tends bridges.
class BridgesBeside:
    """The bridges of a node, a task each, while its lane leads. `on_received` is called with what comes in."""

    def __init__(
        self, home: str | Home, schema: str, *, poll_interval_s: float, on_received: Callable[[Reception], None]
    ) -> None:
        self._home = home
        self._schema = schema
        self._poll_interval_s = poll_interval_s
        self._on_received = on_received
        self._tended: dict[tuple[str, int], _Tended] = {}

    async def follow(self, receiving: Receiving) -> None:
        """Look which bridges there are, begin those that are new, and end those that are gone or changed."""
        rows: dict[tuple[str, int], OutRow | InRow] = {
            ("out", row.link): row for row in await receiving.run(reading_outs(self._schema))
        }
        rows |= {("in", row.origin): row for row in await receiving.run(reading_ins(self._schema))}
        await self._end_old(rows)
        names = [row.name for row in rows.values()]
        for key, row in rows.items():
            if key not in self._tended:
                tending = self._tending(row, names, receiving)
                self._tended[key] = _Tended(tending, asyncio.create_task(tending.run()))

    async def _end_old(self, rows: Mapping[tuple[str, int], OutRow | InRow]) -> None:
        for key, each in list(self._tended.items()):
            if each.task.done():
                del self._tended[key]
                await each.task  # it ended by an error only if the lane's session is lost
            elif key not in rows or _way(rows[key]) != _way(each.tending.row):
                each.tending.stop()
            elif rows[key].is_well:
                each.tending.resume()
            else:
                each.tending.is_noted()

    def _tending(self, row: OutRow | InRow, names: list[str], receiving: Receiving) -> Publishing | TakingIn:
        if isinstance(row, InRow):
            return TakingIn(row, source_of(row, names), self._schema, receiving, self._on_received)
        make = publisher_of(row, names)
        return Publishing(row, make, self._home, self._schema, receiving, self._poll_interval_s)

    def look(self) -> None:
        """Look for messages at once."""
        for each in self._tended.values():
            each.tending.look()

    async def end(self) -> None:
        """End all of them; what is under way at a broker is given up."""
        tended, self._tended = list(self._tended.values()), {}
        for each in tended:
            each.tending.stop()
        tasks = [each.task for each in tended]
        for _ in range(3):
            if not tasks:
                return
            done, pending = await asyncio.wait(tasks, timeout=END_S)
            for task in done:
                if not task.cancelled():
                    task.exception()  # taken: it concerns the session that is given up
            tasks = list(pending)
            for task in tasks:
                task.cancel()


def _way(row: OutRow | InRow) -> tuple[object, ...]:
    """Return what a task cannot change while it runs."""
    return row.name, row.settings, row.node_id, row.moves if isinstance(row, InRow) else row.skips
