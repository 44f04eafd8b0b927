"""What the lane of links does beside reading other nodes: it publishes each bridge out of this node."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dispatcher.bridges.brokers import publisher_of
from dispatcher.bridges.publishing import Publishing
from dispatcher.links.receiving import Receiving
from mailroom.bridges.out import OutRow, reading_outs
from mailroom.session.home import Home

END_S = 1.5


@dataclass(frozen=True, slots=True)
class _Published:
    publishing: Publishing
    task: "asyncio.Task[None]"


class Bridges:
    """The bridges of a node, a task each, while its lane leads."""

    def __init__(self, home: str | Home, schema: str, *, poll_interval_s: float) -> None:
        self._home = home
        self._schema = schema
        self._poll_interval_s = poll_interval_s
        self._published: dict[int, _Published] = {}

    async def follow(self, receiving: Receiving) -> None:
        """Look which bridges there are, begin those that are new, and end those that are gone or changed."""
        rows = {row.link: row for row in await receiving.run(reading_outs(self._schema))}
        names = [row.name for row in rows.values()]
        for link, each in list(self._published.items()):
            if each.task.done():
                del self._published[link]
                await each.task  # it ended by an error only if the lane's session is lost
            elif link not in rows or _way(rows[link]) != _way(each.publishing.row):
                each.publishing.stop()
            elif rows[link].is_well:
                each.publishing.resume()
        for link, row in rows.items():
            if link not in self._published:
                make = publisher_of(row, names)
                publishing = Publishing(row, make, self._home, self._schema, receiving, self._poll_interval_s)
                self._published[link] = _Published(publishing, asyncio.create_task(publishing.run()))

    def look(self) -> None:
        """Look for rows at once."""
        for each in self._published.values():
            each.publishing.look()

    async def end(self) -> None:
        """End all of them; what is under way at a broker is given up."""
        published, self._published = list(self._published.values()), {}
        for each in published:
            each.publishing.stop()
        tasks = [each.task for each in published]
        for timeout_s in (END_S, END_S, END_S):
            if not tasks:
                return
            done, pending = await asyncio.wait(tasks, timeout=timeout_s)
            for task in done:
                if not task.cancelled():
                    task.exception()  # taken: it concerns the session that is given up
            tasks = list(pending)
            for task in tasks:
                task.cancel()


def _way(row: OutRow) -> tuple[object, ...]:
    """Return what a publishing task cannot change while it runs."""
    return row.name, row.settings, row.node_id, row.node
