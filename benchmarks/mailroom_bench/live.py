"""Live: what a message costs while publisher, dispatcher and workers all run, over 20, 1,000 and 50,000 keys.

As in `flow` one process publishes by COPY in batches of 1,000, the dispatcher daemon delivers, and two Worker processes
with an empty handler reap in batches of up to 1,000. But the publisher stays at most 20,000 messages ahead of the
workers (a fifth of `--messages`, if that is less) and goes on past the end, so nothing is a backlog that is drained
when it has ended. The processes run, and as many messages are handled, before anything is counted.

Processor time is that of each process and of its sessions on the server, divided by the messages that it sent,
delivered or handled; `all` is their sum. The WAL is the server's, divided by the messages handled. The dispatcher and
the workers count their batches themselves, as listeners of `MessagesDelivered` and `BatchClaimed`: one call a batch.
Then again over 1,000 keys with two AsyncWorkers in the place of the Workers.

With `--against` another checkout does everything too, in turn for each number of keys.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import processor, sides
from .live_side import KEYS, ON_A_LOOP, PARTS, PROCESSES
from .measure import Line, Measurement

_run = partial(sides.measured, parts=tuple(PARTS))


def _lines(keys: int) -> Iterator[Line]:
    yield Line(f"rate, {keys:,} keys")
    yield Line(f"all, {keys:,} keys", "us", f"all, {KEYS[1]:,} keys" if keys != KEYS[1] else None)
    yield from (Line(f"{process}, {keys:,} keys", "us") for process in PROCESSES)
    yield Line(f"WAL, {keys:,} keys", "bytes")
    yield Line(f"rows per delivery, {keys:,} keys", "rows")
    yield Line(f"rows per claim, {keys:,} keys", "rows")


def _lines_on_a_loop() -> Iterator[Line]:
    for figure, unit in (("rate", "messages/s"), ("all", "us"), ("workers", "us"), ("workers' backends", "us")):
        yield Line(f"{figure}, {ON_A_LOOP}", unit, f"{figure}, {KEYS[1]:,} keys")


MEASUREMENT = Measurement(
    "live",
    "what a message costs while all processes run, by process",
    (*(line for keys in KEYS for line in _lines(keys)), *_lines_on_a_loop()),
    _run,
    processor.missing,
)


def against(directory: Path) -> Measurement:
    """Return the measurement with the figures of the checkout in `directory` beside ours."""
    return sides.beside(MEASUREMENT, _run, directory)
