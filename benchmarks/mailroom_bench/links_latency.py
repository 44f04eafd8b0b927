"""Latency over a link: from COMMIT at one node until the handler is called at another, at 200 messages/s.

As `latency` measures it within one node, which is measured beside it.
"""

from .latency import AT_MOST, percentile, waits_between_ms, waits_ms
from .linked import FAR, link, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import fresh_node
from .pipeline import Pipeline


def _waits_ms(setup: Setup) -> list[float]:
    with (
        fresh_node(setup.dsn) as source, fresh_node(setup.dsn) as target,
        Pipeline(source) as sending, Pipeline(target) as pipeline,
    ):  # fmt: skip
        link({"source": source}, "target", target)
        pipeline.dispatch({"source": source.dsn})
        wait_asked(pipeline, {"source": source})
        sending.dispatch()
        return waits_between_ms(source, pipeline, min(AT_MOST, setup.messages), topic=FAR)


def _run(setup: Setup) -> Values:
    near, far = waits_ms(setup), _waits_ms(setup)
    return {
        "p50, one node": percentile(near, 50),
        "p50, two nodes": percentile(far, 50),
        "p99, two nodes": percentile(far, 99),
    }


MEASUREMENT = Measurement(
    "links-latency",
    "commit to handler at another node, at 200 messages/s",
    (
        Line("p50, one node", unit="ms"),
        Line("p50, two nodes", unit="ms", baseline="p50, one node", bar=Bar(ratio_at_most=2.5)),
        Line("p99, two nodes", unit="ms"),
    ),
    _run,
)
