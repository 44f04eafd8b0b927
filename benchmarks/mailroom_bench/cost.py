"""Cost: the microseconds of processor time that a message takes, by process.

Rates depend on what else a machine does; processor time does so much less. Clients and server processes are read apart.
Bare statements run in the same session as ours and in turn with them: an INSERT of the same rows, ready, into the
outbox's columns and key, and a DELETE .. RETURNING. `and commit` is a transaction for each; claims and deliveries
include theirs. Deliveries of 1, 10, 100 and 10,000 rows are given per message.

With `--against` another checkout does everything too, in turn for each part.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import processor, sides
from .measure import Bar, Line, Measurement

METERED = "metered"  # beside the same without metrics, and not beside another checkout, which may have none
UNMETERED = ("bulk, worker", "bulk, all")
PARTS = ("bulk", METERED, "send", "deliver", "claim")
_run = partial(sides.measured, parts=PARTS, alone=(METERED,))


def _pair(
    name: str, baseline: str | None = None, backend: Bar | None = None, client: Bar | None = None
) -> Iterator[Line]:
    for process, bar in (("backend", backend), ("client", client)):
        yield Line(f"{name}, {process}", "us", baseline and f"{baseline}, {process}", bar)


_BULK = (
    "publisher",
    "publisher's backend",
    "dispatcher",
    "dispatcher's backends",
    "worker",
    "worker's backends",
    "all",
)

MEASUREMENT = Measurement(
    "cost",
    "the processor time of a message, by process",
    (
        *(Line(f"bulk, {process}", "us") for process in _BULK),
        Line("bulk with metrics, worker", "us", UNMETERED[0]),
        Line("bulk with metrics, all", "us", UNMETERED[1], Bar(ratio_at_most=1.03)),
        *_pair("INSERT"),
        *_pair("send", "INSERT", Bar(ratio_at_most=2.0), Bar(ratio_at_most=2.6)),
        *_pair("INSERT and commit"),
        *_pair("send and commit", "INSERT and commit", Bar(ratio_at_most=1.5), Bar(ratio_at_most=1.7)),
        *(line for rows in ("1", "10", "100", "10,000") for line in _pair(f"deliver {rows}")),
        *_pair("DELETE of 1"),
        *_pair("claim of 1", "DELETE of 1"),
        *_pair("DELETE of 1,000"),
        *_pair("claim of 1,000", "DELETE of 1,000"),
    ),
    _run,
    processor.missing,
)


def against(directory: Path) -> Measurement:
    """Return the measurement with the figures of the checkout in `directory` beside ours."""
    metered = [line.name for line in MEASUREMENT.lines if line.baseline in UNMETERED]
    return sides.beside(MEASUREMENT, _run, directory, metered)
