"""What commands print: tables and lines for people, JSON for programs."""

import base64
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from mailroom.cli.call import Call

T = TypeVar("T")
LEAST_WIDTH = 20
LONG_WORD = 40  # a longer one may be broken
GAP = 2  # between two columns


def say(text: str) -> None:
    """Print a line for people on stdout; on a terminal it is wrapped to its width."""
    say_whole(wrapped(text))


def say_whole(text: str) -> None:
    """Print lines on stdout as they are: a value, or an id that is copied or piped on."""
    click.echo(printable(text))


def note(text: str) -> None:
    """Print a line for people on stderr, beside output that may be piped on."""
    click.echo(printable(wrapped(text)), err=True)


def wrapped(text: str) -> str:
    """Return `text` wrapped to the width of the terminal; as it is if no terminal shows it."""
    width = screen_width()
    return text if width is None else "\n".join(_broken(text, max(width, LEAST_WIDTH)))


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Print lines of name and text; on a terminal they are wrapped to its width."""
    width = screen_width()
    indent = max(len(name) for name, _ in pairs) + 2
    if width is not None:
        # A long name, such as that of a node, leaves room for its text.
        indent = min(indent, width // 2)
    for name, text in pairs:
        if len(name) + 2 > indent:
            say(name)
        heading = "" if len(name) + 2 > indent else name
        lines = [text] if width is None else _broken(text, max(width - indent, LEAST_WIDTH))
        say_whole(heading.ljust(indent) + ("\n" + " " * indent).join(lines))


def table(columns: Sequence[str], rows: Iterable[Iterable[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table; the columns named in `numbers` are right-aligned.

    On a terminal it is fitted to the width. If that is too small, each row becomes a block with a line per column.
    """
    cells = [[printable(shown(cell)) for cell in row] for row in rows]
    whole, least = [], []
    for nth, column in enumerate(columns):
        texts = [row[nth] for row in cells]
        whole.append(max(cell_len(line) for text in (column, *texts) for line in text.splitlines() or [""]))
        # Numbers, durations and words of usual length (keys, ids, times) are not broken.
        pieces = [*column.split(), *(texts if column in numbers else " ".join(texts).split())]
        least.append(max(min(cell_len(piece), LONG_WORD) for piece in pieces))
    gaps = GAP * (len(columns) - 1)
    screen = screen_width() or sum(whole) + gaps
    widths = _fitted(whole, least, screen - gaps)
    if widths is None:
        for nth, row in enumerate(cells):
            if nth:
                say("")
            facts(list(zip(columns, row, strict=True)))
        return
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(column, justify="right" if column in numbers else "left", overflow="fold", width=width)
    for row in cells:
        grid.add_row(*map(Text, row))  # as Text: user input is not markup
    Console(highlight=False, width=screen).print(grid)


def print_listing(
    found: Sequence[T],
    columns: Sequence[str],
    row: Callable[[T], Iterable[object]],
    *,
    none: str,
    json: bool,
    entry: Callable[[T], object] = lambda each: each,
    numbers: Sequence[str] = (),
) -> None:
    """Print what was found: with `json` as one document, else as a table, or what to say if there is `none`.

    `row` makes the cells of one that was found, and `entry` its part of the document.
    """
    if json:
        document([entry(each) for each in found])
    elif found:
        table(columns, map(row, found), numbers=numbers)
    else:
        say(none)


def _fitted(whole: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Return column widths that fit the room, narrowing the widest first; None if nothing fits."""
    widths = list(whole)
    while sum(widths) > room:
        wide = [nth for nth, width in enumerate(widths) if width > least[nth]]
        if not wide:
            return None
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def screen_width() -> int | None:
    """Return the width of the screen, from $COLUMNS or the terminal; None if output is not shown on one."""
    # None if the caller closed it.
    if (sys.stdout is not None and sys.stdout.isatty()) or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def _broken(text: str, width: int) -> list[str]:
    lines = Text(text).wrap(Console(width=width), width, overflow="fold")
    return [line.plain.rstrip() for line in lines] or [""]


def document(value: object) -> None:
    """Print one JSON document on one line."""
    click.echo(json_text(value))


def json_text(value: object, *, ascii_only: bool = True) -> str:
    """Return `value` as JSON on one line."""
    return json.dumps(as_json(value), ensure_ascii=ascii_only, allow_nan=False)


def as_json(value: object) -> Any:
    """Return `value` in types of JSON: bytes become base64, anything else without a form becomes text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case datetime() | date():
            return value.isoformat()
        case UUID() | Decimal():
            return str(value)
        case list() | tuple():
            return [as_json(item) for item in value]
        case dict():
            return {_name(name): as_json(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _name(key: object) -> str:
    return key if isinstance(key, str) else str(as_json(key))


def shown(cell: object) -> str:
    """Format a table cell for people."""
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case timedelta():
            return duration(cell.total_seconds())
        case datetime():
            with suppress(OverflowError, ValueError):  # west of UTC, the year 1 begins before Python's time
                cell = cell.astimezone()
            return cell.isoformat(" ", "seconds")
    return str(cell)


def duration(seconds: float) -> str:
    """Return a duration to two or three digits: 0.25 s, 4 min, 3 h, 12 days."""
    for limit, divisor, unit in ((10, 1, "s"), (120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.{2 if limit == 10 else 0}f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def size(octets: int) -> str:
    """Return a size on disk: 0.5 MiB, 1,234.5 MiB."""
    return f"{octets / 2**20:,.1f} MiB"


def printable(text: str) -> str:
    """Escape terminal control characters; line ends and tabs stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """Return `text` on one line without terminal control characters."""
    return printable(" ".join(text.split()))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class Bar:
    """A progress bar on stderr, there only if that is a terminal and people read the output."""

    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, messages=0)

    def show(self, messages: int, done: int) -> None:
        """Show how many messages have been worked on, and how much of the total is done."""
        self._progress.update(self._task, completed=done, messages=messages)


@contextmanager
def progress_bar(what: str, total: int | None = None, *, of: str = "messages") -> Iterator[Bar]:
    """Show a bar while the block runs; `total` is how much there is to do, in bytes or in messages (or `of`)."""
    count = TextColumn("{task.fields[messages]:,} " + f"{of} {what}")
    with _progress(count, BarColumn(), TaskProgressColumn()) as progress:
        yield Bar(progress, total)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on stderr, if it is a terminal, that the block works on one long statement, and for how long."""
    with _progress(TextColumn(what)) as progress:
        progress.add_task("", total=None)
        yield


@contextmanager
def _progress(*columns: ProgressColumn) -> Iterator[Progress]:
    console = Console(stderr=True)
    call = context.find_object(Call) if (context := click.get_current_context(silent=True)) else None
    is_hidden = not console.is_terminal or (call is not None and call.json)
    progress = Progress(
        SpinnerColumn(), *columns, TimeElapsedColumn(), console=console, transient=True, disable=is_hidden
    )
    # A disabled one is not entered, since rich 13.0 prints a newline for it.
    with nullcontext() if progress.disable else progress:
        yield progress
