"""A TCP proxy that knows COMMIT: it can cut before forwarding it, swallow its answer, hold it up, or lose everything.

`tests.support.proxy` takes the network away as a whole; this one picks its moment. COMMIT comes as a simple query of
its own, or with what lets go of a worker's batch, so it arrives in one piece.
"""

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tests.support.waiting import WITHIN_S

T = TypeVar("T")
COMMIT = re.compile(rb"Q.{4}(?:CLOSE mailroom_batch; )?COMMIT\0", re.S)

ANSWERS_LOST = "answers lost"  # of everything that is asked: whoever has this is to be cut off before it is over


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the network does: `share` is the part of connections, or of COMMITs, that it happens to."""

    kind: str = "none"
    share: float = 1.0
    delay_s: float = 0.0


QUIET = Trouble()


class Network:
    """Forwards to `host:port`, from a thread of its own; every method may be called from any thread."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._target = (host, port)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._trouble = QUIET
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.done: Counter[str] = Counter()  # how often each kind really happened
        self.port = 0
        self._listener = self._do(self._listen())

    def dsn(self, direct: str) -> str:
        """Return the URL that leads through here instead of straight to the server."""
        parts = urlsplit(direct)
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    def lead_to(self, port: int) -> None:
        """Forward new connections to this port: a server that is started again may have another one."""
        self._target = (self._target[0], port)

    @property
    def trouble(self) -> Trouble:
        """What it does now."""
        return self._trouble

    def be(self, trouble: Trouble) -> None:
        """Have this trouble from now on, in the place of any other."""
        self._loop.call_soon_threadsafe(setattr, self, "_trouble", trouble)

    def cut(self) -> None:
        """Reset every connection there is."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def close(self) -> None:
        """End the proxy."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN_S)

    async def _listen(self) -> asyncio.Server:
        listener = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        return listener

    async def _end(self) -> None:
        self._listener.close()
        self._reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset_all(self) -> None:
        for link in list(self._links):
            _reset(link)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pair = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                back, forth = await asyncio.open_connection(*self._target)
                pair.append(forth)
                self._links.update(pair)
                lost = asyncio.Event()  # the answer to a COMMIT is not to come through
                await asyncio.gather(self._to_server(reader, forth, pair, lost), self._to_client(back, pair, lost))
        finally:
            self._tasks.discard(task)
            for link in pair:
                self._links.discard(link)
                link.transport.abort()

    async def _to_server(
        self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter, pair: list[asyncio.StreamWriter],
        lost: asyncio.Event,
    ) -> None:  # fmt: skip
        while data := await reader.read(65_536):
            if await self._is_swallowed(data, pair, lost, forth):
                continue
            forth.write(data)
            await forth.drain()
        forth.transport.abort()

    async def _is_swallowed(
        self, data: bytes, pair: list[asyncio.StreamWriter], lost: asyncio.Event, forth: asyncio.StreamWriter
    ) -> bool:
        trouble = self._trouble
        match trouble.kind:
            case "black hole":
                await self._hold()
            case "latency":
                self.done[trouble.kind] += 1
                await asyncio.sleep(self._random.uniform(0, 2 * trouble.delay_s))
        commit = COMMIT.search(data)
        if commit is None or self._random.random() >= trouble.share:
            return False
        match trouble.kind:
            case "cut before COMMIT":
                self._cut(pair)
            case "COMMIT answer lost":
                lost.set()
            case "half of COMMIT":
                forth.write(data[: commit.start() + 7])
                await forth.drain()
                self._cut(pair)
            case "COMMIT delayed":
                await asyncio.sleep(self._random.uniform(0, 2 * trouble.delay_s))
            case _:
                return False
        self.done[trouble.kind] += 1
        return trouble.kind in ("cut before COMMIT", "half of COMMIT")

    async def _to_client(
        self, back: asyncio.StreamReader, pair: list[asyncio.StreamWriter], lost: asyncio.Event
    ) -> None:
        while data := await back.read(65_536):
            if lost.is_set():
                self._cut(pair)
                return
            await self._hold()
            if self._trouble.kind == ANSWERS_LOST:
                self.done[ANSWERS_LOST] += 1
                continue
            pair[0].write(data)
            await pair[0].drain()
        pair[0].transport.abort()

    async def _hold(self) -> None:
        """Keep what has come for as long as nothing gets through, as TCP does; it goes on, or is reset."""
        if self._trouble.kind == "black hole":
            self.done["black hole"] += 1
        while self._trouble.kind == "black hole":  # noqa: ASYNC110 - a fault, not a design
            await asyncio.sleep(0.01)

    @staticmethod
    def _cut(pair: list[asyncio.StreamWriter]) -> None:
        for link in pair:
            _reset(link)


def _reset(link: asyncio.StreamWriter) -> None:
    found = link.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):  # closed already
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST, not FIN
    link.transport.abort()
