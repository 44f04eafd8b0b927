"""Linked nodes: each is a schema of its own, and is read by another one's daemon as if it were in another database.

All are on the one server that is measured. What a node sends under `FAR` goes to those that read it.
"""

from collections.abc import Mapping
from functools import partial

from mailroom import subscribe
from mailroom.links.links import Links

from .node import Node
from .pipeline import Pipeline
from .workload import INBOX

FAR = "bench.far"
_ACTOR = "bench"


def link(sources: Mapping[str, Node], reader: str, node: Node, *, with_own: bool = False) -> None:
    """Have `node`, under the name `reader`, read the sources: its inbox gets what they send, and perhaps its own.

    A daemon has yet to say hello to them.
    """
    for name, source in sources.items():
        with source.connect() as connection:
            Links(schema=source.schema).allow(connection, reader, actor=_ACTOR)
        with node.connect() as connection:
            Links(schema=node.schema).add(connection, name, reader=reader, source_schema=source.schema, actor=_ACTOR)
    with node.connect() as connection:
        for origin in ("*",) if with_own else sources:
            subscribe(connection, INBOX, FAR, schema=node.schema, origin=origin)


def wait_asked(pipeline: Pipeline, sources: Mapping[str, Node], readers: int = 1) -> None:
    """Wait until each source has been asked for what is sent under `FAR`, by so many readers."""
    for source in sources.values():
        pipeline.wait(partial(_is_asked, source, readers))


def _is_asked(source: Node, readers: int) -> bool:
    with source.connect(autocommit=True) as connection:
        found = connection.execute(f"SELECT count(*) FROM {source.schema}.link_topic".encode()).fetchone()
    return found == (readers,)


def received(node: Node) -> int:
    """Return how many rows of other nodes have come."""
    with node.connect(autocommit=True) as connection:
        newest = f"SELECT origin, max(last) AS last FROM {node.schema}.receipt GROUP BY origin"
        row = connection.execute(f"SELECT coalesce(sum(last), 0)::bigint FROM ({newest}) AS r".encode()).fetchone()
    return int(row[0]) if row else 0
