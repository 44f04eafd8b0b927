"""What the tables say of a run: whether it was right, and how fast it was."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import class_row

from examples.flights.tables import business


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    check: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Figures:
    """How long the flights took from the first send to the last handler, and each from its send to its handler."""

    flights: int
    seconds: float
    p50_s: float
    p95_s: float
    p99_s: float


FIGURES = """
SELECT count(*) AS flights, extract(epoch FROM max(handled_at) - min(sent_at))::float8 AS seconds,
       percentile_cont(0.50) WITHIN GROUP (ORDER BY latency_s) AS p50_s,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY latency_s) AS p95_s,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_s) AS p99_s
FROM (SELECT *, extract(epoch FROM handled_at - sent_at)::float8 AS latency_s FROM ledger) AS l
"""


def verify(connection: psycopg.Connection, node: str) -> list[Check]:
    """Run verify.sql on the run's tables."""
    with connection.transaction(), connection.cursor(row_factory=class_row(Check)) as cursor:
        _look_at(cursor, node)
        return cursor.execute(Path(__file__).with_name("verify.sql").read_bytes()).fetchall()


def measure(connection: psycopg.Connection, node: str) -> Figures:
    """Read the run's figures from its ledger, which must not be empty."""
    with connection.transaction(), connection.cursor(row_factory=class_row(Figures)) as cursor:
        _look_at(cursor, node)
        [figures] = cursor.execute(FIGURES).fetchall()
        return figures


def flights_by_worker(connection: psycopg.Connection, node: str) -> dict[int, int]:
    """Return how many flights each process handled, in the order in which they came to work."""
    with connection.transaction(), connection.cursor() as cursor:
        _look_at(cursor, node)
        return dict(cursor.execute("SELECT worker, count(*) FROM ledger GROUP BY worker ORDER BY min(nth)").fetchall())


def _look_at(cursor: psycopg.Cursor[Any], node: str) -> None:
    cursor.execute("SELECT set_config('search_path', %s, true)", [f"{business(node)}, {node}"])
