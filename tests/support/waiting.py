"""Waiting for what another process, task or session does: by looking at it again and again, never by a plain sleep."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

# How long to wait for what comes unless something is wrong, on a machine that has other things to do as well. A broken
# rule shows as a wait in vain, so those who break rules on purpose may set less.
WITHIN_S = float(os.environ.get("MAILROOM_TEST_WITHIN_S", "60"))
_POLL_S = 0.005

T = TypeVar("T")


def eventually(predicate: Callable[[], T], timeout_s: float = WITHIN_S) -> T:
    """Call `predicate` until it returns something true, and return that; fail the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := predicate()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {predicate} returned {found!r}"
        time.sleep(_POLL_S)
    return found


async def eventually_async(predicate: Callable[[], T], timeout_s: float = WITHIN_S) -> T:
    """`eventually`, with the tasks of this loop running on."""
    deadline = time.monotonic() + timeout_s
    while not (found := predicate()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {predicate} returned {found!r}"
        await asyncio.sleep(_POLL_S)
    return found


def wait_until_blocked(observer: psycopg.Connection[Any], pid: int, timeout_s: float = WITHIN_S) -> list[int]:
    """Return the backends that backend `pid` waits for, once it waits for a lock; a prepared transaction counts as 0.

    `observer` is a connection of its own; whether it is in a transaction does not matter. Fail the test if `pid` is
    not a backend, or does not come to wait within `timeout_s`.
    """

    def blockers() -> list[int]:
        with observer.cursor(row_factory=tuple_row) as cursor:
            # Not pg_stat_activity: a transaction sees one state of it for as long as it lasts.
            cursor.execute("SELECT pg_blocking_pids(%s), EXISTS (SELECT FROM pg_stat_get_activity(%s))", [pid, pid])
            [(found, alive)] = cursor.fetchall()
        assert alive, f"backend {pid} is gone"
        return list(found)

    return eventually(blockers, timeout_s)


def end(session: psycopg.Connection[Any], observer: psycopg.Connection[Any], timeout_s: float = WITHIN_S) -> None:
    """Close `session` as one that dies, and return once the server has let go of what it held: it hears of it late.

    `observer` is a connection of its own. Fail the test if the backend is there after `timeout_s`.
    """
    pid = session.info.backend_pid
    session.close()

    def is_gone() -> bool:
        return observer.execute("SELECT FROM pg_stat_get_activity(%s)", [pid]).rowcount == 0

    eventually(is_gone, timeout_s)
