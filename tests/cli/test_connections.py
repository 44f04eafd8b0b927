"""What strangers may hold of our servers: a head has a size and a time, and there is always room for one more."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mailroom.cli import asgi, connections
from tests.support.waiting import WITHIN_S, eventually_async

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Client]]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Read all of the request, and answer."""
    while (event := await receive())["type"] == "http.request" and event["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    """Serve, and yield what connects from an address and sends something."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(peer: str, sent: bytes = b"") -> Client:
        client = await asyncio.open_connection(*listener.getsockname(), local_addr=(peer, 0))
        writers.append(client[1])
        client[1].write(sent)
        return client

    server = asgi.asgi_server(app, "test", "webhook")
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        await eventually_async(lambda: server.started)
        yield connect
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        server.should_exit = server.force_exit = True
        await task


async def status(client: Client) -> bytes:
    """Return the status that comes, nothing if the connection is ended."""
    try:
        return (await asyncio.wait_for(client[0].readline(), WITHIN_S))[9:12]
    except ConnectionError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET[:-2], GET + GET[:-2]])
async def test_head_has_a_time(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    async with serving() as connect:
        client = await connect("127.0.0.1", sent)
        if sent.startswith(GET):
            assert await status(client) == b"204"
            await client[0].readuntil(b"\r\n\r\n")
        assert await status(client) == b""


async def test_rest_of_a_request_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 0.1)
    async with serving() as connect:
        client = await connect("127.0.0.1", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1")
        assert await status(client) == b""


async def test_head_has_a_size_whatever_parsers_are_installed() -> None:
    async with serving() as connect:
        client = await connect("127.0.0.1", b"GET / HTTP/1.1\r\nx: " + b"x" * connections.MOST_HEAD_BYTES)
        assert await status(client) == b"400"


async def test_connection_that_waits_longest_of_who_has_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 4)
    async with serving() as connect:
        other = await connect("127.0.0.3")
        clients = [await connect("127.0.0.2", sent) for sent in (b"", b"GET", b"")]
        for ended in clients[:2]:
            assert await status(await connect("127.0.0.4", GET)) == b"204"
            assert await status(ended) == b""
        for left in (other, clients[2]):
            left[1].write(GET)
            assert await status(left) == b"204"
