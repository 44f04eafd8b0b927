"""The consumer: follows each aircraft, in the same transactions that reap the messages about it.

Run it with `mailroom worker run examples.flights.worker:worker`, as many of them as you like.
"""

import os
from typing import cast

import psycopg

from inbox import Message, Worker

from .tables import INBOX, NODE, business

# One statement and so one round trip per flight. An unordered one has no aircraft to move.
HANDLE = """
WITH moved AS (
    INSERT INTO {business}.aircraft AS a (tail_number, airport, flights)
    SELECT %(tail_number)s::text, %(destination)s::text, 1 WHERE %(tail_number)s::text IS NOT NULL
    ON CONFLICT (tail_number) DO UPDATE SET airport = excluded.airport, flights = a.flights + 1)
INSERT INTO {business}.ledger (flight, key, clock, worker, sent_at)
VALUES (%(number)s::bigint, %(key)s::text, %(clock)s::bigint, %(worker)s::integer, %(sent_at)s::timestamptz)
"""

node = os.environ.get("MAILROOM_DEMO_SCHEMA", NODE)
statement = HANDLE.format(business=business(node)).encode()


def handle(message: Message, connection: psycopg.Connection) -> None:
    """Move the aircraft to the flight's destination, count the flight, and note it in the ledger."""
    flight = cast(dict[str, object], message.value)
    parameters = {
        "number": flight["number"],
        "tail_number": flight["tail_number"],
        "destination": flight["destination"],
        "key": message.key,
        "clock": message.clock,
        "worker": os.getpid(),
        "sent_at": message.sent_at,
    }
    connection.execute(statement, parameters, prepare=True)


# No connection string: MAILROOM_DSN or libpq's environment names the database when it runs.
worker = Worker("", INBOX, handle, schema=node)
