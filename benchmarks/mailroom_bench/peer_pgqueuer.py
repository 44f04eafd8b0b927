"""PgQueuer: jobs in one table that workers claim, woken by LISTEN/NOTIFY: one hop where Mailroom has two.

Its workers run as `pgq run` runs them, on uvloop, over an asyncpg session. Sessions have `jit` off, as ours have, and
its tables have the settings that `pgq autovac` gives them. All its tables are durable, its default. For the latency the
writer is psycopg's, as ours is, and measures likewise; the worker has the defaults. For the rate one writer enqueues by
asyncpg, which its documentation finds faster, in batches of 1,000, and two workers dequeue in larger batches, as that
advises for short jobs: of 10, 100 and 1,000 jobs, the fastest.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ctypes import c_double
from importlib.util import find_spec
from itertools import islice
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, cast

import psycopg

from mailroom.values import codec

from .floors import BATCH
from .latency import AT_MOST, WARM_UP, scheduled
from .measure import Setup
from .node import Node, fresh_node
from .pipeline import Count, Pipeline
from .workload import INBOX, number, outgoing

if TYPE_CHECKING:
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.models import Job

READY = "ready"
WORKERS = 2
DEFAULT_BATCH = 10
WORKER_BATCH = 100


def missing() -> str | None:
    """Say how to install it."""
    return None if find_spec("pgqueuer") and find_spec("asyncpg") else "Run: pip install 'pg-mailroom[peers]'"


def _connect(node: Node) -> psycopg.Connection:
    connection = node.connect(autocommit=True)
    connection.execute(f"SET search_path = {node.schema}".encode())
    return connection


@asynccontextmanager
async def _driver(node: Node) -> "AsyncIterator[AsyncpgDriver]":
    import asyncpg
    from pgqueuer.db import AsyncpgDriver

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
    try:
        yield AsyncpgDriver(connection)
    finally:
        await connection.close()


def _install(node: Node) -> None:
    import asyncio

    asyncio.run(_installing(node))


async def _installing(node: Node) -> None:
    from pgqueuer.queries import Queries

    async with _driver(node) as driver:
        queries = Queries(driver)
        await queries.install()  # into the node's schema, which goes at the end
        await queries.optimize_autovacuum()


def _work(node: Node, nth: int, batch: int, ready: Count, count: Count, handled: "Any") -> None:
    import uvloop

    uvloop.run(_consume(node, nth, batch, ready, count, handled))


async def _consume(node: Node, nth: int, batch: int, ready: Count, count: Count, handled: "Any") -> None:
    from pgqueuer import PgQueuer
    from pgqueuer.queries import Queries

    async with _driver(node) as driver:
        queue = PgQueuer(driver)
        await Queries(driver).enqueue(f"{READY} {nth}", None)

        async def begin(_job: "Job") -> None:
            ready.add(1)

        async def handle(_job: "Job") -> None:
            count.add(1)

        async def record(job: "Job") -> None:
            now = time.monotonic()
            handled[number(cast(dict[str, Any], codec.decode(job.payload or b"")))] = now
            count.add(1)

        queue.entrypoint(f"{READY} {nth}")(begin)
        queue.entrypoint(INBOX)(handle if handled is None else record)
        await queue.run(batch_size=batch)


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


def _publish(node: Node, messages: int, began: Count) -> None:
    import uvloop

    uvloop.run(_enqueue(node, [codec.encode(message.value) for message in outgoing(messages)], began))


async def _enqueue(node: Node, values: Sequence[bytes], began: Count) -> None:
    from pgqueuer.queries import Queries

    async with _driver(node) as driver:
        queries, ready = Queries(driver), iter(values)
        began.add(1)
        while batch := list(islice(ready, BATCH)):
            await queries.enqueue([INBOX] * len(batch), [*batch], [0] * len(batch))


def _start(pipeline: Pipeline, workers: int, batch: int, handled: "Any" = None) -> None:
    """Start workers; return when they work."""
    installing = pipeline.start(_install, pipeline.node)
    pipeline.wait(lambda: installing.exitcode is not None)
    readies = [Count() for _ in range(workers)]
    for nth, ready in enumerate(readies):
        pipeline.start(_work, pipeline.node, nth, batch, ready, pipeline.counted(), handled)
    pipeline.wait(lambda: all(ready.value for ready in readies))


def flow_rate(node: Node, messages: int) -> float:
    """Return the rate of the whole path, from the first batch until the last job is handled."""
    began = Count()
    with Pipeline(node) as pipeline:
        _start(pipeline, WORKERS, WORKER_BATCH)
        pipeline.start(_publish, node, messages, began)
        start = pipeline.wait(lambda: began.value > 0)
        return messages / (pipeline.wait_handled(messages).time_s - start)


def waits_ms(setup: Setup) -> list[float]:
    """Return the latency of each message, in the order of sending."""
    messages = min(AT_MOST, setup.messages) + WARM_UP
    committed, handled = RawArray(c_double, messages), RawArray(c_double, messages)
    with fresh_node(setup.dsn) as node, Pipeline(node) as pipeline:
        _start(pipeline, 1, DEFAULT_BATCH, handled)
        pipeline.start(_write, node, messages, committed)
        pipeline.wait_handled(messages)
    return [(handled[nth] - committed[nth]) * 1_000 for nth in range(WARM_UP, messages)]
