"""Who works at a node: its workers, also idle ones, and who leads its lanes or stands by for them."""

from dataclasses import dataclass

from mailroom.figures.workers import LaneSeen, WorkerSeen, reading_lanes, reading_workers
from mailroom.schema import checking
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import Operation
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

__all__ = ["AtWork", "LaneSeen", "WorkerSeen", "at_work", "at_work_async"]


@dataclass(frozen=True, slots=True)
class AtWork:
    """Who works at a node."""

    workers: tuple[WorkerSeen, ...]
    lanes: tuple[LaneSeen, ...]


def reading_at_work(*, schema: str = DEFAULT_SCHEMA) -> Operation[AtWork]:
    """Return who works at the node `schema`, by their sessions, locks and entries; it waits for no lock.

    Workers behind a pooler have no lock, and are listed while they have a batch. Since when somebody is there, and from
    which address, is told to roles that may see other sessions (`pg_read_all_stats`).
    """
    return _reading_at_work(schema_name(schema))


def _reading_at_work(schema: str) -> Operation[AtWork]:
    yield from checking(schema)
    workers = yield from reading_workers(schema)
    return AtWork(tuple(workers), tuple((yield from reading_lanes(schema))))


# What users call: on a sync and on an async connection.
at_work, at_work_async = on_connections("at_work", reading_at_work)
