"""PgQueuer: jobs in one table that workers claim, woken by LISTEN/NOTIFY: one hop where Mailroom has two.

Its worker runs as `pgq run` runs it, on uvloop, over an asyncpg session with the defaults of its own; the writer is
psycopg's, as ours is, and measures likewise. Sessions have `jit` off, as ours have.
"""

import time
from ctypes import c_double
from importlib.util import find_spec
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, cast

import psycopg

from mailroom import codec

from .latency import AT_MOST, WARM_UP, scheduled
from .measure import Setup
from .node import Node, fresh_node
from .pipeline import Count, Pipeline
from .workload import INBOX, number, outgoing

if TYPE_CHECKING:
    from pgqueuer.models import Job

READY = "ready"


def missing() -> str | None:
    """Say how to install it."""
    return None if find_spec("pgqueuer") and find_spec("asyncpg") else "Run: pip install 'pg-mailroom[peers]'"


def _connect(node: Node) -> psycopg.Connection:
    connection = node.connect(autocommit=True)
    connection.execute(f"SET search_path = {node.schema}".encode())
    return connection


def _work(node: Node, ready: Count, handled: "Any", count: Count) -> None:
    import uvloop

    uvloop.run(_consume(node, ready, handled, count))


async def _consume(node: Node, ready: Count, handled: "Any", count: Count) -> None:
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    with node.connect() as at:
        server = at.info
        connection = await asyncpg.connect(
            host=server.host,
            port=server.port,
            user=server.user,
            password=server.password,
            database=server.dbname,
            server_settings={"search_path": node.schema, "jit": "off"},
        )
    driver = AsyncpgDriver(connection)
    queries, queue = Queries(driver), PgQueuer(driver)
    await queries.install()  # into the node's schema, which goes at the end
    await queries.enqueue(READY, None)

    async def begin(_job: "Job") -> None:
        ready.add(1)

    async def handle(job: "Job") -> None:
        now = time.monotonic()
        handled[number(cast(dict[str, Any], codec.decode(job.payload or b"")))] = now
        count.add(1)

    queue.entrypoint(READY)(begin)
    queue.entrypoint(INBOX)(handle)
    await queue.run()


def _write(node: Node, messages: int, committed: "Any") -> None:
    from pgqueuer.db import SyncPsycopgDriver
    from pgqueuer.queries import SyncQueries

    ready = [codec.encode(message.value) for message in outgoing(messages)]
    with _connect(node) as connection:
        queries = SyncQueries(SyncPsycopgDriver(connection))
        for nth in scheduled(messages):
            with connection.transaction():
                queries.enqueue(INBOX, ready[nth])
                committed[nth] = time.monotonic()


def waits_ms(setup: Setup) -> list[float]:
    """Return the latency of each message, in the order of sending."""
    messages = min(AT_MOST, setup.messages) + WARM_UP
    committed, handled, ready = RawArray(c_double, messages), RawArray(c_double, messages), Count()
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        pipeline.start(_work, node, ready, handled, pipeline.counted())
        pipeline.wait(lambda: ready.value > 0)
        pipeline.start(_write, node, messages, committed)
        pipeline.wait_handled(messages)
    return [(handled[nth] - committed[nth]) * 1_000 for nth in range(WARM_UP, messages)]
