"""What the doctor finds, from which limits on it counts, and the form of a check."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from mailroom.errors import ConfigurationError
from mailroom.figures.logs import LogReading, reading_readers
from mailroom.sql.locked import reading_locked
from mailroom.sql.operation import PARAMETER, Operation, Sql
from mailroom.values.numbers import seconds, whole

SHOWN = 10  # lines of evidence of one finding; a node has thousands of tables
MOST = 2**62


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    `id` is M000 to M999 and stays the same when texts change: `mailroom explain M001` says what it means. `what` is
    the same for all findings of an id. `evidence` is a line per session, table or row, the first ten. `command` is
    what helps: a command for a shell, or SQL, which ends in a semicolon.
    """

    id: str
    what: str
    evidence: tuple[str, ...]
    command: str


def _limit(default: float, means: str) -> Any:
    return field(default=default, metadata={"means": means})


@dataclass(frozen=True, slots=True)
class Limits:
    """From which limit on something is a finding. What a healthy node under load reaches is below the defaults.

    Names that end in `_s` are seconds, those in `_share` a share of 1. Raises `ConfigurationError` for a negative one.
    """

    snapshot_s: float = _limit(300, "a transaction that keeps VACUUM from removing rows, in seconds")
    behind_xids: int = _limit(1_000_000, "what a slot or standby keeps from VACUUM, in transactions")
    wal_bytes: int = _limit(2**30, "WAL that a slot keeps, in bytes")
    lock_s: float = _limit(5, "a wait for a lock, or a transaction with a strong lock on a table, in seconds")
    dead_times: float = _limit(100, "dead rows of a table, as a multiple of its autovacuum threshold")
    vacuum_s: float = _limit(600, "how long a table with that many dead rows was not vacuumed, in seconds")
    frozen_xids: int = _limit(1_000_000_000, "the age of a database's oldest transaction; all writes end at 2^31")
    unled_s: float = _limit(60, "how long something waits while no process leads, in seconds")
    waiting_s: float = _limit(300, "how long something waits though a process leads, in seconds")
    lease_s: float = _limit(10, "how long a lease has expired whose session lives, in seconds")
    batch_s: float = _limit(600, "how long a worker has had its batch, in seconds")
    silent_s: float = _limit(60, "the age of a batch whose worker is silent, in seconds")
    failing_s: float = _limit(60, "how long messages of an inbox have failed at each try, in seconds")
    unread_s: float = _limit(600, "how long messages wait in an inbox that no worker reaps, in seconds")
    late_s: float = _limit(600, "how long messages wait in an inbox whose workers are there, in seconds")
    held_s: float = _limit(3600, "how long an inbox has held disk of a log beyond its days, in seconds")
    lane_s: float = _limit(600, "how much further other lanes of a log were read than one, in seconds")
    lost_s: float = _limit(604_800, "for how long it is told that a log dropped what was unread, in seconds")
    bulk_s: float = _limit(300, "how long nothing of a large batch of Spark has moved, in seconds")
    set_back_s: float = _limit(3600, "for how long it is told that the server's clock was set back, in seconds")
    connections_share: float = _limit(0.9, "connections in use, as a share of those there may be")
    queue_share: float = _limit(0.1, "the notification queue in use, as a share of it")
    sequence_share: float = _limit(0.9, "numbers that a sequence has used up, as a share of all")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith(("_xids", "_bytes")):
                whole(value, each.name, 0, MOST, ConfigurationError)
            else:
                seconds(value, each.name, MOST, zero=True)


@dataclass(slots=True)
class Examination:
    """One look at a node: which, from which limits on something counts, and what earlier checks have read.

    How the readers of logs stand takes long where there are hundreds, and several checks ask for it.
    """

    schema: str
    limits: Limits
    _readers: list[LogReading] | None = None

    def readers(self) -> Operation[list[LogReading]]:
        """Return the inboxes that read logs, but those that a lock keeps from being read."""
        if self._readers is None:
            self._readers = yield from reading_readers(self.schema, (yield from reading_locked(self.schema)))
        return self._readers


# What a check finds: for each thing its part of the command, and its line of evidence.
Found: TypeAlias = list[tuple[str, str]]
FOUND = ("text", "text")
Asking: TypeAlias = Callable[[Examination], Operation[Found]]


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """A check: how it looks, and the command that helps.

    In the command `{schema}` is the node's schema, `{first}` the part of the first thing that was found, and `{all}`
    those of all.
    """

    id: str
    asking: Asking
    command: str
    of_tables: bool = False  # it reads tables of the node, and not only catalogs
    ends: bool = False  # parts that are process ids are those of sessions to end


def asking(sql: Sql, **values: object) -> Asking:
    """Return how a check looks that is one statement; its values are limits by their names, and those given here."""
    wanted = {match[1] for match in PARAMETER.finditer(sql.template)} - set(values)

    def ask(look: Examination) -> Operation[Found]:
        given = values | {name: getattr(look.limits, name) for name in wanted}
        rows = yield sql.at(schema=look.schema)(**given)
        return [(part, line) for part, line in rows]

    return ask


def finding(check_id: str, what: str, found: Found, command: str, schema: str) -> Finding:
    """Return the finding of what a check has found, which is not empty."""
    lines = [line for _, line in found]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN:,} more"]
    parts = [part for part, _ in found if part]
    filled = {"schema": schema, "first": parts[0] if parts else "", "all": ", ".join(dict.fromkeys(parts[:SHOWN]))}
    if not parts and ("{first}" in command or "{all}" in command):
        command = ""
    for name, text in filled.items():
        command = command.replace(f"{{{name}}}", text)
    return Finding(check_id, what, tuple(lines), command or f"mailroom explain {check_id}")
