"""Guarded: executables on a table with a trigger, beside the same table without one; and calls of a function.

The trigger does nothing, but the executor cannot know that: the trigger must see each operation. Meanwhile a user locks
one of the rows again and again; the times show how long a batch holds rows it has written. Calls are compared with
calls of the same function by a client, each in a transaction of its own. At most 3,000 of each.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import dispatcher
from outbox import Executable, Store

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

AT_MOST = 3_000
KEYS = 10
TABLES = (
    "CREATE SCHEMA {schema}_users",
    "CREATE TABLE {schema}_users.thing (id integer PRIMARY KEY, total bigint NOT NULL) WITH (fillfactor = 70)",
    "INSERT INTO {schema}_users.thing SELECT n, 0 FROM generate_series(0, 9) AS n",
    """
CREATE FUNCTION {schema}_users.adds(given jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN UPDATE {schema}_users.thing SET total = total + 1 WHERE id = 0; END $$
""",
    "INSERT INTO {schema}.executable_target VALUES ('things', '{schema}_users', 'thing', 'id', null, 'total')",
    "INSERT INTO {schema}.executable_function VALUES ('adds', '{schema}_users', 'adds')",
)
TRIGGER = (
    "CREATE FUNCTION {schema}_users.nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN new; END $$",
    """
CREATE TRIGGER nothing BEFORE UPDATE ON {schema}_users.thing
FOR EACH ROW EXECUTE FUNCTION {schema}_users.nothing()
""",
)


def _execute_ms(node: Node, count: int, executable: Executable) -> float:
    """Return how long it takes to execute so many executables."""
    store = Store(schema=node.schema)
    with node.connect() as connection:
        connection.execute("SET LOCAL mailroom.notify = off")
        store.send_many(
            connection,
            [executable if executable.operation == "call" else _on(nth % KEYS, executable) for nth in range(count)],
        )
        connection.commit()
    start = time.monotonic()
    dispatcher.execute_all(node.dsn, schema=node.schema)
    return 1_000 * (time.monotonic() - start)


def _on(key: int, executable: Executable) -> Executable:
    return Executable(executable.operation, key, target=executable.target, amount=executable.amount)


@contextmanager
def _user(node: Node) -> Iterator[list[float]]:
    """Lock a row again and again in the background; yields the times in ms."""
    waits: list[float] = [0]
    done = threading.Event()

    def lock() -> None:
        with node.connect() as connection:
            while not done.is_set():
                start = time.monotonic()
                connection.execute(f"SELECT FROM {node.schema}_users.thing WHERE id = 0 FOR UPDATE".encode())
                waits.append(1_000 * (time.monotonic() - start))
                connection.rollback()
                done.wait(0.01)

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        yield waits
    finally:
        done.set()
        thread.join()


def _directly_ms(node: Node, count: int) -> float:
    """Return how long a client takes for so many calls of the function."""
    with node.connect() as connection:
        start = time.monotonic()
        for _ in range(count):
            connection.execute(f"SELECT {node.schema}_users.adds('null')".encode(), prepare=True)
            connection.commit()
        return 1_000 * (time.monotonic() - start)


def _run(setup: Setup) -> Values:
    count = min(AT_MOST, setup.messages)
    increment = Executable("increment", "0", target="things", amount=1)
    with fresh_node(setup.dsn) as node:
        try:
            node.execute(*(statement.format(schema=node.schema) for statement in TABLES))
            values = {"unguarded": _execute_ms(node, count, increment)}
            values["called by a client"] = _directly_ms(node, count)
            values["calls"] = _execute_ms(node, count, Executable("call", target="adds"))
            node.execute(*(statement.format(schema=node.schema) for statement in TRIGGER))
            values["guarded"] = _execute_ms(node, count, increment)
            with _user(node) as waits:
                _execute_ms(node, count, increment)
            return values | {"a user's longest wait": max(waits)}
        finally:
            node.execute(f"DROP SCHEMA IF EXISTS {node.schema}_users CASCADE")


MEASUREMENT = Measurement(
    "guarded",
    "executables on a table with a trigger; calls of a function",
    (
        Line("unguarded", unit="ms"),
        Line("guarded", unit="ms", baseline="unguarded", bar=Bar(ratio_at_most=10)),
        Line("a user's longest wait", unit="ms", bar=Bar(at_most=1_000)),
        Line("called by a client", unit="ms"),
        Line("calls", unit="ms", baseline="called by a client", bar=Bar(ratio_at_most=3)),
    ),
    _run,
)
