"""SIGTERM and SIGINT stop the workers of a process, unless another handler is installed for them.

This uses `signal.signal` and not the event loop, so that a handler of a server such as uvicorn is seen and kept.
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
    is_stopping: bool = False


# All workers of a process share its signals: the first one installs the handler, the last one restores the old one.
_all: list[_Stopped] = []
_before: dict[int, Any] = {}


@contextlib.contextmanager
def stopping(stop: Callable[[], None], *, owned: bool = False) -> Iterator[None]:
    """Make SIGTERM and SIGINT call `stop` inside this context; a second SIGINT ends the process at once.

    It has an effect in the main thread only, and only for a signal without a handler, unless we own the process
    (`owned`). Afterwards the old handlers are restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    one = _Stopped(stop)
    _all.append(one)
    for number in NUMBERS:
        before = signal.getsignal(number)
        # None is a handler that was not installed from Python, which we could not restore.
        if before is not None and before is not _handle and (owned or before in FREE):
            _before[number] = signal.signal(number, _handle)
    try:
        yield
    finally:
        _all.remove(one)
        while not _all and _before:
            number, before = _before.popitem()
            if signal.getsignal(number) is _handle:  # else another handler replaced ours, and may restore it later
                signal.signal(number, before)


def _handle(number: int, _: FrameType | None) -> None:
    if not _all or (number == signal.SIGINT and all(each.is_stopping for each in _all)):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    for each in list(_all):
        each.is_stopping = True
        each.stop()
