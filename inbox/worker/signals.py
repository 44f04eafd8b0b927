"""Signals: SIGTERM and SIGINT stop the workers of a process whose signals nobody else has in hand.

By `signal.signal`, not by the loop: what a server such as uvicorn has set is seen, and left as it is.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

NUMBERS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
FREE = (signal.SIG_DFL, signal.default_int_handler)


@dataclass(slots=True, eq=False)
class _Stopped:
    stop: Callable[[], None]
    told: bool = False


# Signals come to the process, and all its workers share them: the first takes them, the last gives them back.
_all: list[_Stopped] = []
_before: dict[int, Any] = {}


@contextlib.contextmanager
def stopping(stop: Callable[[], None], *, owned: bool = False) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop` while inside; a second SIGINT ends the process at once.

    In the main thread only, and only those of the two for which nobody has a handler; of a process that is our `owned`
    both. Afterwards they are as they were.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    one = _Stopped(stop)
    _all.append(one)
    for number in NUMBERS:
        before = signal.getsignal(number)
        # None: of a handler that is not Python's, and could not be set again.
        if before is not None and before is not _handle and (owned or before in FREE):
            _before[number] = signal.signal(number, _handle)
    try:
        yield
    finally:
        _all.remove(one)
        while not _all and _before:
            number, before = _before.popitem()
            if signal.getsignal(number) is _handle:  # else somebody has taken it over, who may give it back to ours
                signal.signal(number, before)


def _handle(number: int, _: FrameType | None) -> None:
    if not _all or (number == signal.SIGINT and all(each.told for each in _all)):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    for each in list(_all):
        each.told = True
        each.stop()
