"""Run sync handlers in threads, and pass their exceptions on to the loop that waits."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

from inbox.handling.run import Ended, HandlerFailed
from mailroom.sql.operation import T

# A future refuses StopIteration, so its waiter would wait for ever; and it would pass CancelledError on as a
# cancellation of the waiting loop.
MISTAKEN = (StopIteration, concurrent.futures.CancelledError)


Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class Threads(Executor):
    """As many threads as are busy at once; one that is idle is used again.

    Leaving the context waits for all except those that were given up (`give_up`), whose work may never return. Python's
    own executor would wait for these too, at the latest when the process ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Job | None]] = []
        self._running: dict[int | None, threading.Thread] = {}
        self._started = 0
        self._is_closed = False

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Run `work` in a thread; return a future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            queue = self._idle.pop() if self._idle else self._start()
        queue.put((future, partial(work, *arguments, **named)))
        return future

    def give_up(self, thread: int) -> None:
        """Wait no longer for the thread with this identifier."""
        with self._lock:
            self._running.pop(thread, None)

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            running = list(self._running.values())
        for queue in idle:
            queue.put(None)
        for thread in running:
            thread.join()

    def _start(self) -> "SimpleQueue[Job | None]":
        queue: SimpleQueue[Job | None] = SimpleQueue()
        self._started += 1
        thread = threading.Thread(target=self._run, args=(queue,), name=f"{self._name}_{self._started}", daemon=True)
        thread.start()
        self._running[thread.ident] = thread
        return queue

    def _run(self, queue: "SimpleQueue[Job | None]") -> None:
        while (job := queue.get()) is not None:
            tell = _done(*job)
            # Before the result is set, so that the waiter finds an idle thread and starts no other one.
            with self._lock:
                if not self._is_closed:
                    self._idle.append(queue)
            tell()
            del job, tell  # with all that they refer to
            if self._is_closed and not queue.qsize():
                return


def _done(future: Future[Any], work: Callable[[], Any]) -> Callable[[], None]:
    """Run `work`, and return what tells the waiter."""
    if not future.set_running_or_notify_cancel():
        return lambda: None
    try:
        return partial(future.set_result, work())
    except BaseException as error:
        return partial(future.set_exception, error)


async def in_thread(threads: Executor, work: Callable[..., T], *arguments: object) -> T:
    """Run `work` in a thread and raise its exception here; one that is to end the process is raised as `Ended`."""

    def carried() -> T:
        try:
            return work(*arguments)
        except MISTAKEN as error:
            raise HandlerFailed(
                f"the handler raised {type(error).__name__}", code="MR-handler-raised-signal"
            ) from error
        except Exception:
            raise
        except BaseException as error:
            raise Ended(error) from error

    return await asyncio.get_running_loop().run_in_executor(threads, carried)
