"""Run sync handlers in threads, and pass their exceptions on to the loop that waits."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inbox.worker.batch import Ended, HandlerFailed
from mailroom.sql.operation import T

# A future refuses StopIteration, so its waiter would wait for ever; and it would pass CancelledError on as a
# cancellation of the waiting loop.
MISTAKEN = (StopIteration, concurrent.futures.CancelledError)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> T:
    """Run `work` in a thread and raise its exception here; one that is to end the process is raised as `Ended`."""

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
