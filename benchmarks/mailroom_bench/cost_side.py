"""What one checkout does in `mailroom_bench.cost`, part by part."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import psycopg

from dispatcher.daemon import DRAIN
from dispatcher.delivery.deliverer import Deliverer
from inbox import Inbox
from mailroom.message.message import SELECTED
from mailroom.message.outgoing import row_of
from mailroom.session import settings
from outbox import Outbox, Outgoing

from . import floors
from .node import Node
from .pipeline import Pipeline
from .processor import Meter
from .workload import INBOX, outgoing

BLOCK = 50  # so many of one statement, then so many of the next one
DELIVERIES = {1: 300, 10: 300, 100: 100}
FEWEST = 3
LEAST_STOCK = 20_000


def _meter(connection: "psycopg.Connection | psycopg.AsyncConnection") -> Meter:
    return Meter({"backend": connection.info.backend_pid, "client": os.getpid()})


def _named(name: str, meter: Meter, count: int) -> dict[str, float]:
    return {f"{name}, {process}": value for process, value in meter.each_us(count).items()}


# -- Bulk -------------------------------------------------------------------------------------------------------------

ROLES = {"mailroom dispatcher": "dispatcher's backends", "mailroom worker": "worker's backends"}


def bulk(node: Node, messages: int) -> dict[str, float]:
    """One publisher, one dispatcher and one Worker at once, after a tenth to warm up."""
    return _bulk(node, messages, "bulk")


def metered(node: Node, messages: int) -> dict[str, float]:
    """The same while the dispatcher and the worker count their metrics."""
    return _bulk(node, messages, "bulk with metrics", metered=True)


def _bulk(node: Node, messages: int, name: str, *, metered: bool = False) -> dict[str, float]:
    outbox, ready = Outbox(schema=node.schema), outgoing(messages + messages // 10)
    with Pipeline(node, metered=metered) as pipeline, node.connect() as connection:
        pipeline.dispatch()
        pipeline.work(1)
        _publish(outbox, connection, islice(ready, messages // 10), messages // 10)
        pipeline.wait_drained(messages // 10)
        clients = {"dispatcher": pipeline.dispatcher, "worker": pipeline.workers[0]}
        publisher = Meter({"publisher": os.getpid(), "publisher's backend": connection.info.backend_pid})
        processes = Meter({name: each.pid for name, each in clients.items() if each is not None and each.pid})
        sessions = pipeline.sessions(*ROLES)
        backends = Meter({str(pid): pid for pid in sessions})
        with processes.running(), backends.running():
            with publisher.running():
                _publish(outbox, connection, ready, messages)
            pipeline.wait_drained(messages + messages // 10)
    found = publisher.each_us(messages) | processes.each_us(messages) | dict.fromkeys(ROLES.values(), 0.0)
    for pid, used_us in backends.each_us(messages).items():
        found[ROLES[sessions[int(pid)]]] += used_us
    return {f"{name}, {process}": used_us for process, used_us in (found | {"all": sum(found.values())}).items()}


def _publish(outbox: Outbox, connection: psycopg.Connection, ready: Iterator[Outgoing], messages: int) -> None:
    for sent in range(0, messages, floors.BATCH):
        outbox.send_many(connection, list(islice(ready, min(floors.BATCH, messages - sent))))
        connection.commit()


# -- One by one -------------------------------------------------------------------------------------------------------


def send(node: Node, messages: int) -> dict[str, float]:
    """`Outbox.send` and the bare INSERT, in transactions of 50 without their commit, and each with its commit."""
    count = max(messages // 20, BLOCK)
    floors.make_outbox(node)
    outbox = Outbox(schema=node.schema)
    insert = f"INSERT INTO {node.schema}.bare_outbox ({floors.NAMES}) VALUES ({floors.PLACES})".encode()
    with node.awake(), node.connect() as connection:
        meters = {name: _meter(connection) for name in ("INSERT", "send", "INSERT and commit", "send and commit")}
        measured = 0
        for block in range(count // BLOCK + 1):
            is_warm = block > 0
            measured += BLOCK * is_warm
            ready = list(outgoing(BLOCK))
            rows = [row_of(message) for message in ready]
            for name, meter in meters.items():
                with _counting(meter, is_warm):
                    for message, row in zip(ready, rows, strict=True):
                        if name.startswith("send"):
                            outbox.send(connection, INBOX, message.value, key=message.key)
                        else:
                            connection.execute(insert, row, prepare=True)
                        if name.endswith("commit"):
                            connection.commit()
                connection.commit()
    return {key: used for name, meter in meters.items() for key, used in _named(name, meter, measured).items()}


@contextmanager
def _counting(meter: Meter, is_warm: bool) -> Iterator[None]:
    if not is_warm:
        yield
        return
    with meter.running():
        yield


# -- Deliveries -------------------------------------------------------------------------------------------------------


def deliver(node: Node, messages: int) -> dict[str, float]:
    """Deliveries of as many messages as the outbox has, over one session."""
    return asyncio.run(_deliver(node, messages))


async def _deliver(node: Node, messages: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with await settings.connect_async(node.dsn, "dispatcher", DRAIN) as connection:
        deliverer = Deliverer(connection, node.schema)
        for rows, most in {**DELIVERIES, 10_000: messages // 10_000}.items():
            meter, deliveries = _meter(connection), max(FEWEST, min(most, messages // rows))
            for nth in range(-FEWEST, deliveries):
                node.send(rows)
                with _counting(meter, nth >= 0):
                    await deliverer.deliver()
            found |= _named(f"deliver {rows:,}", meter, rows * deliveries)
    return found


# -- Claims -----------------------------------------------------------------------------------------------------------


def claim(node: Node, messages: int) -> dict[str, float]:
    """`Inbox.reap_any` and the bare DELETE .. RETURNING of as many rows, each with its commit."""
    stock = max(messages, LEAST_STOCK)
    floors.sorted_insert_rate(node, stock)
    node.send(stock)
    node.deliver()
    found: dict[str, float] = {}
    inbox = Inbox(INBOX, schema=node.schema)
    delete = f"DELETE FROM {node.schema}.bare_inbox WHERE clock + 0 > %s AND clock + 0 <= %s RETURNING {SELECTED}"
    with node.connect() as connection:
        clock = 0
        for size, keys, most in ((1, 1, stock // 100), (1_000, 100, stock // 2_000)):
            deletes, claims = _meter(connection), _meter(connection)
            counted = 0
            for nth in range(-FEWEST, most):
                with _counting(deletes, nth >= 0), connection.cursor(binary=True) as cursor:
                    cursor.execute(delete.encode(), [clock, clock + size], prepare=True).fetchall()
                    connection.commit()
                clock += size
                with _counting(claims, nth >= 0):
                    taken = inbox.reap_any(connection, max_keys=keys, per_key=size // keys)
                    connection.commit()
                counted += len(taken) * (nth >= 0)
            found |= _named(f"DELETE of {size:,}", deletes, size * most)
            found |= _named(f"claim of {size:,}", claims, counted)
    return found


PARTS = {part.__name__: part for part in (bulk, metered, send, deliver, claim)}
