"""Held: a repeatable-read snapshot stays open while ten times `--messages` flow, so no dead row can be removed.

The last tenth's rate is divided by the first tenth's. The publisher is at most 20,000 messages ahead of the workers. It
sends those before the first one is handled, so the first tenth begins that much later, and it goes on past the end:
both tenths publish, deliver and reap as many as they count. The same run without a snapshot shows which part of the
loss the snapshot does not cause.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from psycopg import IsolationLevel

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline, rate_between

AHEAD = 20_000


@contextmanager
def _held_snapshot(node: Node) -> Iterator[None]:
    with node.connect() as connection:
        connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        connection.execute("SELECT 1")
        yield
        connection.rollback()


def _tenths(setup: Setup, held: bool) -> tuple[float, float]:
    """Return the rates of the first and of the last tenth."""
    tenth = setup.messages
    ahead = min(AHEAD, tenth)
    with fresh_node(setup.dsn) as node, _held_snapshot(node) if held else nullcontext(), Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.work(2)
        pipeline.publish(10 * tenth + 2 * ahead, ahead=ahead)
        marks = [pipeline.wait_handled(ahead + messages) for messages in (0, tenth, 9 * tenth, 10 * tenth)]
    return rate_between(*marks[:2]), rate_between(*marks[2:])


def _run(setup: Setup) -> Values:
    first, last = _tenths(setup, held=True)
    first_control, last_control = _tenths(setup, held=False)
    return {
        "first tenth, held": first,
        "last tenth, held": last,
        "first tenth, no snapshot": first_control,
        "last tenth, no snapshot": last_control,
    }


MEASUREMENT = Measurement(
    "held",
    "flow while a snapshot is held open",
    (
        Line("first tenth, held"),
        Line("last tenth, held", baseline="first tenth, held", bar=Bar(ratio_at_least=0.85)),
        Line("first tenth, no snapshot"),
        Line("last tenth, no snapshot", baseline="first tenth, no snapshot"),
    ),
    _run,
)
