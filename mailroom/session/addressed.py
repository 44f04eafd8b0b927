"""Whether the server has said something to an idle session: then it is perhaps lost, and is asked before it is used."""

import select
from typing import Any

import psycopg


def is_addressed(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> bool:
    """Return whether the server has said something to an idle session, as when idle_session_timeout ends it.

    It takes no round trip, which a server that does not answer would make a long one.
    """
    words = select.poll()
    words.register(connection.pgconn.socket, select.POLLIN)
    return bool(words.poll(0))
