"""Growth: deliver and reap over more and more keys, from a hundredth of `--messages` to ten times as many.

There are `--messages` messages, or one per key if that is more. One Worker reaps them in batches of up to 1,000. The
rates are divided by those with the fewest keys. By default it goes from 10^3 to 10^6 keys.
"""

from .deliver import deliver_rate
from .measure import Line, Measurement, Setup, Values
from .node import fresh_node
from .pipeline import Pipeline, reap_rate

# Keys as shares of `--messages`: by default 1,000, 10,000, 100,000 and 1,000,000.
STEPS = {"messages / 100 keys": 0.01, "messages / 10 keys": 0.1, "as many keys": 1, "10 x as many keys": 10}


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for name, share in STEPS.items():
        keys = max(1, int(share * setup.messages))
        messages = max(keys, setup.messages)
        with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
            values[f"deliver, {name}"] = deliver_rate(node, messages, keys)
            pipeline.work(1)
            values[f"reap, {name}"] = reap_rate(pipeline, messages)
    return values


_FIRST, *_MORE = STEPS

MEASUREMENT = Measurement(
    "growth",
    "deliver and reap over more and more keys",
    tuple(
        line
        for step in ("deliver", "reap")
        for line in (
            Line(f"{step}, {_FIRST}"),
            *(Line(f"{step}, {name}", baseline=f"{step}, {_FIRST}") for name in _MORE),
        )
    ),
    _run,
)
