"""Watched tables: one INSERT of many rows, and the same with a message for each row, by hand and by a watch.

By hand the writer adds an INSERT .. SELECT into the outbox that makes the same messages. Partitioned tables have row
triggers. `one row` is the time of an INSERT of a single row, of which a transaction runs many.
"""

import time

import psycopg

from mailroom import watch

from .measure import Bar, Line, Measurement, Setup, Values
from .node import Node, fresh_node

MADE_AS = "(id bigint PRIMARY KEY, name text, email text, state text, amount numeric, created timestamptz, secret text)"
FILLED = """
INSERT INTO {table} SELECT nth, 'customer ' || nth, 'customer' || nth || '@example.org', 'active', nth * 1.25, now(),
                           md5(nth::text) FROM generate_series(%s::bigint, %s) AS nth
"""
BY_HAND = """
INSERT INTO {outbox} (topic, key, kind, message_type, event_type, value_json)
SELECT 'customer.created', id::text, 'E', 'O', 'C',
       jsonb_build_object('old', NULL, 'new', to_jsonb(c) - 'secret', 'changed', '[]'::jsonb) FROM {table} AS c
"""
SHARE = 2  # of the messages of a run: one INSERT has half of them
SINGLE = 500


class _Tables:
    """Tables in the node's own database, in a schema that goes with the node."""

    def __init__(self, node: Node, connection: psycopg.Connection) -> None:
        self._node, self._connection = node, connection
        connection.execute("SET mailroom.notify = off")

    def made(self, name: str, *, is_watched: bool, partitioned: bool = False) -> str:
        """Make a table, and return its name."""
        table = f"{self._node.schema}_app.{name}"
        self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._node.schema}_app".encode())
        by = " PARTITION BY RANGE (id)" if partitioned else ""
        self._connection.execute(f"CREATE TABLE {table} {MADE_AS}{by}".encode())
        if partitioned:
            self._connection.execute(f"CREATE TABLE {table}_all PARTITION OF {table} DEFAULT".encode())
        if is_watched:
            watch(self._connection, table, "customer", without="secret", schema=self._node.schema)
        self._connection.commit()
        return table

    def fill(self, table: str, rows: int, *, by_hand: bool = False) -> float:
        """Return how many seconds one transaction takes that inserts that many rows."""
        start = time.monotonic()
        self._connection.execute(FILLED.format(table=table).encode(), (1, rows))
        if by_hand:
            self._connection.execute(BY_HAND.format(outbox=self._node.outbox, table=table).encode())
        self._connection.commit()
        return time.monotonic() - start

    def fill_one_by_one(self, table: str, rows: int) -> float:
        """Return how many microseconds an INSERT of one row takes; a transaction has all of them."""
        start = time.monotonic()
        for nth in range(rows):
            self._connection.execute(FILLED.format(table=table).encode(), (nth, nth))
        self._connection.commit()
        return (time.monotonic() - start) / rows * 1e6

    def drop(self) -> None:
        """Drop the tables."""
        self._connection.execute(f"DROP SCHEMA IF EXISTS {self._node.schema}_app CASCADE".encode())
        self._connection.commit()


def _run(setup: Setup) -> Values:
    rows, single = setup.messages // SHARE, min(setup.messages // SHARE, SINGLE)
    with fresh_node(setup.dsn) as node, node.connect() as connection:
        tables = _Tables(node, connection)
        try:
            return {
                "INSERT alone": tables.fill(tables.made("alone", is_watched=False), rows),
                "messages by hand": tables.fill(tables.made("by_hand", is_watched=False), rows, by_hand=True),
                "watched": tables.fill(tables.made("watched", is_watched=True), rows),
                "watched, partitioned": tables.fill(tables.made("parts", is_watched=True, partitioned=True), rows),
                "one row alone": tables.fill_one_by_one(tables.made("one_alone", is_watched=False), single),
                "one row watched": tables.fill_one_by_one(tables.made("one_watched", is_watched=True), single),
            }
        finally:
            connection.rollback()
            tables.drop()


MEASUREMENT = Measurement(
    "watch",
    "insert into a watched table, and send the same messages by hand",
    (
        Line("INSERT alone", "s"),
        Line("messages by hand", "s", baseline="INSERT alone"),
        Line("watched", "s", baseline="messages by hand", bar=Bar(ratio_at_most=1.5)),
        Line("watched, partitioned", "s", baseline="messages by hand"),
        Line("one row alone", "us"),
        Line("one row watched", "us", baseline="one row alone"),
    ),
    _run,
)
