"""State objects: what the nodes of a cluster share, by type and key. A node's own state is one, too."""

from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg.types.json import Jsonb

from mailroom import watch

Connection: TypeAlias = psycopg.Connection[Any]

TOPIC = "state"  # state.created, state.updated and state.deleted tell what happens to state objects

TABLE = """
CREATE TABLE IF NOT EXISTS public.state_object (
    type   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    object jsonb NOT NULL,
    clock  bigint NOT NULL DEFAULT 0,  -- of the newest message that its writer has received
    at     timestamptz NOT NULL,
    PRIMARY KEY (type, key)
)
"""
PUT = """
INSERT INTO public.state_object (type, key, object, at) VALUES (%s, %s, %s, %s)
ON CONFLICT (type, key) DO UPDATE SET object = excluded.object, at = excluded.at
"""
ADVANCE = "UPDATE public.state_object SET clock = greatest(clock, %s), at = %s WHERE (type, key) = (%s, %s)"
FIND = """
SELECT key, object, clock, at FROM public.state_object WHERE type = %s AND key ^@ %s ORDER BY key
"""
REMOVE = "DELETE FROM public.state_object WHERE (type, key) = (%s, %s)"


class State(NamedTuple):
    """A state object as it is stored."""

    key: str
    object: Any
    clock: int
    at: datetime


def create(connection: Connection) -> None:
    """Create the table, if it is not there, and watch it: once for all nodes, as a migration does.

    The clocks are not told: a node's clock moves with each message, and the message about it would move it again.
    """
    connection.execute(TABLE)
    watch(connection, "public.state_object", TOPIC, without=["clock", "at"])


def put(connection: Connection, kind: str, key: str, content: object, at: datetime) -> None:
    """Set a state object to anything that JSON can hold."""
    connection.execute(PUT, [kind, key, Jsonb(content), at])


def advance(connection: Connection, kind: str, key: str, clock: int, at: datetime) -> None:
    """Say that who keeps this state object, if there is one, has received messages up to this clock."""
    connection.execute(ADVANCE, [clock, at, kind, key])


def find(connection: Connection, kind: str, prefix: str = "") -> list[State]:
    """Return the state objects of a type whose keys begin like this, by key."""
    return [State(*row) for row in connection.execute(FIND, [kind, prefix])]


def get(connection: Connection, kind: str, key: str) -> State | None:
    """Return one state object, None if there is none."""
    return next((state for state in find(connection, kind, key) if state.key == key), None)


def remove(connection: Connection, kind: str, key: str) -> bool:
    """Remove a state object; return whether there was one."""
    return connection.execute(REMOVE, [kind, key]).rowcount == 1
