"""Writers and consumers whose COMMITs are lost at random, on either side of the server, and what became of each.

`run_unknown_commits` is as long as its caller wants: a test runs some hundreds, a soak thousands. By hand, on a
migrated database that nobody else uses: `python -m tests.support.unknown_commits DSN UNKNOWN SEED`.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock
from uuid import UUID

import psycopg

from dispatcher import deliver_all
from inbox.by_key.claim import Share
from inbox.claims import Claims
from mailroom import Outcome, create_inbox
from mailroom.session import commit
from mailroom.sql.operation import Operation, Sql
from tests.support.committing import client
from tests.support.proxy import CommitFault, proxied

MESSAGES = 200  # of one round: sent, delivered, reaped
KEYS = 20
HELD_S = 0.02  # by so much a COMMIT is late whose client is gone: often the resolver is there before it
# In percent. Lost before the server or after it, about as often; the resolvers' own COMMITs are no better off.
FAULTS = {CommitFault.NONE: 40, CommitFault.CUT: 30, CommitFault.SWALLOW: 20, CommitFault.HOLD: 10}
SESSIONS = ("psycopg pool", "Session psycopg2", "async psycopg", "async AsyncConnection asyncpg")

# No constraint: nothing but `atomically` keeps a message from standing there twice.
LEDGERS = ("sent_ledger", "reaped_ledger")
NOTE = Sql("INSERT INTO {ledger} VALUES (%(message)s::bigint, %(run)s::bigint)")
SEND = Sql(
    "INSERT INTO mailroom.outbox (topic, key, value_json) VALUES ('numbers', %(key)s::text, %(value)s::text::jsonb)"
)


@dataclass(slots=True)
class Counts:
    """What happened; `violations` says in words what must not have."""

    seed: int
    messages: int = 0
    runs: int = 0
    unknown: int = 0
    committed: int = 0
    rolled_back: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def run_unknown_commits(dsn: str, *, unknown: int, seed: int) -> Counts:
    """Lose COMMITs until `unknown` of them had to be asked about, and compare every answer with the ledger.

    `dsn` is the URL of a migrated database, left with the ledgers and the inbox `numbers` in it.
    """
    with psycopg.connect(dsn) as connection:
        create_inbox(connection, "numbers")
        for ledger in (*LEDGERS, "idle_ledger"):
            connection.execute(f"CREATE TABLE {ledger} (message bigint, run bigint)")
    with proxied(dsn) as (proxy, proxied_dsn):
        chance = random.Random(seed)
        proxy.at_commits(lambda: chance.choices(list(FAULTS), list(FAULTS.values()))[0], held_s=HELD_S)
        losing = _Losing(dsn, proxied_dsn, seed)
        with losing.verdicts_checked():
            while losing.counts.unknown < unknown and not losing.counts.violations:
                losing.round()
                losing.check()
        losing.ask_again()
        losing.counts.faults = dict(Counter(fault.name for fault in proxy.commits))
    return losing.counts


class _Losing:
    """One run; its sessions go through the proxy, and the ledgers are read past it."""

    def __init__(self, dsn: str, proxied_dsn: str, seed: int) -> None:
        self.counts = Counts(seed)
        self._connect = partial(psycopg.connect, dsn)
        self._dsn = dsn
        self._proxied_dsn = proxied_dsn
        self._lock = threading.Lock()
        self._verdicts: dict[UUID, Outcome] = {}
        self._session = threading.local()  # .wrote: ledger, message and run of the thread's last transaction

    def round(self) -> None:
        """Send messages from all sessions, deliver them, and reap them from all sessions until none is left."""
        first = self.counts.messages + 1
        self.counts.messages += MESSAGES
        waiting = iter(range(first, first + MESSAGES))
        with ThreadPoolExecutor(len(SESSIONS)) as threads:
            list(threads.map(lambda kind: self._until_done(kind, lambda: self._sending(waiting)), SESSIONS))
            deliver_all(self._dsn)
            list(threads.map(lambda kind: self._until_done(kind, lambda: self._reaping), SESSIONS))

    def check(self) -> None:
        """Compare the ledgers with what was to be done."""
        with self._connect() as connection:
            for ledger in LEDGERS:
                found = Counter(number for (number,) in connection.execute(f"SELECT message FROM {ledger}"))
                odd = [number for number in range(1, self.counts.messages + 1) if found[number] != 1]
                if odd or found.total() != self.counts.messages:
                    self.counts.violations.append(f"{ledger}: not once each: {odd[:20]}, {found.total()} in all")
            for table in ("outbox", "inbox", "dead_letter"):
                left = connection.execute(f"SELECT count(*) FROM mailroom.{table}").fetchone()
                if left != (0,):
                    self.counts.violations.append(f"{table}: {left} messages left")

    def ask_again(self) -> None:
        """Ask once more about every COMMIT that was lost: the answer never changes."""
        for token, verdict in self._verdicts.items():
            if (now := commit.resolve(self._connect, token)) != verdict:
                self.counts.violations.append(f"{token}: was {verdict}, is {now}")

    @contextmanager
    def verdicts_checked(self) -> Iterator[None]:
        """Compare each verdict with the ledger at the moment in which `atomically` gets it."""
        resolve, resolve_async = commit.resolve, commit.resolve_async

        def checked(connect: Any, token: UUID, **options: Any) -> Outcome:
            return self._checked(token, resolve(connect, token, **options))

        async def checked_async(connect: Any, token: UUID, **options: Any) -> Outcome:
            return self._checked(token, await resolve_async(connect, token, **options))

        with (
            mock.patch.object(commit, "resolve", checked),
            mock.patch.object(commit, "resolve_async", checked_async),
        ):
            yield

    def _checked(self, token: UUID, verdict: Outcome) -> Outcome:
        ledger, message, run = self._session.wrote
        with self._connect() as connection:
            query = f"SELECT count(*) FROM {ledger} WHERE message = %s AND run = %s"
            row = connection.execute(query, [message, run]).fetchone()
        with self._lock:
            self.counts.unknown += 1
            self.counts.committed += verdict == "committed"
            self.counts.rolled_back += verdict == "rolled back"
            if row != (verdict == "committed",):
                self.counts.violations.append(f"{token}: {verdict}, and {ledger} has {row} rows of {message}")
            self._verdicts[token] = verdict
        return verdict

    def _until_done(self, kind: str, next_work: Callable[[], Callable[[], Operation[bool]] | None]) -> None:
        with client(kind, self._proxied_dsn) as caller:
            while (work := next_work()) is not None and caller.atomically(work, attempts=100):
                pass

    def _sending(self, waiting: Iterator[int]) -> Callable[[], Operation[bool]] | None:
        with self._lock:
            number = next(waiting, None)
        return None if number is None else partial(self._send, number)

    def _send(self, number: int) -> Operation[bool]:
        yield from self._note("sent_ledger", number)
        yield SEND.at()(key=f"key {number % KEYS}", value=str(number))
        return True

    def _reaping(self) -> Operation[bool]:
        claimed = yield from Claims("mailroom", "numbers").claiming(Share(keys=1, per_key=1, most=1))
        for message in claimed.messages:
            yield from self._note("reaped_ledger", message.value)
        if not claimed.messages:
            yield from self._note("idle_ledger", 0)
        return bool(claimed.messages)

    def _note(self, ledger: str, message: int) -> Operation[None]:
        with self._lock:
            self.counts.runs += 1
            run = self.counts.runs
        self._session.wrote = (ledger, message, run)
        yield NOTE.at(ledger=ledger)(message=message, run=run)


if __name__ == "__main__":
    counts = run_unknown_commits(sys.argv[1], unknown=int(sys.argv[2]), seed=int(sys.argv[3]))
    sys.stdout.write(f"{counts}\n")
    sys.exit(bool(counts.violations))
