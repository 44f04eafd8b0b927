"""Giving up on a server that does not answer.

Cancelling the task is not enough: psycopg then asks the server to cancel the statement and waits for its answer, which
never comes if packets are dropped. Shutting the socket makes every wait on it fail at once.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Any

import psycopg

from mailroom.sql.operation import T


def disconnect(connection: psycopg.AsyncConnection) -> None:
    """Shut the connection's socket: every wait on it fails with `OperationalError`."""
    with (
        contextlib.suppress(OSError, psycopg.OperationalError),  # closed already
        socket.socket(fileno=os.dup(connection.fileno())) as copy,
    ):
        copy.shutdown(socket.SHUT_RDWR)


async def answered_within(connection: psycopg.AsyncConnection, work: Coroutine[Any, Any, T], within_s: float) -> T:
    """Return the result of `work` on the connection; after `within_s` seconds disconnect, which ends `work`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=within_s)
    finally:
        if not task.done():
            disconnect(connection)
            # It ends now. Await it also if the caller was cancelled, so that no task is left.
            await asyncio.gather(task, return_exceptions=True)
    return await task
