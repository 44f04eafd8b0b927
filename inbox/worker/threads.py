"""Threads: where handlers run that are not async, and how what they raise comes back to the lane."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inbox.worker.batch import Ended, HandlerFailed
from mailroom.sql.operation import T

# A future does not take the one, and whoever waits for it waits for ever; the other it hands on as the cancellation of
# the lane that waits.
MISTAKEN = (StopIteration, concurrent.futures.CancelledError)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> T:
    """Do `work` in a thread, and raise here what it raises; what is to end the process as `Ended`."""

    def carried() -> T:
        try:
            return work(*arguments)
        except MISTAKEN as error:
            raise HandlerFailed(f"the handler raised {type(error).__name__}") from error
        except Exception:
            raise
        except BaseException as error:
            raise Ended(error) from error

    return await asyncio.get_running_loop().run_in_executor(threads, carried)
