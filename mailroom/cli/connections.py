"""What a stranger may hold of one of our servers before anything is known of him: bytes, time and connections.

uvicorn leaves these open. Which parser it uses depends on what else is installed, and one of them reads a head of any
size; and a connection on which nothing or half a request comes stays as long as its client wishes. So here the parser
is always `h11`, which has a bound, and each connection has a time. When there is no room for another connection, the
client with most connections loses the one that has waited longest for bytes: never one that sends its request at once.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEAD_BYTES = 32 * 1024
MOST_CONNECTIONS = 1_000
OWN_FILES = 200  # that are not for connections: sessions, the log, what is served
# For a head, from the connection or the answer before it, however slowly it comes; for the rest of a request, where an
# app that reads one has a shorter time of its own, and answers; and until the answer is taken.
HEAD_S, BODY_S, ANSWER_S = 10.0, 40.0, 120.0
Awaited: TypeAlias = Literal["head", "body", "answer"]


def most_connections() -> int:
    """Return for how many connections there is room."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, max(10, files - OWN_FILES))


# D-bridges-23: When there are too many connections or bodies, the oldest of the largest user makes room.
class BoundedProtocol(H11Protocol):
    """One connection of uvicorn's."""

    _awaited: Awaited | None = None
    _since = 0.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Begin to wait for a head, and make room."""
        super().connection_made(transport)
        self._await("head")
        if len(self.connections) > most_connections():
            _make_room([each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self])

    def data_received(self, data: bytes) -> None:
        """Read, and look for what is waited for now."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or for the client to read what is left."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._await(None)
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._await("head")
        else:
            self._await("body" if self.cycle.more_body else "answer")

    def _await(self, awaited: Awaited | None) -> None:
        if awaited == self._awaited:
            return  # not anew with each byte
        self._awaited, self._since = awaited, self.loop.time()
        if self._late is not None:
            self._late.cancel()
        self._late = None
        if awaited is not None:
            times = {"head": HEAD_S, "body": BODY_S, "answer": ANSWER_S}
            self._late = self.loop.call_later(times[awaited], self.give_up)

    def give_up(self) -> None:
        """End the connection, whatever is left to be read and written."""
        self.transport.abort()

    @property
    def may_go(self) -> bool:
        """Whether it is its client who is waited for."""
        return self._awaited in ("head", "body") and not self.transport.is_closing()

    @property
    def peer(self) -> str:
        """The address at the other end."""
        return self.client[0] if self.client else ""

    @property
    def since(self) -> float:
        """Since when what is awaited now is awaited."""
        return self._since


def _make_room(connections: Sequence[BoundedProtocol]) -> None:
    idle = [each for each in connections if each.may_go]
    of = Counter(each.peer for each in idle)
    if idle:
        min(idle, key=lambda each: (-of[each.peer], each.since)).give_up()
