"""One look at the metrics of a node: what a process counts of it, and what is asked of the database each time."""

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

import psycopg

from mailroom.errors import MailroomError
from mailroom.metrics.family import Family, Samples
from mailroom.metrics.process import ProcessMetrics
from mailroom.roles.advice import advise
from mailroom.session import settings
from mailroom.session.home import Home
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from mailroom.sql.sight import NODE_ROW, the_one
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

log = logging.getLogger("mailroom.metrics")

# A scrape is to cost little, and never waits for a lock.
SCRAPE_SESSION = settings.SESSION | {"statement_timeout": "2s", "lock_timeout": "100ms"}

UP = Family("database_up", "gauge", "Whether the database answered this scrape.")

Reading: TypeAlias = Callable[[str], Operation[dict[Family, Samples]]]

NODE = Sql("SELECT name, clock_timestamp() FROM {schema}.node", columns=("text", "timestamptz"))


def reading_node(schema: str) -> Operation[tuple[str, datetime]]:
    """Return the node's name, and the time by its database."""
    name, now = the_one((yield NODE.at(schema=schema)()), NODE_ROW, schema)
    return name, now


class Scrape:
    """Reads the metrics of one node, over a session of its own that it keeps. Threads may share it.

    `home` says where the database is, which a worker knows only once it has connected. `process` is what this process
    counts, `asking` what is asked of the database at each look, and `others` give more.
    """

    def __init__(
        self,
        home: Callable[[], Home],
        process: ProcessMetrics,
        *,
        schema: str = DEFAULT_SCHEMA,
        asking: Reading | None = None,
        others: Sequence[Callable[[], dict[Family, Samples]]] = (),
    ) -> None:
        self._home = home
        self._schema = schema_name(schema)
        self._process = process
        self._asking = asking
        self._others = others
        self._lock = threading.Lock()
        self._repeats = Repeats()
        self._connection: psycopg.Connection | None = None
        self._node: str | None = None

    def read(self) -> tuple[str, dict[Family, Samples]] | None:
        """Return the node's name and its metrics; None before the database has said once what the name is."""
        with self._lock:  # one look at a time, however many ask
            metrics: dict[Family, Samples] = {}
            try:
                metrics |= self._asked()
            except (psycopg.Error, MailroomError) as error:  # the next look connects anew
                self._disconnect()
                self._tell(error)
            else:
                self._repeats.over()
            if self._node is None:
                return None
            metrics |= {UP: [((), int(self._connection is not None))]} | self._process.read()
            for other in self._others:
                metrics |= other()
            return self._node, metrics

    def close(self) -> None:
        """Close the session."""
        with self._lock:
            self._disconnect()

    def _tell(self, error: Exception) -> None:
        advice = advise(error, "metrics", schema=self._schema)
        if (again := self._repeats.struck(why := cause(error))) is not None:
            log.warning("metrics: the database was not asked (%s)%s%s", why, again, f". {advice}" if advice else "")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _asked(self) -> dict[Family, Samples]:
        if self._connection is None:
            self._connection = self._home().connect("metrics", SCRAPE_SESSION)
        before = datetime.now(UTC)
        self._node, there = run(self._connection, reading_node(self._schema))
        self._process.offset = there - before
        return {} if self._asking is None else run(self._connection, self._asking(self._schema))
