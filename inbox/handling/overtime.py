"""The time that a handler may take with a message; after that its batch is ended from outside.

A thread cannot be ended, nor can a task that does not await. So a thread of our own, which no handler can block, marks
the batch as one that cannot be committed, records the failure, and has the server end the session. Then the loop goes
on with another thread or task, and the handler is no longer waited for.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from traceback import StackSummary

from inbox.handling.frames import stack_of_task, stack_of_thread
from mailroom.errors import Coded


class TimedOut(Coded, TimeoutError):
    """A handler took longer than `timeout_s` with a message. `fatal=(TimeoutError,)` ends the message at once.

    `stack` is where the handler stood then.
    """

    code = "MR-handler-timed-out"
    stack: StackSummary | None = None


class HandlerTurn:
    """How long a handler has been at its message. One thread handles, another one asks whether its time is up."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._since: float | None = None
        self._thread = 0
        self._is_over: TimedOut | None = None

    def begin(self) -> None:
        """Begin with a message; raises `TimedOut` if the time of the previous one was up."""
        with self._lock:
            self.check()
            self._since, self._thread = self._monotonic(), threading.get_ident()

    def end(self) -> None:
        """End: no message is being handled now; raises `TimedOut` if its time was up."""
        with self._lock:
            self._since = None
            self.check()

    def left_s(self, timeout_s: float) -> float:
        """Return the seconds until the time of the message is up, which may have begun just now."""
        with self._lock:
            return timeout_s if self._since is None else self._since + timeout_s - self._monotonic()

    @contextlib.contextmanager
    def ending(self, timeout_s: float) -> Iterator[TimedOut | None]:
        """Give the error if the time is up: from now on the batch cannot be committed.

        A handler that returns within this context waits for its end.
        """
        with self._lock:
            if self._since is None or self._monotonic() - self._since < timeout_s or self._is_over is not None:
                yield None
                return
            self._is_over = TimedOut(f"timed out after {timeout_s:g} s")
            yield self._is_over

    @property
    def thread(self) -> int:
        """The thread in which the message is handled."""
        return self._thread

    def check(self) -> None:
        """Raise `TimedOut` if the time of its message was up."""
        if self._is_over is not None:
            raise self._is_over


@dataclass(frozen=True, slots=True)
class WatchedBatch:
    """A batch: where its handler stands, what ends it, and what says that it has been ended."""

    stack: Callable[[], StackSummary]
    end: Callable[[TimedOut], None]
    ended: Callable[[], None]


# D-workers-13: The server ends a handler that hangs.
class Overtime:
    """What ends the batches of one worker, in a thread of its own."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._watched: dict[HandlerTurn, WatchedBatch] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name=f"mailroom-overtime-{name}", daemon=True)
        self._thread.start()

    async def bound(
        self, running: Awaitable[None], turn: HandlerTurn, end: Callable[[TimedOut], None], *, cancel: bool = False
    ) -> "asyncio.Future[None] | None":
        """Wait until `running` is done, and raise its error; or until `end` has ended its batch, and return it.

        `end` is called in the thread of this object. What is returned goes on as long as it likes; with `cancel` it is
        told to end.
        """
        task, loop = asyncio.ensure_future(running), asyncio.get_running_loop()
        over = asyncio.Event()

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no loop waits
                loop.call_soon_threadsafe(over.set)

        def stack() -> StackSummary:
            return stack_of_task(task) if cancel else stack_of_thread(turn.thread)

        waiting = asyncio.ensure_future(over.wait())
        try:
            with self._watching(turn, WatchedBatch(stack, end, ended)):
                await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        finally:
            waiting.cancel()
        if task.done():
            task.result()
            return None
        if cancel:
            task.cancel()
        return task

    def close(self) -> None:
        """Watch no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @contextlib.contextmanager
    def _watching(self, turn: HandlerTurn, watched: WatchedBatch) -> Iterator[None]:
        with self._changed:
            self._watched[turn] = watched
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched.pop(turn, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                over = {turn: each for turn, each in self._watched.items() if turn.left_s(self._timeout_s) <= 0}
                if not over:
                    # A message that begins later has more time, so it need not be reported.
                    self._changed.wait(min((turn.left_s(self._timeout_s) for turn in self._watched), default=None))
            for turn, watched in over.items():
                with turn.ending(self._timeout_s) as error:
                    if error is None:
                        continue
                    error.stack = watched.stack()
                    watched.end(error)
                with self._changed:
                    self._watched.pop(turn, None)
                watched.ended()
