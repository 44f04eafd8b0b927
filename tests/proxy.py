"""A TCP proxy before the server, so that a test can take the network away: cut it, or let it swallow everything."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")


class Proxy:
    """Forwards connections to `host:port`; every method may be called from the test's thread."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._swallowed: bytes | None = None
        self._streams: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[Any]] = set()
        self.port = 0
        self.swallowed = 0  # bytes that went into the black hole
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

    def forward(self) -> None:
        """Swallow nothing any more; what was swallowed is lost, so only new connections work."""
        self._do(self._swallow(None))

    def close(self) -> None:
        """End the proxy."""
        self._do(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._forward, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        self._listener.close()
        for stream in self._streams:
            stream.transport.abort()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

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
                begun = bytearray()
                await asyncio.gather(self._pump(reader, forth, begun), self._pump(back, writer, begun))
        except asyncio.CancelledError:
            pass  # the task ends here; asyncio's own callback would report it
        finally:
            self._pumps.discard(task)
            for stream in (writer, *([forth] if "forth" in locals() else [])):
                self._streams.discard(stream)
                stream.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, begun: bytearray) -> None:
        while data := await source.read(65_536):
            if len(begun) < 4_096:
                begun += data
            if self._swallowed is not None and self._swallowed in begun:
                self.swallowed += len(data)
            else:
                target.write(data)
                await target.drain()
        target.transport.abort()


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
