"""Growth: what a message costs to deliver and to reap over more and more keys, and with more and more waiting.

Each step sends `--messages` over a thousandth as many keys, a hundredth, a tenth and as many; the last one sends ten
times as many messages, all of which wait in the outbox, then in the inbox, where a Worker handles a tenth of them. The
cost is the processor time of the client and of its sessions on the server, compared with the fewest keys. With
`--messages 1000000` it goes from 10^3 to 10^6 keys and to 10^7 waiting messages.
"""

import asyncio
import os
from dataclasses import dataclass

from dispatcher.daemon import DRAIN
from dispatcher.delivery.deliverer import Deliverer
from mailroom.session import settings

from . import processor
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline
from .processor import Meter, spent_us

BAR = Bar(ratio_at_most=1.3)


@dataclass(frozen=True, slots=True)
class Step:
    """Its name, its keys as a share of `--messages`, and how many times as many messages wait."""

    name: str
    keys: float
    times: int = 1


STEPS = (
    Step("messages / 1,000 keys", 0.001),
    Step("messages / 100 keys", 0.01),
    Step("messages / 10 keys", 0.1),
    Step("as many keys", 1),
    Step("as many keys, 10 x waiting", 1, 10),
)


async def _deliver_us(node: Node) -> float:
    """Deliver all that is in the outbox; return the cost of a message."""
    async with await settings.connect_async(node.dsn, "dispatcher", DRAIN) as connection:
        meter = Meter({"backend": connection.info.backend_pid, "client": os.getpid()})
        with meter.running():
            taken = await Deliverer(connection, node.schema).drain()
    return sum(meter.each_us(taken).values())


def _reap_us(node: Node, messages: int) -> float:
    """Let a Worker handle that many messages; return the cost of a message, NaN if there are too few."""
    with Pipeline(node) as pipeline:
        pipeline.work(1)
        pipeline.wait_handled(1)
        used, before = pipeline.used_s("mailroom worker"), pipeline.handled
        counted = pipeline.wait_handled(messages).handled - before
        return spent_us(used, pipeline.used_s("mailroom worker"), counted)


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    for step in STEPS:
        with fresh_node(setup.dsn) as node:
            node.send(step.times * setup.messages, max(1, int(step.keys * setup.messages)))
            values[f"deliver, {step.name}"] = asyncio.run(_deliver_us(node))
            values[f"reap, {step.name}"] = _reap_us(node, setup.messages)
    return values


_FIRST, *_MORE = (step.name for step in STEPS)

MEASUREMENT = Measurement(
    "growth",
    "what a message costs with more keys, and more messages",
    tuple(
        line
        for what in ("deliver", "reap")
        for line in (
            Line(f"{what}, {_FIRST}", "us"),
            *(Line(f"{what}, {name}", "us", f"{what}, {_FIRST}", BAR) for name in _MORE),
        )
    ),
    _run,
    processor.missing,
)
