"""How the tasks of a worker end: cancelled until they do, and what they have raised."""

import asyncio
from collections.abc import Sequence
from typing import Any

CANCELLED_S = 1.0  # the time for a cancelled task to end before it is cancelled again


def first_error(ended: Sequence["asyncio.Task[None]"]) -> BaseException | None:
    """Return the first error of tasks that have ended, None if none has any."""
    # Of all of them: asyncio logs an error that nobody has taken, with its traceback, whenever it is collected.
    errors = [task.exception() for task in ended if not task.cancelled()]
    return next((error for error in errors if error is not None), None)


async def all_cancelled(tasks: Sequence["asyncio.Task[Any]"]) -> asyncio.CancelledError | None:
    """Cancel the tasks that still run, until all have ended; return the error if this was cancelled meanwhile."""
    cancelled = None
    # Repeatedly, since Python 3.11's wait_for swallows a cancellation that coincides with its result.
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=CANCELLED_S)
        except asyncio.CancelledError as again:
            cancelled = again
    return cancelled
