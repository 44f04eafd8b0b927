"""Executables: a busy counter written directly and through executables, and how fast a backlog of them is applied.

Sixteen clients run one transaction after another: each adds to the same counter and inserts a row of its own. "update"
locks the counter's row from then until its commit. "increment" leaves it to the executor, whose daemon runs beside; the
time ends when the counter has the sum. "insert" inserts two rows and counts nothing: the most that these clients can
commit on these processors, since on the server's own machine clients and executor compete with it for them.

The same 1 ms away from the server, as in another data centre of the region: with a pause before each statement. How
long "update" locks the counter then depends on the order, so each is shown: "count, row", "row, count" and "count".

The backlogs are of twice `--messages`. They are compared with one SQL statement that sums by key and deletes, which
could fold no other operation.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

import dispatcher
from outbox import Executable, Store

from .clients import rate, rate_of
from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .pipeline import Pipeline

COUNTER = "busy"
CLIENTS = 16
ROUND_TRIP_S = 0.001
COUNT_ROW = "count, row"
ORDERS = (COUNT_ROW, "row, count", "count")
BARS = {"count": Bar(ratio_at_least=5)}
KEYS = 1_000
TABLES = (
    "CREATE TABLE {schema}.direct (key text PRIMARY KEY, number bigint NOT NULL) WITH (fillfactor = 70)",
    "INSERT INTO {schema}.direct SELECT 'busy', 0 UNION ALL SELECT 'key-' || n, 0 FROM generate_series(0, 999) AS n",
    "CREATE TABLE {schema}.bare (position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, number bigint NOT NULL)",
)
UPDATE = f"UPDATE {{schema}}.direct SET number = number + 1 WHERE key = '{COUNTER}'"
INSERT = "INSERT INTO {schema}.bare (number) VALUES (1)"


@contextmanager
def transacting(
    node: Node, transactions: int, statement: str, order: str = COUNT_ROW, round_trip_s: float = 0
) -> Iterator[Callable[[], int]]:
    """Run a statement in the place of "count", one transaction after another."""
    sql = statement.format(schema=node.schema).encode()
    with node.connect() as connection:
        acts = _acts(node, connection, order, lambda: connection.execute(sql, prepare=True))

        def work() -> int:
            for _ in range(transactions):
                transact(acts, round_trip_s)
            return transactions

        yield work


@contextmanager
def incrementing(
    node: Node, transactions: int, clients: int, order: str = COUNT_ROW, round_trip_s: float = 0
) -> Iterator[Callable[[], int]]:
    """Count by `Store.increment`; the work ends when the counter has the sum of all clients."""
    store = Store(schema=node.schema)
    with node.connect() as connection, node.connect(autocommit=True) as reader, Pipeline(node) as pipeline:
        # Only one client waits for it: polling by all of them would take processors from the executor.
        [waits] = reader.execute("SELECT pg_try_advisory_lock(1)").fetchone() or [False]
        before = counted(store, reader)
        acts = _acts(node, connection, order, lambda: store.increment(connection, COUNTER))

        def work() -> int:
            for _ in range(transactions):
                transact(acts, round_trip_s)
            if waits:
                pipeline.wait(lambda: counted(store, reader) == before + transactions * clients)
            return transactions

        yield work


def _acts(
    node: Node, connection: psycopg.Connection[Any], order: str, count: Callable[[], object]
) -> list[Callable[[], object]]:
    """Return the statements of a transaction in their order."""
    insert = INSERT.format(schema=node.schema).encode()
    acts = {"count": count, "row": lambda: connection.execute(insert, prepare=True)}
    return [*(acts[each] for each in order.split(", ")), connection.commit]


def transact(acts: Sequence[Callable[[], object]], round_trip_s: float) -> None:
    """Run a transaction; before each statement wait as long as a network takes."""
    if round_trip_s:
        time.sleep(round_trip_s)  # psycopg sends BEGIN separately
    for act in acts:
        if round_trip_s:
            time.sleep(round_trip_s)
        act()


def counted(store: Store, connection: psycopg.Connection[Any]) -> int:
    """Return the counter's value."""
    number = store.get(connection, COUNTER)
    return number if isinstance(number, int) else 0


@contextmanager
def executing(node: Node, executables: int) -> Iterator[Callable[[], int]]:
    """Empty the outbox of executables, as the executor does."""
    yield lambda: dispatcher.execute_all(node.dsn, schema=node.schema).taken


@contextmanager
def summing(node: Node, executables: int) -> Iterator[Callable[[], int]]:
    """Sum increments in SQL, one statement per 10,000."""
    statement = f"""
WITH head AS MATERIALIZED (
    SELECT max(position) AS last FROM (
        SELECT position FROM {node.schema}.outbox_executable ORDER BY position LIMIT 10000) AS h),
gone AS (DELETE FROM {node.schema}.outbox_executable WHERE position <= (SELECT last FROM head) RETURNING key, amount),
total AS (SELECT key, sum(amount)::bigint AS amount FROM gone GROUP BY key)
UPDATE {node.schema}.direct AS d SET number = number + amount FROM total WHERE d.key = total.key""".encode()
    with node.connect(autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")

        def work() -> int:
            while connection.execute(statement).rowcount:
                pass
            return executables

        yield work


def _increment(nth: int) -> Executable:
    return Executable("increment", f"key-{nth * 7919 % KEYS}", amount=1)


def _mixed(nth: int) -> Executable:
    key = nth * 7919 % KEYS
    match nth % 8:
        case 0 | 1 | 2:
            return Executable("increment", f"key-{key}", amount=1)
        case 3 | 4:
            return Executable("put", f"value-{key}", value=b"v" * 100)
        case 5:
            return Executable("put", f"value-{key}", value=b"w" * 100, expected=b"v" * 100, notify="replies")
        case 6:
            return Executable("delete", f"value-{key}")
        case _:
            return Executable("account", f"shop/{key % 10}/{key % 100}", target="accounting", amount=1, bytes=200)


def _fill(node: Node, executables: int, make: Callable[[int], Executable]) -> None:
    store = Store(schema=node.schema)
    with node.connect() as connection:
        connection.execute("SET LOCAL mailroom.notify = off")
        for first in range(0, executables, 10_000):
            store.send_many(connection, map(make, range(first, min(first + 10_000, executables))))
        connection.commit()
    node.execute(f"VACUUM ANALYZE {node.schema}.outbox_executable")


def _run(setup: Setup) -> Values:
    values: dict[str, float] = {}
    few = max(1, setup.messages // 10 // CLIENTS)  # one commit each, so they take a hundred times as long
    backlog = 2 * setup.messages
    with fresh_node(setup.dsn) as node:
        node.execute(*(statement.format(schema=node.schema) for statement in TABLES))
        values["insert, 16"] = rate_of(CLIENTS, transacting, node, few, INSERT)
        values["update, 16"] = rate_of(CLIENTS, transacting, node, few, UPDATE)
        with Pipeline(node) as pipeline:
            pipeline.dispatch()
            values["increment, 16"] = rate_of(CLIENTS, incrementing, node, few, CLIENTS)
        for order in ORDERS:
            values[f"update, {order}"] = rate_of(CLIENTS, transacting, node, few, UPDATE, order, ROUND_TRIP_S)
            with Pipeline(node) as pipeline:
                pipeline.dispatch()
                values[f"increment, {order}"] = rate_of(CLIENTS, incrementing, node, few, CLIENTS, order, ROUND_TRIP_S)
        for name, make, work in (
            ("sums, SQL", _increment, summing),
            ("increments", _increment, executing),
            ("mixed", _mixed, executing),
        ):
            _fill(node, backlog, make)
            values[name] = rate(work, node, backlog)
    return values


MEASUREMENT = Measurement(
    "executables",
    "a busy counter through executables, and a backlog of them",
    (
        Line("insert, 16", unit="transactions/s"),
        Line("update, 16", unit="increments/s", baseline="insert, 16"),
        Line("increment, 16", unit="increments/s", baseline="insert, 16", bar=Bar(ratio_at_least=0.65)),
        *(
            line
            for order in ORDERS
            for line in (
                Line(f"update, {order}", unit="increments/s"),
                Line(f"increment, {order}", unit="increments/s", baseline=f"update, {order}", bar=BARS.get(order)),
            )
        ),
        Line("sums, SQL", unit="increments/s"),
        Line("increments", unit="increments/s", baseline="sums, SQL", bar=Bar(at_least=50_000)),
        Line("mixed", unit="operations/s", baseline="increments"),
    ),
    _run,
)
