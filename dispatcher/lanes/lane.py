"""A lane of the daemon that empties one outbox while it leads.

Beside the connections of what leads there is the one that listens, for all lanes; see `dispatcher.lanes.leading`.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from dispatcher.delivery.floor import Scanned
from dispatcher.lanes.doorbell import BUSY, Doorbell
from dispatcher.lanes.leading import Duty, Leading
from dispatcher.lanes.lease import RENEW_S
from dispatcher.lanes.listening import LaneListener
from mailroom.session.home import Home

POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a lane over one connection: `batch` does one batch; `drain` does all, and returns how much.

    `rest` is `drain` where there is mostly nothing left.
    """

    batch: Callable[[], Awaitable[Scanned]]
    drain: Callable[[], Awaitable[int]]
    rest: Callable[[], Awaitable[int]]


def to_do(scanned: Scanned) -> int:
    """Return how much a batch has found to do: what it took, and what was drawn after it by writers that go on.

    Those would soon ring, and each of them delays the other's commit by that.
    """
    coming = 0 if scanned.last is None else scanned.drawn - scanned.last
    return max(scanned.taken + coming, BUSY if scanned.more else 0)


class Lane(Leading):
    """Empties an outbox while it holds the lease of its role; otherwise it stands by. For its errors see `Leading`.

    `poll_interval_s` is the longest a message waits if every notification is lost.
    """

    _outbox: str

    def __init__(self, dsn: str | Home, schema: str, poll_interval_s: float) -> None:
        super().__init__(dsn, schema)
        self._poll_interval_s = poll_interval_s

    @abstractmethod
    def _work_on(self, connection: psycopg.AsyncConnection) -> Work:
        """Return the work to do over a connection that was just made."""

    def _beside(self, leading: asyncio.Event) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what runs beside the work as long as its connections last, over a connection of its own."""
        return ()

    def _on_duty(self, connection: psycopg.AsyncConnection) -> Duty:
        listener = LaneListener(self._home, self._schema, self._outbox)
        doorbell = Doorbell(connection, self._schema, self._outbox, listener, self._poll_interval_s)
        return Duty(
            self._serve(doorbell, self._work_on(connection)),
            (listener.run(), *self._beside(self._leading)),
            lambda: doorbell.awake,
            listener.ring,
            listener.listen_anew,
        )

    async def _unless_held_up(self, batches: Callable[[], Awaitable[int]]) -> int:
        try:
            done = await batches()
        except psycopg.Error as error:
            if not self._is_held_up(error, "a batch"):
                raise
            return 0
        self._failure.worked()
        return done

    async def _serve(self, doorbell: Doorbell, work: Work) -> None:
        async def batch() -> int:
            return to_do(await work.batch())

        async def first() -> int:
            done = await self._unless_held_up(batch)
            self._has_begun = True
            return done

        async def drain() -> int:
            return await self._unless_held_up(work.drain)

        async def rest() -> int:
            return await self._unless_held_up(work.rest)

        def goes_on() -> bool:
            return self._leading.is_set() and not self._stopping.is_set()

        while not self._stopping.is_set():
            if self._leading.is_set():
                await doorbell.serve(drain, goes_on, first=first, rest=rest)
            else:
                # Stand by; the keeper takes the lease when it expires.
                await self._pause(RENEW_S / 4)
