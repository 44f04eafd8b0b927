"""A thread for a client's blocking calls, which is left behind if one of them never returns."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

# Calls are given time-outs of seconds, and librdkafka keeps them but for a transaction whose coordinator it has lost.
# D-bridges-11: A thread that hangs in a call is left behind.
HUNG_S = 30.0
LOOK_S = 1.0


class Hung(Exception):
    """A call has not returned, and nothing can end it. Its thread is left behind."""


class CallThread:
    """Makes calls one after the other.

    A daemon thread and no pool of one: Python joins a pool's threads when it ends, so a call that never returns would
    keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._steps = 0
        self._is_left = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def seen(self) -> None:
        """Say, in the thread, that it goes on: what takes long consists of calls that each return soon."""
        self._steps += 1

    async def call(self, work: Callable[[], T]) -> T:
        """Return or raise what `work` does in the thread; raises `Hung` if nothing was seen of it for 30 s."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            if done.done():  # whoever asked has gone
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only where it is a T

        def make() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, result, error)

        # Looks are counted and no time: a process that was paused has not waited.
        steps, quiet_s = self._steps, 0.0
        self._calls.put(make)
        try:
            while not self._is_left:
                await asyncio.wait([done], timeout=LOOK_S)
                if done.done():
                    return done.result()
                quiet_s = quiet_s + LOOK_S if steps == self._steps else 0.0
                steps = self._steps
                self._is_left = quiet_s >= HUNG_S
            raise Hung
        finally:
            done.cancel()

    def end(self) -> None:
        """Have the thread end after the calls that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (make := self._calls.get()) is not None:
            self.seen()
            make()
            del make  # it holds the client, which ends with its last holder
