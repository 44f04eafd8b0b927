"""Who leads the lanes of a node. Beside the lanes themselves, only this module reads the table `lease`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from mailroom.sql.operation import Operation, Sql, filled
from mailroom.values.readable import ReadableRepr

Role: TypeAlias = Literal["dispatcher", "executor", "links"]

TOLD_S = 3600.0  # for how long it is told that the clock was set back


@dataclass(frozen=True, slots=True)
class LaneFailure:
    """What a leader fails with: why, without values of messages, how often, and for how many seconds.

    `run` is the command that helps, where it is known.
    """

    why: str
    run: str
    times: int
    for_s: float

    def __str__(self) -> str:
        return f"has failed {self.times:,} times in {self.for_s:.0f} s: {self.why}"


@dataclass(frozen=True, slots=True, repr=False)
class DispatcherStatus(ReadableRepr):
    """The dispatcher, executor or lane `links` that leads; if `leads` is false, the last one that led.

    `role` says which of them it is. `state` is awake, asleep or stopped, as of its last renewal of the lease.
    `lease_left_s` is how long the lease is still valid, negative after it has expired. `counts` are its totals.
    `origins` is what the lane `links` does with each node that it reads. `failing` is what it fails with again and
    again, None while it works.
    """

    role: str
    leads: bool
    state: str
    host: str
    pid: int
    epoch: int
    lease_left_s: float
    counts: dict[str, int]
    origins: dict[str, str] = field(default_factory=dict)
    failing: LaneFailure | None = None


class LeaderRow(NamedTuple):
    """A row of `LEADERS`."""

    role: str
    leads: bool
    state: str
    host: str
    pid: int
    epoch: int
    lease_left_s: float
    counts: str


LEADERS = Sql(
    """
SELECT role, until > clock_timestamp(), state, host, pid::bigint, epoch,
       extract(epoch FROM until - clock_timestamp())::float8, counts::text
FROM {schema}.lease WHERE role = ANY (%(roles)s::text[]) ORDER BY role
""",
    into=LeaderRow,
)


def reading_leaders(schema: str, roles: Sequence[str] = get_args(Role)) -> Operation[tuple[DispatcherStatus, ...]]:
    """Return who leads in each of these roles, or did so last, by role. A role that nobody has taken yet has none."""
    rows: list[LeaderRow] = LEADERS.named((yield LEADERS.at(schema=schema)(roles=list(roles))))
    return tuple(_status(row) for row in rows)


def _status(row: LeaderRow) -> DispatcherStatus:
    totals: dict[str, Any] = json.loads(row.counts)
    origins, told = totals.pop("origins", {}), totals.pop("failing", None)
    failing = None if told is None else LaneFailure(told["why"], told["run"], told["times"], told["for_s"])
    return DispatcherStatus(*row[:-1], totals, origins, failing)


class HeldLease(NamedTuple):
    """Whether somebody leads in a role, and for how long the lease is still valid; negative once it has expired."""

    role: str
    leads: bool
    left_s: float


# For each scrape: without the counts, which name each node that is read.
HELD = Sql(
    """
SELECT role, until > clock_timestamp(), extract(epoch FROM until - clock_timestamp())::float8 FROM {schema}.lease
""",
    into=HeldLease,
)


def reading_held(schema: str) -> Operation[list[HeldLease]]:
    """Return which roles somebody has taken."""
    return HELD.named((yield HELD.at(schema=schema)()))


# A part of a larger statement: whether somebody leads as `role`.
LEADS = "EXISTS (SELECT FROM {schema}.lease WHERE role = '{role}' AND until > clock_timestamp())"
DISPATCHED = Sql("SELECT {leads}", columns=("boolean",), leads=filled(LEADS, role="dispatcher"))


def is_dispatched(schema: str) -> Operation[bool]:
    """Return whether a dispatcher leads."""
    [(leads,)] = yield DISPATCHED.at(schema=schema)()
    return bool(leads)


# Parts of larger statements: the lease `l` of a role, and the leases with the sessions `a` that renew them.
LEASE_OF = "LEFT JOIN {schema}.lease AS l ON l.role = {role}"
WITH_SESSIONS = (
    "{schema}.lease AS l JOIN pg_stat_activity AS a ON a.pid = l.backend_pid AND a.backend_start = l.backend_from"
)
# Since when something waits for each role, and who leads it. The oldest row of an outbox, by its position: nobody sorts
# a backlog for it.
LED = filled(
    """
WITH waiting (role, since) AS (
    SELECT 'dispatcher', least((SELECT o.sent_at FROM {schema}.outbox AS o ORDER BY o.position LIMIT 1),
                               (SELECT min(s.deliver_at) FROM {schema}.scheduled AS s))
    UNION ALL SELECT 'executor', (SELECT o.sent_at FROM {schema}.outbox_executable AS o ORDER BY o.position LIMIT 1)
    UNION ALL SELECT 'links', least(
        (SELECT min(r.created_at) FROM {schema}.origin AS r WHERE r.state = 'open'),
        (SELECT min(k.created_at) FROM {schema}.link AS k JOIN {schema}.bridge_out AS b ON b.link = k.number
         WHERE k.state = 'open'))),
led AS (
    SELECT w.role, w.since, l.until, l.state, l.host, l.pid, l.backend_pid, l.counts -> 'failing' AS failing
    FROM waiting AS w {lease_of})""",
    lease_of=filled(LEASE_OF, role="w.role"),
)


@dataclass(frozen=True, slots=True)
class ClockSetBack:
    """The server's clock was set back by about `by_s` seconds, which was noticed at `at`.

    `keys` counts the keys that would have waited for as long, and were brought back to their backoff.
    """

    at: datetime
    by_s: float
    keys: int


# Who leads notes it in the lease. A time of its own that lies ahead tells of a clock that was set back once more, and
# which somebody else notes.
NOTED = """(
    SELECT max(set_back_at) AS at, max(set_back_by) AS by, pg_catalog.sum(brought_back)::bigint AS keys
    FROM {schema}.lease
    WHERE set_back_at BETWEEN clock_timestamp() - %(set_back_s)s::float8 * interval '1 s' AND clock_timestamp()
    HAVING count(*) > 0)"""
SET_BACK = Sql(
    "SELECT s.at, extract(epoch FROM s.by)::float8, s.keys FROM {noted} AS s", into=ClockSetBack, noted=NOTED
)


def reading_set_back(schema: str) -> Operation[ClockSetBack | None]:
    """Return by how much the clock was set back within the last hour, None if it was not."""
    rows = yield SET_BACK.at(schema=schema)(set_back_s=TOLD_S)
    return SET_BACK.named(rows)[0] if rows else None
