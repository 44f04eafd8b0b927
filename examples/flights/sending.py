"""The writer: each transaction commits some flights and the messages about them, or neither."""

from collections.abc import Sequence

import psycopg

from outbox import Outbox, Outgoing

from .source import Flight
from .tables import INBOX, business


def send(connection: psycopg.Connection, node: str, flights: Sequence[Flight]) -> None:
    """Write the flights into their table and send one message each, in one transaction."""
    columns = ", ".join(Flight._fields)
    with connection.transaction():
        with connection.cursor() as cursor, cursor.copy(f"COPY {business(node)}.flight ({columns}) FROM STDIN") as rows:
            for flight in flights:
                rows.write_row(flight)
        Outbox(schema=node).send_many(connection, [_message(flight) for flight in flights])


def _message(flight: Flight) -> Outgoing:
    # The flights of one aircraft stay in order; one without a tail number is in nobody's way.
    return Outgoing(INBOX, flight._asdict(), key=flight.tail_number)
