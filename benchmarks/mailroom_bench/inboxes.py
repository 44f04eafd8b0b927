"""Inboxes: the cost of a dispatcher, and whether it keeps its lease, beside many idle inboxes.

There is one inbox per 100 of `--messages`, at most 5,000 (with `--messages 500000`). A daemon leads and another stands
by, for up to 20 s. The measure is the processor time of the leader and of its sessions on the server, which must be on
this machine. Each takeover raises the lease's epoch, which starts at 1.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mailroom import create_inbox

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline

AT_MOST = 5_000
AT_ONCE = 100  # inboxes created or removed per transaction: each takes a dozen of the server's locks


@contextmanager
def _idle_inboxes(node: Node, count: int) -> Iterator[None]:
    names = [f"idle{nth}" for nth in range(count)]
    groups = [names[nth : nth + AT_ONCE] for nth in range(0, count, AT_ONCE)]
    try:
        for group in groups:
            with node.connect() as connection:
                create_inbox(connection, group, schema=node.schema)
        yield
    finally:
        # Before the schema is dropped, which would take all their locks at once.
        for group in groups:
            node.execute("DROP TABLE IF EXISTS " + ", ".join(f"{node.schema}.inbox_{name}" for name in group))


def _sessions(node: Node) -> list[int]:
    with node.connect(autocommit=True) as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND (application_name ^@ 'mailroom dispatcher' OR application_name ^@ 'mailroom executor')"
        ).fetchall()
    return [pid for (pid,) in rows]


def _processor_s(processes: list[int]) -> float:
    # Not at the top: few measurements need the package, and only developers are sure to have it.
    from psutil import Process

    times = [Process(pid).cpu_times() for pid in processes]
    return sum(each.user + each.system for each in times)


def _run(setup: Setup) -> Values:
    inboxes = max(1, min(AT_MOST, setup.messages // 100))
    watch_s = min(20.0, 2 + inboxes / 50)
    with fresh_node(setup.dsn) as node, _idle_inboxes(node, inboxes), Pipeline(node) as pipeline:
        pipeline.dispatch()
        pipeline.wait(lambda: len(_sessions(node)) >= 6)  # two of each lane, one that listens, one for housekeeping
        daemon = [each.pid for each in (pipeline.dispatcher,) if each is not None and each.pid is not None]
        leader = [*daemon, *_sessions(node)]
        pipeline.dispatch()  # the standby
        before, began = _processor_s(leader), time.monotonic()
        time.sleep(watch_s)
        used, took = _processor_s(leader) - before, time.monotonic() - began
        with node.connect() as connection:
            [(epoch,)] = connection.execute(f"SELECT max(epoch) FROM {node.schema}.lease".encode()).fetchall()
    return {"processor": 100 * used / took, "leaders": float(epoch)}


MEASUREMENT = Measurement(
    "inboxes",
    "a dispatcher beside many idle inboxes",
    (
        Line("processor", unit="% of a core", bar=Bar(at_most=5)),
        Line("leaders", unit="", bar=Bar(at_most=1)),
    ),
    _run,
)
