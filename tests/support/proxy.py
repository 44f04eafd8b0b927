"""A TCP proxy before the server, so that a test can take the network away: cut it, or let it swallow everything.

It also knows a COMMIT when it passes, and can lose it, its answer, or its client. And it can end a session right behind
a command that has gone well, as the server may: between the word that it is done and the word that it is ready again.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tests.support.port import free_port
from tests.support.waiting import WITHIN_S

T = TypeVar("T")

# A simple query, or the Parse of drivers that send no simple ones; and the server's word that it is done.
COMMIT = re.compile(rb"(?:Q.{4}|P.{4}[^\0]*\0)(?:close mailroom_batch; )?commit;?\0", re.S | re.I)
TERMINATED = b"E\0\0\0\x1fSFATAL\0VFATAL\0C57P01\0Mbye\0\0"
DONE = b"Z\0\0\0\x05I"  # the server is ready again, and in no transaction


class CommitFault(Enum):
    """What happens to a COMMIT that passes; in all cases but the first its client is cut off without an answer."""

    NONE = "passed on, as its answer is"
    CUT = "lost: the server sees the connection end"
    SWALLOW = "passed on; the connection ends when the answer comes"
    HOLD = "passed on only when told, while the client has long gone"


class Proxy:
    """Forwards connections to `host:port`; every method may be called from the test's thread."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._swallowed: bytes | None = None
        self._choose: Callable[[], CommitFault] = lambda: CommitFault.NONE
        self._held_s: float | None = None
        self._holds_answers = False
        self._released = asyncio.Event()
        self._ended = (b"", b"")
        self._streams: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[Any]] = set()
        self.port = free_port()  # nobody else gets it while the proxy is cut off
        self.swallowed = 0  # bytes that went into the black hole
        self.held = 0  # bytes of answers that were not passed on
        self.endings = 0  # sessions that are yet to be ended
        self.commits: list[CommitFault] = []  # what happened to each COMMIT so far
        self._listener: asyncio.Server
        self._do(self._listen())

    def cut(self) -> None:
        """Drop every connection and refuse new ones."""
        self._do(self._cut())

    def restore(self) -> None:
        """Take connections again, at the same port, and forward."""
        self._do(self._listen())

    def black_hole(self, only: bytes = b"") -> None:
        """Keep connections open and forward nothing more of those in whose beginning `only` occurs."""
        self._do(self._swallow(only))

    def hold_answers(self) -> None:
        """Pass on what clients say, and nothing of what they are answered, until they are cut off."""
        self._holds_answers = True

    def forward(self) -> None:
        """Swallow nothing any more; what was swallowed is lost, so only new connections work."""
        self._do(self._swallow(None))

    def at_commits(self, choose: Callable[[], CommitFault], held_s: float | None = None) -> None:
        """Ask `choose`, in the proxy's thread, what to do with each COMMIT; one held goes on by itself after `held_s`.

        One that is held does not pass before `release`, unless `held_s` is given.
        """
        self._choose, self._held_s = choose, held_s

    def at_next_commits(self, *faults: CommitFault) -> None:
        """Do this to the next COMMITs, one after another, and pass on all that follow."""
        left = iter(faults)
        self.at_commits(lambda: next(left, CommitFault.NONE))

    def release(self) -> None:
        """Pass on what is held."""
        self._loop.call_soon_threadsafe(self._released.set)

    def end_behind(self, command: bytes, times: int = 1, *, only: bytes = b"") -> None:
        """End the sessions in whose beginning `only` occurs right after `command`, the next times that one is done."""
        self._ended, self.endings = (command, only), times

    def close(self) -> None:
        """End the proxy."""
        self._do(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN_S)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._forward, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        self._holds_answers = False
        for socket in self._listener.sockets:
            self._loop.remove_reader(socket.fileno())  # a closed listener would leave open what it is accepting
        while asyncio.all_tasks() - {asyncio.current_task()}:  # what is being accepted has no pump yet
            for stream in self._streams:
                stream.transport.abort()
            for task in self._pumps:
                task.cancel()
            await asyncio.sleep(0)
        self._listener.close()

    async def _swallow(self, only: bytes | None) -> None:
        self._swallowed = only

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        self._streams.add(writer)
        try:
            with contextlib.suppress(OSError):
                back, forth = await asyncio.open_connection(*self._target)
                self._streams.add(forth)
                link = _Link(writer, forth)
                await asyncio.gather(self._requests(reader, link), self._answers(back, link))
        except asyncio.CancelledError:
            pass  # the task ends here; asyncio's own callback would report it
        finally:
            self._pumps.discard(task)
            for stream in (writer, *([forth] if "forth" in locals() else [])):
                self._streams.discard(stream)
                stream.transport.abort()

    async def _requests(self, source: asyncio.StreamReader, link: "_Link") -> None:
        while data := await source.read(65_536):
            if not self._swallows(data, link):
                if COMMIT.search(data) and not await self._commit(link):
                    break
                link.server.write(data)
                await link.server.drain()
        if link.fault is not CommitFault.HOLD:  # then the server has yet to answer
            link.abort()

    async def _answers(self, source: asyncio.StreamReader, link: "_Link") -> None:
        while data := await source.read(65_536):
            if self._holds_answers:
                self.held += len(data)
            elif not self._swallows(data, link):
                if link.fault is not CommitFault.NONE and DONE in data:
                    break
                if end := self._end(data, link):
                    link.client.write(data[:end] + TERMINATED)
                    break
                link.client.write(data)
                await link.client.drain()
        link.abort()

    def _swallows(self, data: bytes, link: "_Link") -> bool:
        if len(link.begun) < 4_096:
            link.begun += data
        swallows = self._swallowed is not None and self._swallowed in link.begun
        self.swallowed += len(data) if swallows else 0
        return swallows

    def _end(self, data: bytes, link: "_Link") -> int:
        """Return where the command has ended after which the session is to end; 0 if it goes on."""
        command, only = self._ended
        done = re.search(rb"C.{4}" + command + rb"[ \d]*\0", data, re.S) if self.endings else None
        if done is None or only not in link.begun:
            return 0
        self.endings -= 1
        return done.end()

    async def _commit(self, link: "_Link") -> bool:
        """Tell whether to pass the COMMIT on."""
        link.fault = self._choose()
        self.commits.append(link.fault)
        if link.fault is CommitFault.HOLD:
            link.client.transport.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), self._held_s)
        return link.fault is not CommitFault.CUT


class _Link:
    """A connection through the proxy: its two ends, how it began, and what happened to its last COMMIT."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.begun = bytearray()
        self.fault = CommitFault.NONE

    def abort(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


@contextlib.contextmanager
def proxied(dsn: str) -> Iterator[tuple[Proxy, str]]:
    """Give a proxy before the server of the URL `dsn`, and the URL that goes through it."""
    parts = urlsplit(dsn)
    proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5432)
    try:
        login = parts.netloc.rpartition("@")[0]
        netloc = f"{login}@127.0.0.1:{proxy.port}" if login else f"127.0.0.1:{proxy.port}"
        yield proxy, urlunsplit(parts._replace(netloc=netloc))
    finally:
        proxy.close()
