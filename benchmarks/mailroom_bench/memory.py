"""Memory: ten times `--messages` flow over `--messages` keys; the memory of the processes must not grow.

The resident memory of the dispatcher and of two workers is read when a tenth has been handled and when nine tenths
have, with the publisher still going, and compared: the largest growth of the three counts.
"""

from importlib.util import find_spec

from .measure import Bar, Line, Measurement, Setup, Values
from .node import fresh_node
from .pipeline import AHEAD, Pipeline

MIB = 1024 * 1024


def resident_mib(pipeline: Pipeline) -> list[float]:
    """Return the resident memory of each process: the dispatcher first, then the workers."""
    # Not at the top: only this measurement needs the package, and only developers are sure to have it.
    from psutil import Process

    processes = [pipeline.dispatcher, *pipeline.workers]
    return [Process(process.pid).memory_info().rss / MIB for process in processes if process is not None]


def _run(setup: Setup) -> Values:
    total = 10 * setup.messages
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.work(2)
        pipeline.publish(total + AHEAD, keys=setup.messages, ahead=AHEAD)
        pipeline.wait_handled(total // 10)
        early = resident_mib(pipeline)
        pipeline.wait_handled(total)
        late = resident_mib(pipeline)
    return {
        "dispatcher, first tenth": early[0],
        "dispatcher, end": late[0],
        "largest worker, first tenth": max(early[1:]),
        "largest worker, end": max(late[1:]),
    }


_FLAT = Bar(ratio_at_most=1.1)

MEASUREMENT = Measurement(
    "memory",
    "what dispatcher and workers hold while a million messages pass",
    (
        Line("dispatcher, first tenth", unit="MiB"),
        Line("dispatcher, end", unit="MiB", baseline="dispatcher, first tenth", bar=_FLAT),
        Line("largest worker, first tenth", unit="MiB"),
        Line("largest worker, end", unit="MiB", baseline="largest worker, first tenth", bar=_FLAT),
    ),
    _run,
    lambda: None if find_spec("psutil") else "Run: pip install 'pg-mailroom[bench]'",
)
