"""Held: a repeatable-read snapshot stays open while ten times `--messages` flow, so no dead row can be removed.

The last tenth's rate is divided by the first tenth's, and so is its cost: the processor time of all processes. The
publisher is at most 20,000 messages ahead of the workers. It sends those before the first one is handled, so the first
tenth begins that much later, and it goes on past the end: both tenths publish, deliver and reap as many as they count.
The same run without a snapshot shows which part of the loss the snapshot does not cause. `log`: the inbox reads a log.
`--messages 1000000` is the run of 10,000,000.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from psycopg import IsolationLevel

from . import processor
from .log_node import reading_node
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node
from .pipeline import AHEAD, Pipeline, rate_between
from .processor import spent_us

RUNS = {"held": ("by key", True), "no snapshot": ("by key", False), "held, log": ("log", True)}
ROLES = ("mailroom bench", "mailroom dispatcher", "mailroom worker")


@contextmanager
def _held_snapshot(node: Node) -> Iterator[None]:
    with node.connect() as connection:
        connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        connection.execute("SELECT 1")
        yield
        connection.rollback()


def _tenths(setup: Setup, kind: str, *, held: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the rate and the cost of the first and of the last tenth."""
    tenth = setup.messages
    ahead = min(AHEAD, tenth)
    with ExitStack() as stack:
        node, _ = stack.enter_context(reading_node(setup, kind))
        if held:
            stack.enter_context(_held_snapshot(node))
        pipeline = stack.enter_context(Pipeline(node))
        pipeline.dispatch()
        pipeline.work(2)
        pipeline.publish(10 * tenth + 2 * ahead, ahead=ahead)
        return _measured(pipeline, ahead, tenth), _measured(pipeline, ahead + 9 * tenth, tenth)


def _measured(pipeline: Pipeline, begin: int, messages: int) -> tuple[float, float]:
    """Return the rate and the cost in microseconds of that many messages."""
    before = pipeline.wait_handled(begin)
    used, counted_from = pipeline.used_s(*ROLES), pipeline.handled
    after = pipeline.wait_handled(begin + messages)
    return rate_between(before, after), spent_us(used, pipeline.used_s(*ROLES), after.handled - counted_from)


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for name, (kind, held) in RUNS.items():
        tenths = _tenths(setup, kind, held=held)
        for tenth, (rate, cost) in zip(("first", "last"), tenths, strict=True):
            values |= {f"{tenth} tenth, {name}": rate, f"cost of the {tenth} tenth, {name}": cost}
    return values


def _lines(name: str, rate: Bar | None = None, cost: Bar | None = None) -> tuple[Line, ...]:
    return (
        Line(f"first tenth, {name}"),
        Line(f"last tenth, {name}", baseline=f"first tenth, {name}", bar=rate),
        Line(f"cost of the first tenth, {name}", "us"),
        Line(f"cost of the last tenth, {name}", "us", f"cost of the first tenth, {name}", cost),
    )


MEASUREMENT = Measurement(
    "held",
    "flow while a snapshot is held open",
    (
        *_lines("held", Bar(ratio_at_least=0.95), Bar(ratio_at_most=1.05)),
        *_lines("no snapshot"),
        *_lines("held, log", cost=Bar(ratio_at_most=1.05)),
    ),
    _run,
    processor.missing,
)
