"""Clients that begin at the same moment, each a process with a connection of its own.

Processes, not threads: 16 threads would measure Python's interpreter lock. The floors run through the same code.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier
from typing import Any, ParamSpec, TypeAlias

# Forked from a server process that has imported everything and opened nothing, so a start takes a few milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([f"{__package__}.cli"])
_START_TIMEOUT_S = 60

P = ParamSpec("P")
Prepared: TypeAlias = AbstractContextManager[Callable[[], int]]

_start: Barrier


def rate(prepare: Callable[P, Prepared], *arguments: P.args, **options: P.kwargs) -> float:
    """Return the rate of one client; see `rate_of`."""
    return rate_of(1, prepare, *arguments, **options)


def rate_of(clients: int, prepare: Callable[P, Prepared], *arguments: P.args, **options: P.kwargs) -> float:
    """Return the messages per second of `clients` processes together, from the common start to the last end.

    Each enters `prepare(...)`, which connects and yields the function to run, waits for the others, and calls that
    function, which returns how many messages it handled.
    """
    barrier = PROCESSES.Barrier(clients)
    with ProcessPoolExecutor(clients, PROCESSES, initializer=_join, initargs=(barrier,)) as pool:
        futures = [pool.submit(_client, prepare, *arguments, **options) for _ in range(clients)]
        ran = [future.result() for future in futures]
    return sum(count for count, _, _ in ran) / (max(end for *_, end in ran) - min(start for _, start, _ in ran))


def _join(barrier: Barrier) -> None:
    global _start
    _start = barrier


def _client(prepare: Callable[..., Prepared], *arguments: Any, **options: Any) -> tuple[int, float, float]:
    # All processes share the machine's monotonic clock, so readings can be compared.
    try:
        with prepare(*arguments, **options) as work:
            _start.wait(_START_TIMEOUT_S)
            start = time.monotonic()
            return work(), start, time.monotonic()
    except BaseException:
        _start.abort()  # the others would wait for it
        raise
