"""The report: what was executed, skipped and not reached, by kind of fault and role; and the result."""

import re
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Column, Table

from tests.faults.invariants import Violation

STEADY = ("dispatcher:", "linked:", "worker:")
# A daemon that is not let in at the start; or a worker that is killed by a message that kills each worker.
START = re.compile(r"^(dispatcher|linked): ConnectionFailed|^worker: killed$")

ROLES = ("dispatcher", "worker", "reaper", "writer", "rewinder")

# Every kind there is (hazards, B.3; one node), so that a kind that was left out is seen.
KINDS = {
    "F1": "kill -9 of a process", "F2": "SIGSTOP, SIGCONT", "F3": "pg_terminate_backend, storms too",
    "F4": "pg_cancel_backend", "F5": "kill -9 of a backend: crash restart", "F6": "kill -9 of the whole server",
    "F7": "stop immediate, fast; restart", "F8": "connection cut before the bytes are sent, or COMMIT is forwarded",
    "F9": "COMMIT forwarded, answer swallowed", "F10": "COMMIT delayed", "F11": "black hole", "F12": "latency",
    "F13": "half a protocol message", "F14": "PgBouncer killed, reloaded", "F15": "disk full",
    "F16": "too many connections", "F18": "LOCK TABLE, VACUUM FULL, REINDEX CONCURRENTLY",
    "F19": "long reading, writing, prepared and other-database transactions", "F21": "clock jumps", "F22": "power cut",
    "F26": "SERIALIZABLE, REPEATABLE READ, injected 40001 and 40P01", "F27": "poison corpus",
    "F29": "lost doorbells", "F30": "cancelled at an await", "F31": "an error injected at a statement or await",
    "F32": "SIGTERM: rolling restart", "F33": "unknown commits, resolved", "F34": "parked keys replayed under load",
    "F35": "leader killed, paused: lease as shipped", "F36": "executables past the trigger, settings left by functions",
    "F37": "slow disk: each flush takes long, or every row", "F38": "busy cores: everything takes many times as long",
    "F39": "handlers fail with errors like the database's: 55P03, 40001, own session ended",
    "F40": "executors cancelled while they wait for rows", "F41": "inboxes made, refused and removed under load",
    "F42": "handlers that end the transaction of their batch", "F43": "a stranger hoards advisory locks",
    "F44": "the lock table is full", "F45": "rows copied to where their sequences begin anew",
    "F46": "the next release's migration beside the programs",
    "F47": "a worker's program uses up the pool that it works on", "F48": "sessions short by one or two",
    "F49": "inboxes made in a log's past, and a log that drops what is unread",
}  # fmt: skip


def unasked(endings: Counter[str]) -> list[Violation]:
    """Return what is wrong with how processes ended that nobody struck: daemons and workers do not."""
    rows = tuple((times, each) for each, times in endings.items() if each.startswith(STEADY) and not START.search(each))
    return [Violation("I17", "no daemon and no worker ends by itself once it has begun", rows)] if rows else []


@dataclass(slots=True)
class Report:
    """What a campaign did; free to share between threads."""

    executed: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and role
    not_reached: Counter[tuple[str, str]] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # a kind, and why
    places: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # failpoints struck, by role
    missed: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    violations: list[Violation] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)  # processes that ended though nobody struck them
    liveness: dict[str, float] = field(default_factory=dict)
    messages: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)  # what one lane's fault did to another lane
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def did(self, kind: str, role: str, times: int = 1) -> None:
        """Count faults that happened."""
        with self._lock:
            self.executed[kind, role] += times

    def did_not(self, kind: str, role: str) -> None:
        """Count a failpoint that was armed and not passed in time."""
        with self._lock:
            self.not_reached[kind, role] += 1

    def skip(self, kind: str, reason: str) -> None:
        """Say why a kind could not be had."""
        with self._lock:
            self.skipped[kind] = reason

    def place(self, role: str, name: str, *, hit: bool) -> None:
        """Note that a failpoint was struck, or could not be."""
        with self._lock:
            (self.places if hit else self.missed)[role].add(name)

    def wrong(self, violation: Violation) -> None:
        """Note a violation that was seen on the way."""
        with self._lock:
            self.violations.append(violation)

    def ended(self, endings: Counter[str]) -> None:
        """Take how processes ended that nobody struck."""
        self.endings.update(endings)
        self.violations += unasked(endings)

    @property
    def kinds(self) -> set[str]:
        """The kinds that were executed."""
        return {kind for (kind, _), times in self.executed.items() if times}

    @property
    def faults(self) -> int:
        """How many faults there were."""
        return sum(self.executed.values())

    def print(self, console: Console) -> None:
        """Print the tables."""
        table = Table(
            *("kind", Column("fault", min_width=48), *ROLES), "elsewhere", "not reached", "skipped",
            title="Faults executed, by the role they struck",
        )  # fmt: skip
        for kind, title in KINDS.items():
            struck = [self.executed[kind, role] for role in ROLES]
            elsewhere = sum(times for (each, _), times in self.executed.items() if each == kind) - sum(struck)
            missed = sum(times for (each, _), times in self.not_reached.items() if each == kind)
            reason = self.skipped.get(kind, "" if kind in self.kinds else "not executed in this run")
            table.add_row(kind, title, *(str(times or "") for times in (*struck, elsewhere, missed)), reason)
        console.print(table)
        places = Table("role", "failpoints struck", "never reached", title="Failpoints")
        for role in sorted({*self.places, *self.missed}):
            missing = sorted(self.missed[role] - self.places[role])
            places.add_row(role, str(len(self.places[role])), ", ".join(missing))
        console.print(places)
        console.print(f"messages: {dict(self.messages)}")
        console.print(f"slowest recoveries, s: { {what: round(s, 1) for what, s in sorted(self.liveness.items())} }")
        if self.endings:
            console.print("processes that ended by themselves:")
            for ending, times in self.endings.most_common():
                console.print(f"  {times} x {ending}", markup=False)
        if self.disturbed:
            console.print(f"lanes that disturbed each other: {dict(self.disturbed.most_common(10))}", markup=False)
        for note in self.notes:
            console.print(note, markup=False)
        for violation in self.violations:
            console.print(f"VIOLATION {violation}", markup=False, style="red")
        console.print(
            f"{self.faults} faults of {len(self.kinds)} kinds, {len(self.violations)} violations", style="bold"
        )
