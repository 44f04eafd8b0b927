"""One of ten sources is dead: it takes connections and never answers. The rate at which the other nine are read.

All nine have stamped their messages before the reader's daemon starts. The time runs from the first rows that come to
the last ones.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from psycopg import conninfo

from .linked import FAR, link, received, wait_asked
from .measure import Bar, Line, Measurement, Setup, Values
from .node import fresh_node
from .pipeline import Mark, Pipeline, rate_between

SOURCES = 10


@contextmanager
def _dead() -> Iterator[str]:
    """Yield a connection string to a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield conninfo.make_conninfo(host="127.0.0.1", port=server.getsockname()[1])


def _rate(setup: Setup, dead: str | None = None) -> float:
    """Return the rate of nine sources beside a tenth, which is at `dead` once all have been greeted.

    On nodes of its own: a reader that has received much is slower.
    """
    names = [f"source{nth}" for nth in range(SOURCES)]
    with ExitStack() as running:
        sources = {name: running.enter_context(fresh_node(setup.dsn)) for name in names}
        target = running.enter_context(fresh_node(setup.dsn))
        link(sources, "target", target)
        addresses = dict.fromkeys(names, setup.dsn)
        with Pipeline(target) as pipeline:
            pipeline.dispatch(addresses)
            wait_asked(pipeline, sources)
        others = {name: sources[name] for name in names[1:]}
        each = setup.messages // len(others)
        for source in others.values():
            source.send(each, topic=FAR)
            source.deliver()
        with Pipeline(target) as pipeline:
            pipeline.dispatch(addresses if dead is None else addresses | {names[0]: dead})
            began = Mark(pipeline.wait(lambda: received(target) > 0), received(target))
            ended = pipeline.wait(lambda: received(target) == each * len(others))
        return rate_between(began, Mark(ended, each * len(others)))


def _run(setup: Setup) -> Values:
    with _dead() as dead:
        return {"ten alive": _rate(setup), "one dead": _rate(setup, dead)}


MEASUREMENT = Measurement(
    "dead-source",
    "nine sources beside one that is dead",
    (Line("ten alive"), Line("one dead", baseline="ten alive", bar=Bar(ratio_at_least=0.95))),
    _run,
)
