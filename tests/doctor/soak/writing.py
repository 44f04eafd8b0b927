"""A writer of the soak: `python -m tests.doctor.soak.writing RATE` sends orders until it is told to stop."""

import contextlib
import itertools
import signal
import sys
import threading

import psycopg

import mailroom
from outbox import Outbox

KEYS = 200
PAUSE_S = 0.2  # after an error: the node may be broken just now


def main(rate: float) -> None:
    """Send this many transactions a second, of one message each."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    numbers = itertools.count()
    while not over.is_set():
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(mailroom.dsn(), autocommit=True, application_name="soak writer") as connection,
        ):
            while not over.wait(1 / rate):
                with connection.transaction():
                    nth = next(numbers)
                    Outbox().send(connection, "order.paid", nth, key=f"order-{nth % KEYS}")
        over.wait(PAUSE_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))
