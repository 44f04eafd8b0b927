"""Every await of the product's loops: a catalogue read from the source, and where a suspended task stands in it."""

import ast
import importlib
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

# The asyncio part of the dispatcher (lane, keeper, listener), of the lane that reads other nodes, and of the worker
# (loop, in-flight entries, sleep).
MODULES = (
    "dispatcher.daemon", "dispatcher.lanes.leading", "dispatcher.lanes.lane", "dispatcher.delivery.deliverer",
    "dispatcher.lanes.doorbell",
    "dispatcher.lanes.listening",
    "dispatcher.links.lane", "dispatcher.links.reading", "dispatcher.links.visit", "dispatcher.links.at_source.source",
    "dispatcher.links.receiving", "dispatcher.links.receiver", "dispatcher.links.reconcile",
    "mailroom.session.listener", "mailroom.session.disconnect",
    "inbox.worker.worker", "inbox.worker.loop", "inbox.worker.in_flight", "inbox.sessions.wakeup",
    "inbox.worker.dispatching",
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Await:
    """One await: the nth of its function, in these lines of its file."""

    name: str
    file: str
    first: int
    last: int


@lru_cache(maxsize=1)
def catalogue() -> tuple[Await, ...]:
    """Return all awaits, named like `await dispatcher.lanes.leading.Leading._keep #2`."""
    return tuple(found for module in MODULES for found in _of_module(module))


def _of_module(module: str) -> Iterator[Await]:
    file = importlib.import_module(module).__file__
    assert file is not None
    yield from _of_body(ast.parse(Path(file).read_text()), module, file)


def _of_body(node: ast.AST, path: str, file: str) -> Iterator[Await]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            inner = f"{path}.{child.name}"
            if isinstance(child, ast.AsyncFunctionDef) and not _is_generator(child):
                for nth, found in enumerate(_awaits(child), start=1):
                    yield Await(f"await {inner} #{nth}", file, *found)
            yield from _of_body(child, inner, file)
        else:
            yield from _of_body(child, path, file)


def _awaits(function: ast.AST) -> list[tuple[int, int]]:
    """Return the lines of the function's own awaits; several in one statement stand apart by their lines only."""
    lines: list[tuple[int, int]] = []
    for child in ast.iter_child_nodes(function):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.Await):
            lines.append((child.lineno, child.end_lineno or child.lineno))
        elif isinstance(child, ast.AsyncWith | ast.AsyncFor) and not _is_timeout(child):
            lines.append((child.lineno, child.body[0].lineno - 1))
        lines += _awaits(child)
    return sorted(set(lines))


def _is_timeout(node: ast.AsyncWith | ast.AsyncFor) -> bool:
    # It suspends nothing, neither where it begins nor where it ends.
    return isinstance(node, ast.AsyncWith) and ast.unparse(node.items[0].context_expr).startswith("asyncio.timeout(")


def _is_generator(function: ast.AsyncFunctionDef) -> bool:
    # What awaits inside an async generator cannot be seen from outside on Python 3.11.
    return any(isinstance(node, ast.Yield) for node in ast.walk(function))


@lru_cache(maxsize=1)
def by_line() -> dict[tuple[str, int], str]:
    """Return the names of all awaits by file and line. Reading them takes longer than most children live."""
    # Of awaits that share a line the later one in the catalogue counts, which is the inner one.
    return {(each.file, line): each.name for each in catalogue() for line in range(each.first, each.last + 1)}


def standing_at(coroutine: Any) -> list[str]:
    """Return the names of the awaits at which a suspended coroutine stands, from the outside in."""
    names = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if (name := by_line().get((frame.f_code.co_filename, frame.f_lineno))) is not None:
            names.append(name)
        coroutine = coroutine.cr_await
    return names


def stack(coroutine: Any) -> str:
    """Return where a suspended coroutine stands, whatever code it is in, from the outside in."""
    places = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return " > ".join(places)


def threads() -> list[str]:
    """Return where the threads of this process stand, from the outside in; who asks, too."""
    frames = sys._current_frames()
    return [
        " > ".join([f"thread {each.name}", *map(_place, traceback.extract_stack(frames[each.ident]))])
        for each in threading.enumerate() if each.ident in frames
    ]  # fmt: skip


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


class Driven:
    """Awaits a coroutine and calls `suspended` at each of its suspensions, which may say what to throw into it."""

    def __init__(self, coroutine: Any, suspended: Any) -> None:
        self._coroutine = coroutine
        self._suspended = suspended

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            error = self._suspended(self._coroutine)
            if error is not None:
                if hasattr(future, "_asyncio_future_blocking"):
                    future._asyncio_future_blocking = False  # nobody is going to wait for it
                continue
            try:
                value = yield future
            except BaseException as thrown:  # cancellation among them: it belongs to the coroutine
                error = thrown
