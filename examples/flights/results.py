"""The results of a run, read from the tables alone: whether it was right, and how fast it was."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from mailroom.session import settings

from .tables import business


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the results."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Results:
    """The checks; the time from the first send to the last handler; and each flight's time from send to handler."""

    checks: list[Check]
    flights_by_worker: dict[int, int]
    flights_per_s: float
    seconds: float
    p50_s: float
    p95_s: float
    p99_s: float
    slowest_s: float


BY_WORKER = "SELECT worker, count(*) FROM ledger GROUP BY worker ORDER BY min(nth)"
FIGURES = """
SELECT count(*) / seconds, seconds, percentile_cont(0.50) WITHIN GROUP (ORDER BY latency_s),
       percentile_cont(0.95) WITHIN GROUP (ORDER BY latency_s), percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_s),
       max(latency_s)
FROM (SELECT extract(epoch FROM handled_at - sent_at)::float8 AS latency_s,
             extract(epoch FROM max(handled_at) OVER () - min(sent_at) OVER ())::float8 AS seconds FROM ledger) AS l
GROUP BY seconds
"""


def read_results(dsn: str, node: str) -> Results:
    """Return the results of a run that has ended."""
    with settings.connect(dsn, "demo") as connection, connection.cursor() as cursor:
        checks = verify(cursor, node)
        by_worker: dict[int, int] = dict(cursor.execute(BY_WORKER).fetchall())
        [figures] = cursor.execute(FIGURES).fetchall()
    return Results(checks, by_worker, *figures)


def verify(cursor: psycopg.Cursor[Any], node: str) -> list[Check]:
    """Run verify.sql on the run's tables, which its transaction then finds by their bare names."""
    cursor.execute("SELECT set_config('search_path', %s, true)", [f"{business(node)}, {node}"])
    rows = cursor.execute(Path(__file__).with_name("verify.sql").read_bytes())
    return [Check(*row) for row in rows]
