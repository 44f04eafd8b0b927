"""Giving up on a database that does not answer.

Cancelling is not enough: psycopg answers a cancelled task by asking the server to cancel the statement, and then waits
for an answer that a black hole never gives. A socket that is shut makes every wait on it fail at once.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Any

import psycopg

from mailroom.sql.operation import T


def sever(connection: psycopg.AsyncConnection) -> None:
    """Shut the connection's socket: whoever waits on it gets an `OperationalError`."""
    with (
        contextlib.suppress(OSError, psycopg.OperationalError),  # closed already
        socket.socket(fileno=os.dup(connection.fileno())) as copy,
    ):
        copy.shutdown(socket.SHUT_RDWR)


async def answered(connection: psycopg.AsyncConnection, work: Coroutine[Any, Any, T], within_s: float) -> T:
    """Return what `work` on the connection gives; not done within so many seconds, sever it, which ends `work`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=within_s)
    finally:
        if not task.done():
            sever(connection)
            # It ends now; awaited here, so that it is not left behind when the caller was cancelled.
            await asyncio.gather(task, return_exceptions=True)
    return await task
