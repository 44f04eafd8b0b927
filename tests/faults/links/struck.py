"""What is struck in the campaigns of links and bridges: a node's server, its daemons, and the networks before it."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import sqlalchemy

from mailroom import schema
from mailroom.node.identity import rename_node
from tests.faults.actors import Actor
from tests.faults.host import Host
from tests.faults.network import Network

DAEMONS = 2  # per node
# A crash loses all that nothing has made durable: nobody writes it in the background. What was written is kept by the
# kernel, since only processes are killed, so fsync would make no difference but in time.
SETTINGS = {
    "shared_buffers": "64MB", "fsync": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB",
}  # fmt: skip
LOST = (psycopg.OperationalError, psycopg.InterfaceError)

# No constraints: a ledger that refused a duplicate would hide it. `turn` rises in the order in which things are
# handled, along a key and in a total inbox, since each transaction draws it while it has them locked.
LEDGERS = """
CREATE SCHEMA ring;
CREATE SEQUENCE ring.turn;
CREATE TABLE ring.sent (id uuid NOT NULL, topic text NOT NULL, key text NOT NULL, nth bigint NOT NULL, cause uuid);
CREATE TABLE ring.handled (
    inbox text NOT NULL, id uuid NOT NULL, origin uuid NOT NULL, key text NOT NULL, clock bigint NOT NULL,
    sent_clock bigint NOT NULL, turn bigint NOT NULL DEFAULT nextval('ring.turn'));
"""
LEADING = "SELECT role, pid FROM mailroom.lease WHERE until > clock_timestamp() AND role IN ('dispatcher', 'links')"


class StruckNode:
    """One node. `networks[i]` is what lies between its server and all daemons number i."""

    others: Sequence["StruckNode"] = ()

    def __init__(self, home: Path, name: str, seed: int) -> None:
        self.name = name
        self.host = Host(home / name, settings=SETTINGS)
        self.networks: list[Network] = []
        self.daemons: list[Actor] = []
        self.id = UUID(int=0)
        self.server = threading.Lock()  # held by who takes it down, until it is up again
        self._seed = seed

    def start(self) -> None:
        """Start the server and make the node."""
        self.host.start()
        engine = sqlalchemy.create_engine(
            self.host.dsn.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=sqlalchemy.NullPool
        )
        with engine.begin() as migrating:
            schema.migrate(migrating)
        server = urlsplit(self.host.dsn)
        for nth in range(DAEMONS):
            seed = self._seed + nth
            self.networks.append(Network(server.hostname or "127.0.0.1", server.port or 5432, seed))
        with self.host.session() as session, session.transaction():
            rename_node(session, self.name, actor="campaign")
            session.execute(LEDGERS)
            [(self.id,)] = session.execute("SELECT id FROM mailroom.node").fetchall()

    def bring_back(self) -> None:
        """Start the server again."""
        self.host.start()
        for network in self.networks:
            network.lead_to(urlsplit(self.host.dsn).port or 5432)

    def dsn(self, nth: int) -> str:
        """Return the way that daemons number `nth` take to it."""
        return self.networks[nth].dsn(self.host.dsn)

    def close(self) -> None:
        """End all of it."""
        for daemon in self.daemons:
            daemon.end()
        for network in self.networks:
            network.close()
        self.host.close()

    def leaders(self) -> Mapping[str, Actor]:
        """Return which daemon leads in which role, as far as one does."""
        with self.host.session() as session:
            pids = dict(session.execute(LEADING).fetchall())
        return {role: each for role, pid in pids.items() for each in self.daemons if each.pid == pid}

    def clock(self) -> int:
        """Return the clock, which each delivery and each reception moves."""
        with self.host.session() as session:
            [(clock,)] = session.execute("SELECT last_value FROM mailroom.clock").fetchall()
        return int(clock)

    def known_elsewhere(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return what other nodes rely on of this one, in the form of `forgotten`."""
        return {}, {}

    def forgotten(self, told: Mapping[str, int], read: Mapping[str, int]) -> list[str]:
        """Return what this node has lost though others may rely on it; to be asked when it has crashed."""
        return []
