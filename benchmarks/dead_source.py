"""One of ten sources is dead: it takes connections and never answers. The rate at which the other nine are read.

All nine have stamped their messages before the reader's daemon starts. The time runs from the first rows that come to
the last ones.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from psycopg import conninfo

from .linked import FAR, link, received, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Mark, Pipeline, rate_between

SOURCES = 10


@contextmanager
def _dead() -> Iterator[str]:
    """Yield a connection string to a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield conninfo.make_conninfo(host="127.0.0.1", port=server.getsockname()[1])


def _rate(target: Node, sources: Mapping[str, Node], addresses: Mapping[str, str], each: int) -> float:
    before = received(target)
    for source in sources.values():
        source.send(each, topic=FAR)
        source.deliver()

    def come() -> int:
        return received(target) - before

    with Pipeline(target) as pipeline:
        pipeline.dispatch(addresses)
        began = Mark(pipeline.wait(lambda: come() > 0), come())
        ended = pipeline.wait(lambda: come() == each * len(sources))
    return rate_between(began, Mark(ended, each * len(sources)))


def _run(setup: Setup) -> Values:
    names = [f"source{nth}" for nth in range(SOURCES)]
    with ExitStack() as running:
        sources = {name: running.enter_context(fresh_node(setup.dsn)) for name in names}
        target = running.enter_context(fresh_node(setup.dsn))
        link(sources, "target", target)
        alive = dict.fromkeys(names, setup.dsn)
        with Pipeline(target) as pipeline:
            pipeline.dispatch(alive)
            wait_asked(pipeline, sources)
        others = {name: sources[name] for name in names[1:]}
        each = setup.messages // len(others)
        with_all = _rate(target, others, alive, each)
        dead = alive | {names[0]: running.enter_context(_dead())}
        return {"ten alive": with_all, "one dead": _rate(target, others, dead, each)}


MEASUREMENT = Measurement(
    "dead-source",
    "nine sources beside one that is dead",
    (Line("ten alive"), Line("one dead", baseline="ten alive", bar=Bar(ratio_at_least=0.95))),
    _run,
)
