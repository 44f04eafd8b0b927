"""One look at a node for people who watch it live: rates, lag, what is in trouble, who works, and what failed last.

The server counts what comes into each table and goes out of it, so rates need no process that counts
(`mailroom.metrics.changes`). Each look reads few rows. How long the oldest messages wait takes longer, and is sampled
as the leader does for metrics: on a clock of max(5 s, 100 times its own duration).
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast
from uuid import UUID

from mailroom.doctor.examining import NOT_SEEN, telling
from mailroom.doctor.finding import Finding, Limits
from mailroom.doctor.kinds import KINDS
from mailroom.figures.alive import ALIVE, DATABASE, IS_ALIVE
from mailroom.figures.keys import KeyLook, reading_worst
from mailroom.figures.leaders import DispatcherStatus, reading_leaders
from mailroom.figures.statistics import reading_unknown
from mailroom.metrics import catalog, leader
from mailroom.metrics.catalog import reading_catalog
from mailroom.metrics.changes import OUTBOX, Changes, came_and_went, reading_changes
from mailroom.metrics.failing import INBOX_FAILING, Failing
from mailroom.metrics.family import Family, Samples
from mailroom.metrics.leader import INTERVAL_S, SHARE, Added, sampling
from mailroom.metrics.scrape import reading_node
from mailroom.sql import locks
from mailroom.sql.locked import LockedTable, reading_locked
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.waits import LONG_S
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

SHOWN = 20  # keys, batches and errors of a look
# D-metrics-9: What is in trouble on the live screen are findings of the doctor.
# The doctor's checks of which an auditor sees all, the worst first, and M005 and M001, as far as the role may see
# sessions. They are asked for with the ages. Who watches wants to know at once; as in the alert rules, a leader has its
# time, and so have workers that are there.
STRONG_LOCK, UNREAD = "M006", "M027"
TOLD = (
    *("M005", "M022", "M023", "M052", "M031", "M019"),
    *("M043", "M044", "M046", "M056", UNREAD, "M026", "M040", "M045", "M041", "M053", "M054", "M055", "M001"),
)
LIMITS = Limits(lock_s=LONG_S, unled_s=0, waiting_s=30, silent_s=0, failing_s=0, unread_s=5, late_s=300)
NAMED = 3  # things with one trouble that a look names; of more it says how many


@dataclass(frozen=True, slots=True)
class InboxLook:
    """An inbox. Rates are None at the first look. `waiting` is an estimate, None if the server has no statistics, as
    after a crash, and `oldest_s` is how long the oldest waits. Of one that reads a log both count what is unread there,
    and rates only what was diverted from it.

    For `failing_s` seconds all attempts have failed, as far as it was looked at. If it is `unread`, no worker is there.
    That it is `paused` was chosen by a person: it is a state, and no trouble.
    """

    name: str
    delivered_per_s: float | None
    reaped_per_s: float | None
    waiting: int | None
    oldest_s: float
    failing: int
    parked: int
    paused: bool
    failing_s: float = 0.0
    unread: bool = False

    @property
    def is_in_trouble(self) -> bool:
        """Whether an operator should look at it."""
        return bool(self.failing or self.failing_s or self.parked or self.unread or self.is_late)

    @property
    def is_late(self) -> bool:
        """Whether its workers do not keep up."""
        return self.oldest_s >= LIMITS.late_s and not (self.paused or self.unread)


@dataclass(frozen=True, slots=True)
class BatchLook:
    """A batch that a worker has in hand. `alive` is None if it is not known, as behind a pooler."""

    inbox: str
    host: str
    pid: int
    messages: int
    in_hand_s: float
    alive: bool | None


@dataclass(frozen=True, slots=True)
class ErrorLook:
    """A failed attempt: of which message, its class and what followed; no text, which may have values of a message."""

    at: datetime
    inbox: str
    key: str
    message_id: UUID
    error_class: str | None
    attempt: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A finding of the doctor, in a line: its id, what is wrong, and the command that helps or tells more."""

    id: str
    what: str
    command: str


@dataclass(frozen=True, slots=True)
class Look:
    """A node at one time. Rates are None at the first look; what is sampled is `sample_age_s` old.

    `processes` counts the worker processes of the database that are alive and not behind a pooler. Inboxes in trouble
    come first.
    """

    node: str
    schema: str
    at: datetime
    sent_per_s: float | None
    delivered_per_s: float | None
    reaped_per_s: float | None
    outbox_oldest_s: float
    scheduled: int
    parked_messages: int
    dead_letters: int
    sample_age_s: float
    processes: int
    leaders: tuple[DispatcherStatus, ...]
    troubles: tuple[Trouble, ...]
    inboxes: tuple[InboxLook, ...]
    keys: tuple[KeyLook, ...]
    batches: tuple[BatchLook, ...]
    errors: tuple[ErrorLook, ...]


BATCHES = Sql(
    """
WITH {alive}
SELECT w.inbox, w.host, w.pid::bigint, w.messages::bigint,
       extract(epoch FROM clock_timestamp() - w.claimed_at)::float8,
       CASE WHEN w.process_number IS NOT NULL THEN {is_alive} END AS is_alive
FROM {schema}.worker AS w ORDER BY is_alive, w.claimed_at LIMIT {shown}
""",
    columns=("text", "text", "bigint", "bigint", "float8", "boolean"),
    alive=ALIVE,
    is_alive=IS_ALIVE,
    alive_lock=locks.ALIVE,
    database=DATABASE,
    shown=SHOWN,
)
PROCESSES = Sql(
    "WITH {alive} SELECT pg_catalog.count(DISTINCT alive.number) FROM alive",
    columns=("bigint",),
    alive=ALIVE,
    alive_lock=locks.ALIVE,
    database=DATABASE,
)
# Replays are in the history too: a hundred of its rows are read, whatever they are.
ERRORS = Sql(
    """
SELECT a.at, a.inbox, a.key, a.message_id, a.error_class, a.attempt::bigint, a.outcome
FROM (SELECT * FROM {schema}.attempt ORDER BY id DESC LIMIT 100) AS a
WHERE a.outcome <> 'replay' ORDER BY a.id DESC LIMIT {shown}
""",
    columns=("timestamptz", "text", "text", "uuid", "text", "bigint", "text"),
    shown=SHOWN,
)


class Watch:
    """Looks at the node `schema` again and again. `monotonic` is its clock, in seconds.

    Each look is a step of an autocommit session, so that it holds no snapshot for longer than a statement takes.
    """

    def __init__(self, schema: str = DEFAULT_SCHEMA, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._schema = schema_name(schema)
        self._monotonic = monotonic
        self._added, self._failing = Added(self._schema), Failing()
        self._before: tuple[datetime, dict[str | None, Changes]] | None = None
        self._sample: dict[Family, Samples] = {}
        self._findings: list[tuple[str, Finding]] = []
        self._sampled_at = 0.0
        self._next_at = float("-inf")

    def looking(self) -> Operation[Look]:
        """Return what the node looks like now. It takes no lock that others wait for."""
        at = self._schema
        locked = yield from reading_locked(at)
        node, now = yield from reading_node(at)
        changes = yield from reading_changes(at)
        cheap = yield from reading_catalog(at)
        unknown = yield from reading_unknown(at)
        if self._monotonic() >= self._next_at:
            began = self._monotonic()
            self._sample = yield from sampling(at, self._added, self._failing)
            self._findings = yield from telling(at, TOLD, LIMITS)
            self._sampled_at = self._monotonic()
            self._next_at = self._sampled_at + max(INTERVAL_S, SHARE * (self._sampled_at - began))
        leaders = yield from reading_leaders(at)
        keys = tuple((yield from reading_worst(at, SHOWN)))
        batches = tuple(BatchLook(*row) for row in (yield BATCHES.at(schema=at)()))
        errors = tuple(ErrorLook(*row) for row in (yield ERRORS.at(schema=at)()))
        [(processes,)] = yield PROCESSES.at()()
        rates = per_second(self._before, (now, changes))
        self._before = now, changes
        # Somebody may reap by hand, which a rate tells.
        unread = {part for part, told in self._findings if told.id == UNREAD and rates and not _reaped(part, rates)}
        findings = [told for part, told in self._findings if told.id != UNREAD or part in unread]
        inboxes = _inboxes(cheap, self._sample, rates, unread, unknown)
        outbox_oldest_s = _only(self._sample[leader.OUTBOX_OLDEST])
        return Look(
            node=node,
            schema=at,
            at=now,
            sent_per_s=rates[OUTBOX][0] if rates else None,
            delivered_per_s=sum(each.delivered_per_s or 0.0 for each in inboxes) if rates else None,
            reaped_per_s=sum(each.reaped_per_s or 0.0 for each in inboxes) if rates else None,
            outbox_oldest_s=outbox_oldest_s,
            scheduled=int(_only(self._sample[leader.SCHEDULED])),
            parked_messages=int(_only(cheap[catalog.PARKED_MESSAGES])),
            dead_letters=int(sum(_by_label(cheap[catalog.DEAD_LETTERS]).values())),
            sample_age_s=max(self._monotonic() - self._sampled_at, 0.0),
            processes=processes,
            leaders=leaders,
            troubles=tuple(troubles(at, locked, findings)),
            inboxes=tuple(inboxes),
            keys=keys,
            batches=batches,
            errors=errors,
        )


def per_second(
    before: tuple[datetime, Mapping[str | None, Changes]] | None, after: tuple[datetime, Mapping[str | None, Changes]]
) -> dict[str | None, tuple[float, float]]:
    """Return how many rows a second each table got and lost between two looks; nothing at the first one.

    A table that is new, or whose statistics were reset, shows all that was counted since then.
    """
    if before is None or (after[0] - before[0]).total_seconds() <= 0:
        return {}
    seconds = (after[0] - before[0]).total_seconds()
    rates = {}
    for name, now in after[1].items():
        came, went = came_and_went(before[1].get(name, Changes(0, 0, 0)), now)
        rates[name] = came / seconds, went / seconds
    return rates


def _inboxes(
    cheap: Mapping[Family, Samples],
    sample: Mapping[Family, Samples],
    rates: Mapping[str | None, tuple[float, float]],
    unread: Collection[str],
    unknown: Collection[str],
) -> list[InboxLook]:
    oldest, fails = _by_label(sample[leader.INBOX_OLDEST]), _by_label(sample[INBOX_FAILING])
    of_logs = _by_label(sample[leader.INBOX_UNREAD])
    keys = {labels: int(cast(float, number)) for labels, number in sample[leader.INBOX_KEYS]}
    paused = _by_label(cheap[catalog.INBOX_PAUSED])
    found = []
    for name, waiting in _by_label(cheap[catalog.INBOX_MESSAGES]).items():
        delivered, reaped = rates.get(name, (0.0, 0.0)) if rates else (None, None)
        failing, parked = keys.get((name, "waiting"), 0), keys.get((name, "parked"), 0)
        waiting += of_logs.get(name, 0)
        # Something waits, and is not counted; what is unread of a log is.
        is_uncounted = name in unknown and name not in of_logs and oldest.get(name)
        about = None if is_uncounted else int(waiting)
        found.append(InboxLook(name, delivered, reaped, about, oldest.get(name, 0.0), failing, parked,
                               bool(paused[name]), fails.get(name, 0.0), name in unread))  # fmt: skip
    return sorted(found, key=_rank)


def _reaped(inbox: str, rates: Mapping[str | None, tuple[float, float]]) -> float:
    return rates.get(inbox, (0.0, 0.0))[1]


def _rank(each: InboxLook) -> tuple[bool, bool, float, int, float, str]:
    return (
        not each.is_in_trouble,
        not each.paused,
        -each.oldest_s,
        -(each.waiting or 0),
        -(each.reaped_per_s or 0.0),
        each.name,
    )


def troubles(schema: str, locked: Sequence[LockedTable], findings: Sequence[Finding]) -> Iterable[Trouble]:
    """Return what is in trouble, the worst first: what stops a node, then an inbox, then a key.

    Who keeps readers out of a table is before all else, which may follow from it. The doctor calls it a strong lock,
    and knows no more of it than since when the transaction is open, which an auditor may not see.
    """
    option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
    tables = [Trouble(STRONG_LOCK, f"{KINDS[STRONG_LOCK].what}: {each}", f"mailroom doctor{option}") for each in locked]
    yield from _few(tables, STRONG_LOCK, option)
    for each in (*TOLD, NOT_SEEN):
        yield from _few([_told(found) for found in findings if found.id == each], each, option)


def _told(found: Finding) -> Trouble:
    [line] = found.evidence
    # The last errors are on the screen.
    command = f"mailroom explain {found.id}" if found.command.startswith("mailroom top ") else found.command
    return Trouble(found.id, f"{found.what}: {line}" if line else found.what, command)


def _few(told: Sequence[Trouble], id: str, option: str) -> Iterable[Trouble]:
    yield from told[:NAMED]
    if len(told) > NAMED:
        yield Trouble(id, f"{len(told) - NAMED:,} more: {KINDS[id].what}", f"mailroom doctor{option}")


def _only(samples: Samples) -> float:
    [(_, value)] = samples
    return cast(float, value)


def _by_label(samples: Samples) -> dict[str, float]:
    return {label: cast(float, value) for (label,), value in samples}
