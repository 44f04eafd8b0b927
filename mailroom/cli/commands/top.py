"""`mailroom top`."""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import psycopg
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mailroom.cli.call import Call, pass_call
from mailroom.cli.failures import drop_output
from mailroom.cli.output import json_text, screen_width
from mailroom.cli.parameters import seconds_above_0
from mailroom.cli.screen import WRONG, screen
from mailroom.errors import ConnectionFailed
from mailroom.metrics.look import Look, Watch
from mailroom.session import settings
from mailroom.session.repeats import cause
from mailroom.sql.pooler import is_pooled
from mailroom.sql.runner import run

INTERVAL_S = 2.0
TOP_SESSION = settings.SESSION | {"statement_timeout": "10s", "lock_timeout": "500ms"}
WIDTH, HEIGHT = 120, 100  # where nothing says how large the screen is
ENDS_BY = "q ends"


@contextmanager
def watching(call: Call) -> Iterator[Callable[[], Look]]:
    """Yield what looks at the node, over a session that only reads."""
    with call.connection("top", TOP_SESSION, autocommit=True) as connection:
        if not is_pooled(connection):
            connection.execute(settings.READ_ONLY)
        watch = Watch(call.schema)
        yield lambda: run(connection, watch.looking())


@click.command()
@click.option(
    "--interval-s", type=seconds_above_0, default=INTERVAL_S, show_default=True, help="How often to look at the node."
)
@click.option("--once", is_flag=True, help="Print what two looks tell, one interval apart, and end.")
@pass_call
def top(call: Call, interval_s: float, once: bool) -> None:
    """Show a node live: rates, what waits, what is in trouble, who works, and what failed last.

    What is in trouble comes first, each with the command that helps: the doctor's findings, as far as an auditor can
    see them, and sooner than the doctor tells them. Then the inboxes: messages that wait (an estimate), how long the
    oldest has waited for a worker, rates, and what is paused. Then keys that are parked, paused or failing, batches
    that workers have in hand, and the last failed attempts, with the class of the error and never its text.

    Rates are what the server counts as inserted and deleted, rolled back or not, so no process needs to run with
    --metrics. They take a second to show. Ages, keys and findings are read every 5 s, on large nodes more rarely: that
    costs a session at most a hundredth of its time. The session only reads, and needs the role of an auditor.

    With --json each look is one object on a line. Keys: q or Ctrl-C ends; any other one looks at once.

    \b
    Examples:
      mailroom top
      mailroom top --interval-s 1
      mailroom top --once
      mailroom top --json | jq -c '[.at, .reaped_per_s, .troubles[].what]'
    """
    try:
        if once:
            with watching(call) as look:
                look()
                time.sleep(interval_s)
                _print(call, look(), interval_s)
        elif call.json:
            with watching(call) as look:
                while True:
                    _print(call, look(), interval_s)
                    time.sleep(interval_s)
        elif sys.stdout.isatty():
            _live(call, interval_s)
        else:
            raise click.UsageError("A live screen needs a terminal. Give --once, or --json for a line per look.")
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        drop_output()


def _print(call: Call, look: Look, interval_s: float) -> None:
    if call.json:
        text = json_text(look)
    else:
        # A pipe has no height, and a terminal scrolls.
        lines = screen(look, screen_width() or WIDTH, HEIGHT, interval_s=interval_s)
        text = "\n".join(line.plain for line in lines)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _live(call: Call, interval_s: float) -> None:
    """Draw looks until the user ends it. An outage of the database is drawn too, and it connects anew."""
    console = Console(highlight=False)
    lines: list[Text] = []

    def draw(live: Live, *above: Text) -> None:
        height = shutil.get_terminal_size().lines
        live.update(Group(*above, *lines[: height - len(above)]), refresh=True)

    with call.connection("top", TOP_SESSION):
        pass  # what is wrong with the call is an error, and no screen
    with Live(console=console, screen=True, auto_refresh=False) as live, _keyboard() as ends:
        while True:
            try:
                with watching(call) as look:
                    while True:
                        found, size = look(), shutil.get_terminal_size()
                        lines = screen(found, size.columns, size.lines, interval_s=interval_s, ends_by=ENDS_BY)
                        draw(live)
                        if ends(interval_s):
                            return
            except (psycopg.Error, ConnectionFailed) as error:
                draw(live, Text(f"! not answered ({cause(error)}), trying again; {ENDS_BY}", WRONG, no_wrap=True))
                if ends(interval_s):
                    return


@contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Yield what waits for a key for that many seconds, and returns whether it ends the screen."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return bool(ready) and os.read(keyboard, 64) in (b"q", b"Q", b"\x04", b"")

    try:
        tty.setcbreak(keyboard)  # one key at a time, and Ctrl-C goes on to interrupt
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
