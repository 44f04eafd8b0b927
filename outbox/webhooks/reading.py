"""Requests whose bodies are still on their way: their number is bounded, since nothing of them is verified yet.

When there is no room for another one, the client with most of them loses the one that has been sending for longest:
never one that sends its body at once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


# D-bridges-23: When there are too many connections or bodies, the oldest of the largest user makes room.
class Bodies:
    """The requests that are being read; `most` of them at once, each for at most `within_s`."""

    def __init__(self, most: int, within_s: float) -> None:
        self._most = most
        self._within_s = within_s
        self._of: dict[asyncio.Timeout, str] = {}  # the oldest first

    @asynccontextmanager
    async def one(self, peer: str) -> AsyncIterator[None]:
        """Read the body of a request in this block; `TimeoutError` if it takes too long, or others need the room."""
        if len(self._of) >= self._most:
            self._give_one_up()
        async with asyncio.timeout(self._within_s) as limit:
            self._of[limit] = peer
            try:
                yield
            finally:
                self._of.pop(limit, None)

    def _give_one_up(self) -> None:
        of = Counter(self._of.values())
        most = max(of.values())
        limit = next(limit for limit, peer in self._of.items() if of[peer] == most)
        del self._of[limit]
        if not limit.expired():
            limit.reschedule(0.0)
