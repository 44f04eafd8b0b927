"""Requests as a checker sees them. Each line that is wrong on purpose is marked; a mark anywhere else is an error."""

from typing import Any, assert_type

import psycopg

from inbox import AsyncRequests, Requests
from tests.typing.topics import Reserve, Reserved, reserve


def ask(requests: Requests, conn: psycopg.Connection[Any]) -> None:
    assert_type(requests.ask(reserve, Reserve("teapot", 2), timeout_s=5), Reserved)
    assert_type(requests.ask("stock.reserve", {"item": "teapot"}, timeout_s=5), Any)
    assert_type(requests.send(conn, reserve, Reserve("teapot", 2), key=42).wait(5), Reserved)
    shelf = 0
    shelf = requests.ask(reserve, Reserve("teapot", shelf), timeout_s=5)  # type: ignore[assignment]
    requests.ask(reserve, {"item": "teapot"}, timeout_s=5)  # type: ignore[misc]
    requests.ask(reserve, Reserve("teapot", 2))  # type: ignore[call-overload]


async def ask_async(requests: AsyncRequests, conn: psycopg.AsyncConnection[Any]) -> None:
    assert_type(await requests.ask(reserve, Reserve("teapot", 2), timeout_s=5), Reserved)
    pending = await requests.send(conn, reserve, Reserve("teapot", 2))
    assert_type(await pending.wait(5), Reserved)
    await requests.ask(reserve, 7, timeout_s=5)  # type: ignore[misc]
