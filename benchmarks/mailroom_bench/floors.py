"""The floors: the rates of PostgreSQL and the driver on this machine for the bare work that a step requires.

A floor uses the product's columns and indexes, session settings, driver and client processes, and leaves out everything
that is the product's: checks, trigger, encoding, numbering, routing, locking. So a ratio to it is the product's cost.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dispatcher.delivery.deliver import DELIVERY_SESSION
from mailroom.message.message import SELECTED
from mailroom.message.outgoing import SENT_COLUMNS, row_of

from .clients import rate, rate_of
from .measure import Line, Measurement, Setup, Values
from .node import Node, fresh_node
from .workload import INBOX, KEY, KEYS, VALUE, outgoing

BATCH = 1_000
NAMES = ", ".join(name for name, _ in SENT_COLUMNS)
_AS_TEXT = ('"char"', "jsonb")
PLACES = ", ".join(f"%s::text::{kind}" if kind in _AS_TEXT else f"%s::{kind}" for _, kind in SENT_COLUMNS)


@contextmanager
def inserting(node: Node, messages: int) -> Iterator[Callable[[], int]]:
    """INSERT and commit rows one by one: the outbox's columns, defaults and primary key, no CHECKs, no trigger."""
    rows = [row_of(message) for message in outgoing(messages)]
    insert = f"INSERT INTO {node.schema}.bare_outbox ({NAMES}) VALUES ({PLACES})".encode()
    with node.connect() as connection:

        def work() -> int:
            for row in rows:
                connection.execute(insert, row, prepare=True)
                connection.commit()
            return messages

        yield work


@contextmanager
def copied(node: Node, messages: int) -> Iterator[Callable[[], int]]:
    """COPY prepared rows, 1,000 per transaction, into the same table."""
    rows = [(*row[:3], *map(_letter, row[3:6]), *row[6:]) for row in (row_of(m) for m in outgoing(messages))]
    copy = f"COPY {node.schema}.bare_outbox ({NAMES}) FROM STDIN (FORMAT binary)".encode()
    with node.connect() as connection:

        def work() -> int:
            for first in range(0, messages, BATCH):
                with connection.cursor() as cursor, cursor.copy(copy) as stream:
                    stream.set_types([kind if kind != '"char"' else "bytea" for _, kind in SENT_COLUMNS])
                    for row in rows[first : first + BATCH]:
                        stream.write_row(row)
                connection.commit()
            return messages

        yield work


def _letter(letter: str | None) -> bytes | None:
    return None if letter is None else letter.encode()  # the binary form of "char", for which psycopg has no dumper


@contextmanager
def deleting(node: Node, messages: int) -> Iterator[Callable[[], int]]:
    """DELETE .. RETURNING to the client by ranges of the clock, 1,000 rows per transaction, as a reaper reads them."""
    delete = f"DELETE FROM {node.schema}.bare_inbox WHERE clock > %s AND clock <= %s RETURNING {SELECTED}".encode()
    with node.connect() as connection:

        def work() -> int:
            count = 0
            for first in range(0, messages, BATCH):
                with connection.cursor(binary=True) as cursor:
                    count += len(cursor.execute(delete, [first, first + BATCH], prepare=True).fetchall())
                connection.commit()
            return count

        yield work


def make_outbox(node: Node) -> None:
    """Create the bare outbox."""
    node.execute(
        f"CREATE TABLE {node.schema}.bare_outbox "
        f"(LIKE {node.outbox} INCLUDING DEFAULTS INCLUDING IDENTITY INCLUDING INDEXES)"
    )


def insert_rate(node: Node, clients: int, messages: int) -> float:
    """Return the rate of `inserting` by so many clients into an empty table."""
    node.execute(f"TRUNCATE {node.schema}.bare_outbox")
    return rate_of(clients, inserting, node, messages // clients)


def copy_rate(node: Node, messages: int) -> float:
    """Return the rate of `copied`, into an empty table."""
    node.execute(f"TRUNCATE {node.schema}.bare_outbox")
    return rate(copied, node, messages)


def sorted_insert_rate(node: Node, messages: int, keys: int = KEYS) -> float:
    """Return the rate of one INSERT .. SELECT .. ORDER BY key into the inbox's columns and indexes.

    The floor of a delivery: the rows are ready in a table, numbered; the session has a deliverer's settings. The rows
    stay for `delete_rate`.
    """
    with node.connect() as connection:
        connection.execute(
            f"CREATE TABLE {node.schema}.bare_source AS SELECT '{INBOX}'::text AS inbox, nth + 1 AS clock, "
            "nth + 1 AS sent_clock, id AS origin, clock_timestamp() AS delivered_at, gen_random_uuid() AS message_id, "
            f"'{INBOX}'::text AS topic, {KEY} AS key, 'M'::\"char\" AS kind, 'U'::\"char\" AS message_type, "
            'NULL::"char" AS event_type, %(value)s::bytea AS value, NULL::jsonb AS value_json, '
            "NULL::jsonb AS headers, NULL::timestamptz AS expires_at, NULL::bigint AS after_clock, "
            "current_setting('application_name') AS source, clock_timestamp() AS sent_at "
            f"FROM generate_series(0, %(messages)s::bigint - 1) AS nth, {node.schema}.node".encode(),
            {"keys": keys, "value": VALUE, "messages": messages},
        )
        connection.execute(
            f"CREATE TABLE {node.schema}.bare_inbox (LIKE {node.schema}.inbox INCLUDING DEFAULTS); "
            f"ALTER TABLE {node.schema}.bare_inbox ADD PRIMARY KEY (key, clock); "
            f"CREATE INDEX ON {node.schema}.bare_inbox ((clock + 0))".encode()
        )
        for name, setting in DELIVERY_SESSION.items():
            connection.execute("SELECT set_config(%s, %s, false)", [name, setting])
        connection.commit()
        start = time.monotonic()
        connection.execute(
            f"INSERT INTO {node.schema}.bare_inbox SELECT * FROM {node.schema}.bare_source ORDER BY key, clock".encode()
        )
        connection.commit()
        taken_s = time.monotonic() - start
        connection.execute(f"DROP TABLE {node.schema}.bare_source".encode())
    return messages / taken_s


def delete_rate(node: Node, messages: int) -> float:
    """Return the rate of `deleting` the rows that `sorted_insert_rate` inserted."""
    return rate(deleting, node, messages)


def _run(setup: Setup) -> Values:
    with fresh_node(setup.dsn) as node:
        make_outbox(node)
        return {
            "insert and commit, 1 client": insert_rate(node, 1, setup.messages // 10),
            "insert and commit, 4 clients": insert_rate(node, 4, setup.messages // 10),
            "insert and commit, 16 clients": insert_rate(node, 16, setup.messages // 10),
            "COPY, 1,000 per transaction": copy_rate(node, setup.messages),
            "sorted INSERT..SELECT": sorted_insert_rate(node, setup.messages),
            "DELETE..RETURNING by range": delete_rate(node, setup.messages),
        }


MEASUREMENT = Measurement(
    "floors",
    "what this machine does with the bare work",
    (
        Line("insert and commit, 1 client"),
        Line("insert and commit, 4 clients"),
        Line("insert and commit, 16 clients"),
        Line("COPY, 1,000 per transaction"),
        Line("sorted INSERT..SELECT"),
        Line("DELETE..RETURNING by range"),
    ),
    _run,
)
