"""The stack frames of an exception as the log shows them: files, lines and code, but no values."""

import asyncio
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

# The modules that call handlers; frames up to and including theirs are left out.
CALLERS = (
    *("handling/arguments.py", "handling/batch.py", "sessions/transactions.py"),
    *("worker/connecting.py", "worker/loop.py", "worker/worker.py"),
)
OURS = tuple(str(Path(__file__).parents[1] / name) for name in CALLERS)
CAUSES = 5  # logged for one error; a longer chain is truncated


def stack_of_thread(ident: int) -> traceback.StackSummary:
    """Return where a thread stands; nothing if it has ended."""
    frame = sys._current_frames().get(ident)
    return traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()


def stack_of_task(task: "asyncio.Future[Any]") -> traceback.StackSummary:
    """Return where the coroutine of a task stands. `Task.get_stack` does not go into what that awaits."""
    places: list[tuple[FrameType, int]] = []
    each: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    while each is not None:
        frame = getattr(each, "cr_frame", None) or getattr(each, "gi_frame", None) or getattr(each, "ag_frame", None)
        if frame is not None:
            places.append((frame, frame.f_lineno))
        each = getattr(each, "cr_await", None) or getattr(each, "gi_yieldfrom", None) or getattr(each, "ag_await", None)
    return traceback.StackSummary.extract(iter(places))


def frames(error: BaseException) -> str:
    """Return the frames of an error, from the handler on, and those of its causes, as lines to append to a log text.

    Errors are shown by their class only, since their texts may contain values of a message.
    """
    text = ""
    for depth, each in enumerate(_chain(error)):
        stack = getattr(each, "stack", None) or traceback.extract_tb(each.__traceback__)
        ours = [nth for nth, frame in enumerate(stack) if frame.filename in OURS]
        del stack[: max(ours, default=-1) + 1]
        if depth:
            text += f"\ncaused by {type(each).__name__}"
        text += "".join(f"\n{line.rstrip()}" for line in stack.format())
    return text


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain and len(chain) < CAUSES:
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return chain
