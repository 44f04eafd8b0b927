"""A node for one run of a measurement: a schema of its own, filled and emptied by the product itself."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import dispatcher
from mailroom import create_inbox
from mailroom import schema as node_schema
from mailroom.registry.inboxes import Order
from mailroom.session import settings
from mailroom.sql import locks

from .workload import INBOX, KEY, KEYS, VALUE

MAX_ATTEMPTS = 3  # keys that fail on purpose are parked within seconds


@dataclass(frozen=True, slots=True)
class Node:
    """A migrated schema with an empty inbox `INBOX`."""

    dsn: str
    schema: str

    @property
    def outbox(self) -> str:
        """The outbox table."""
        return f"{self.schema}.outbox"

    @property
    def partition(self) -> str:
        """The inbox's table."""
        return f"{self.schema}.inbox_{INBOX}"

    def connect(self, *, autocommit: bool = False, role: str = "bench") -> psycopg.Connection:
        """Open a session with the settings of the product's own."""
        return settings.connect(self.dsn, role, autocommit=autocommit)

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.connect(autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the lock "awake", so that no commit rings the doorbell."""
        table = locks.key(f"'{self.outbox}'::regclass")
        with self.connect(autocommit=True) as connection:
            connection.execute(f"SELECT pg_advisory_lock({locks.AWAKE}, {table})".encode())
            yield

    def is_drained(self) -> bool:
        """Return whether everything sent was delivered and reaped."""
        with self.connect(autocommit=True) as connection:
            statement = f"SELECT NOT EXISTS (SELECT FROM {self.outbox}) AND NOT EXISTS (SELECT FROM {self.partition})"
            return connection.execute(statement.encode()).fetchone() == (True,)

    def send(self, messages: int, keys: int = KEYS, topic: str = INBOX) -> None:
        """Commit messages into the outbox by one statement, without ringing the doorbell."""
        with self.connect() as connection:
            connection.execute("SET LOCAL mailroom.notify = off")
            connection.execute(
                f"INSERT INTO {self.outbox} (topic, key, value) SELECT '{topic}', {KEY}, %(value)s::bytea "
                "FROM generate_series(0, %(messages)s - 1) AS nth".encode(),
                {"keys": keys, "value": VALUE, "messages": messages},
            )

    def send_one_key(self, key: str, messages: int) -> None:
        """Commit messages of one key into the outbox, without ringing the doorbell."""
        with self.connect() as connection:
            connection.execute("SET LOCAL mailroom.notify = off")
            connection.execute(
                f"INSERT INTO {self.outbox} (topic, key, value) SELECT '{INBOX}', %(key)s::text, %(value)s::bytea "
                "FROM generate_series(1, %(messages)s)".encode(),
                {"key": key, "value": VALUE, "messages": messages},
            )

    def deliver(self) -> None:
        """Deliver everything in the outbox."""
        dispatcher.deliver_all(self.dsn, schema=self.schema)


@contextmanager
def fresh_node(dsn: str, order: Order = "key") -> Iterator[Node]:
    """Create a node under a name of its own, after a checkpoint, and drop it with all its data afterwards."""
    node = Node(dsn, f"bench_{secrets.token_hex(6)}")
    # A checkpoint, so that every run, of the product and of the floor, starts with the same amount of WAL to write.
    node.execute("CHECKPOINT")
    engine = create_engine("postgresql+psycopg://", creator=node.connect, poolclass=NullPool)
    try:
        with engine.begin() as connection:
            node_schema.migrate(connection, schema=node.schema)
            create_inbox(
                connection, INBOX, schema=node.schema, max_attempts=MAX_ATTEMPTS, backoff_max_s=60, order=order
            )
        yield node
    finally:
        node.execute(f"DROP SCHEMA IF EXISTS {node.schema} CASCADE")
