"""What ended tasks have raised."""

import asyncio
from collections.abc import Sequence


def first_error(ended: Sequence["asyncio.Task[None]"]) -> BaseException | None:
    """Return the first error of tasks that have ended, None if none has any."""
    # Of all of them: asyncio logs an error that nobody has taken, with its traceback, whenever it is collected.
    errors = [task.exception() for task in ended if not task.cancelled()]
    return next((error for error in errors if error is not None), None)
