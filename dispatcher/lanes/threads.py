"""A thread for each call that may not come back: a name server that hangs holds up its own name only.

asyncio has at most 32 threads for all that a process does in threads, on two cores six, and drivers of databases and
brokers look up names there. One name whose server does not answer holds a thread for a minute.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class ThreadEach(ThreadPoolExecutor):
    """Has no bound, so callers have one. The process ends without waiting for any of them.

    It is a `ThreadPoolExecutor` since asyncio takes no other one as its own; the pool stays empty.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call `fn` in a thread; return a future, which cannot be cancelled."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=_call, args=(future, lambda: fn(*args, **kwargs)), daemon=True).start()
        return future


def _call(future: "Future[Any]", work: Callable[[], object]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
