"""A receiver of webhooks of the tests' own, which speaks HTTP and answers as it is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Posted:
    """One request; names of headers are in lower case."""

    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """The message's id."""
        return self.headers["webhook-id"]


# A status and headers; None breaks the connection off.
Told = tuple[int, dict[str, str]] | None


async def well(posted: Posted) -> Told:
    """Take everything."""
    return 204, {}


@dataclass
class Receiver:
    """What was posted; `answer` says what is answered."""

    port: int = 0
    posted: list[Posted] = field(default_factory=list)
    answer: Callable[[Posted], Awaitable[Told]] = well

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/hooks"

    def answers(self, *told: Told) -> None:
        """Answer these first, and then take everything."""
        left = list(told)

        async def answer(posted: Posted) -> Told:
            return left.pop(0) if left else (204, {})

        self.answer = answer

    def bodies(self) -> list[bytes]:
        """Return the bodies, in the order in which they came."""
        return [posted.body for posted in self.posted]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *lines = head.decode("ascii").split("\r\n")[:-2]
                headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
                posted = Posted(line.split(" ")[1], headers, await reader.readexactly(int(headers["content-length"])))
                self.posted.append(posted)
                told = await self.answer(posted)
                if told is None:
                    return
                status, more = told
                answered = {"content-length": "0"} | more
                text = "".join(f"{name}: {value}\r\n" for name, value in answered.items())
                writer.write(f"HTTP/1.1 {status} Told\r\n{text}\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Listen on a port of its own in this block."""
    receiver, tasks = Receiver(), set[asyncio.Task[None]]()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(receiver.serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
