"""Negative controls: rules of Mailroom broken in the campaign's own processes, to see that the checker notices.

A mutant is switched on only here, in a child that was started with its name; no code of the product asks for one. Each
changes SQL text or replaces a function, and fails loudly if what it changes is no longer there.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mailroom.sql.operation import Operation, Sql
from tests.faults.task import USUAL, Habits


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken rule, and how to look for it: the faults (`kinds.FAULTS`, or none) and how the stage is set."""

    name: str
    broken: str
    apply: Callable[[], None]
    faults: tuple[str, ...] = ()
    quiet: bool = False  # no load: nothing but the campaign's own messages
    lossy: bool = False  # commits are asynchronous, and the server loses what it has not written
    habits: Habits = USUAL  # what it takes to see it


HOUR_S = 3_600
MUTANTS: dict[str, Mutant] = {}


def apply(name: str) -> None:
    """Break the rule in this process."""
    MUTANTS[name].apply()


def _mutant(broken: str, *faults: str, **how: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(work: Callable[[], None]) -> Callable[[], None]:
        name = work.__name__.strip("_").replace("_", "-")
        MUTANTS[name] = Mutant(name, broken, work, faults, **how)
        return work

    return add


def _rewrite(sql: Sql, old: str, new: str) -> None:
    if old not in sql.template:
        raise AssertionError(f"the mutant no longer applies: no {old!r} in {sql.template!r}")
    sql.template = sql.template.replace(old, new)


def _put(owner: object, name: str, value: object) -> None:
    if not hasattr(owner, name):
        raise AssertionError(f"the mutant no longer applies: {owner} has no {name}")
    setattr(owner, name, value)


@_mutant("the outbox is read by a cursor that never goes back", "F19")
def _cursor_read() -> None:
    from dispatcher.delivery import floor
    from dispatcher.delivery.deliver import Delivery
    from dispatcher.delivery.floor import Floor

    def raising(self: Floor, schema: str, delivery: Delivery) -> Operation[None]:
        self._start = max(self._start, delivery.last or 0)
        yield from ()

    _put(Floor, "raising", raising)
    _put(floor, "FULL_SCAN_S", float("inf"))


@_mutant("locked rows are skipped within a key")
def _skip_locked_in_key() -> None:
    from inbox.by_key import claim

    head, most = "AS i WHERE i.ctid = h.place", "LIMIT (SELECT most FROM asked)"
    _rewrite(claim.REAP_PLAIN, "is_full AND least(", "true OR least(")  # none is taken out of the window
    for sql in (claim.REAP_PLAIN, claim.REAP_ANY):
        _rewrite(sql, f"{head} FOR UPDATE SKIP LOCKED) AS l", f"{head}) AS l")
        _rewrite(sql, f"{most}) AS i", f"{most} FOR UPDATE SKIP LOCKED) AS i")


@_mutant("no fence: whoever believes that it leads delivers, without the dispatch lock")
def _no_fence() -> None:
    from dispatcher.lanes.lease import Lease
    from mailroom.order import clock

    def taking(self: Lease, *_: object) -> Operation[bool]:
        self.epoch = 1
        yield from ()
        return True

    _put(Lease, "taking", taking)
    _rewrite(clock.DISPATCH_LOCK, clock.DISPATCH_LOCK.template, "SELECT true")


@_mutant("after an unknown commit the transaction is run again", "F9")
def _blind_retry() -> None:
    from mailroom.session import commit

    _after_unknown(commit.Next.RETRY)


@_mutant("after an unknown commit COMMIT is sent again, and reports success", "F8", "F13")
def _commit_replayed() -> None:
    from mailroom.session import commit

    _after_unknown(commit.Next.RETURN)


def _after_unknown(instead: Any) -> None:
    from mailroom.session import commit

    following = commit.following

    def blindly(*arguments: Any, **options: Any) -> Any:
        found = following(*arguments, **options)
        return instead if found is commit.Next.ASK else found

    _put(commit, "following", blindly)


@_mutant("messages leave the outbox in a transaction before the one that delivers them", "F1", "F3")
def _ack_before_deliver() -> None:
    from dispatcher.delivery.deliverer import Deliverer

    deliver = Deliverer.deliver
    columns = "SELECT string_agg(column_name, ', ') FROM information_schema.columns WHERE table_schema = 'mailroom' "
    columns += "AND table_name = 'outbox' AND column_name <> 'xact'"

    async def twice(self: Deliverer, now: Any = None) -> Any:
        connection = self._connection
        await connection.execute("CREATE TEMP TABLE IF NOT EXISTS taken (LIKE mailroom.outbox)")
        row = await (await connection.execute(columns.encode())).fetchone()
        names = row[0] if row else ""
        await connection.execute(
            "WITH g AS (DELETE FROM mailroom.outbox RETURNING *) INSERT INTO taken SELECT * FROM g"
        )
        await asyncio.sleep(0.02)
        await connection.execute(
            f"WITH g AS (DELETE FROM taken RETURNING *) INSERT INTO mailroom.outbox ({names}) OVERRIDING SYSTEM VALUE "
            f"SELECT {names} FROM g ORDER BY position".encode()
        )
        return await deliver(self, now)

    _put(Deliverer, "deliver", twice)


@_mutant("a worker consumes its messages before it handles them", "F1", "F3")
def _ack_before_handling() -> None:
    from dataclasses import replace

    from inbox.sessions import hold
    from inbox.worker.worker import Worker
    from mailroom.sql.runner import run

    def batch_of(self: Any, batch: Any, entry: Any) -> None:
        with self._transactions.begin() as connection:
            run(connection, self._claiming(batch, connection))
            if not batch.messages:
                return
            self._transactions.commit(connection)
        with self._transactions.begin() as connection:
            batch.taken = replace(batch.taken, hold=hold.Hold(connection))
            with batch.run.handling(batch.taken) as messages:
                for message in messages:
                    self._handler(message, connection)
            batch.run.is_over = True

    _put(Worker, "_batch_of", batch_of)


@_mutant("whoever works in a batch may end its transaction", "F42")
def _batch_not_held() -> None:
    from inbox.by_key import claim, due
    from inbox.sessions import transactions

    for sql in (claim.REAP_PLAIN, claim.REAP_ANY, due.TAKE_HEAD):
        _rewrite(sql, "{schema}.hold_batch()", "true")
    _put(transactions, "COMMIT", "COMMIT")


@_mutant("the clock's ceiling is raised without waiting for the disk", "F6", lossy=True, habits=Habits(ceiling_step=20))
def _ceiling_not_durable() -> None:
    from mailroom.order import clock

    _rewrite(clock.DURABLE, "'on'", "'off'")


@_mutant(
    "a dispatcher that starts does not look how far the clock may have been",
    "F6",
    lossy=True,
    habits=Habits(ceiling_step=20),
)
def _clock_not_recovered() -> None:
    from mailroom.order import clock

    _rewrite(clock.RECOVER, "greatest(c.last_value, n.clock_ceiling)", "greatest(c.last_value, 1)")


@_mutant("clocks are read off the wall")
def _wall_clock() -> None:
    from dispatcher.delivery import deliver, plain, single

    for statement in (deliver.DELIVER, plain.DELIVER_PLAIN, single.DELIVER_ONE):
        _rewrite(
            statement, "SELECT greatest(last_value, after_clock) FROM {schema}.clock",
            "SELECT (1000 * extract(epoch FROM clock_timestamp()))::bigint FROM {schema}.clock",
        )  # fmt: skip


@_mutant(
    "after a lost connection a listener scans, and only then listens", "F29b", quiet=True, habits=Habits(poll_s=120)
)
def _listen_after_scan() -> None:
    from mailroom.session import listener

    async def run(self: Any) -> None:
        while True:
            with contextlib.suppress(Exception):
                self.rung(None)  # the scan
                await asyncio.sleep(0.05)
                async with self._listening() as connection:
                    await self.attend(connection)

    _put(listener.Listener, "run", run)


@_mutant("nothing is polled: whatever no notification tells is not looked for", "F29", quiet=True)
def _notify_only() -> None:
    from dispatcher.lanes import doorbell
    from mailroom.session.listener import heard

    async def only_heard(ring: asyncio.Event, timeout_s: float) -> bool:
        return await heard(ring, timeout_s if timeout_s < doorbell.UNSURE_POLL_S else HOUR_S)

    _put(doorbell, "heard", only_heard)


@_mutant("what is older than a fifth of a second is purged from the outbox", "F19")
def _purge_by_age() -> None:
    from dispatcher.housekeeping.janitor import Janitor

    run_once = Janitor.run_once

    async def purging(self: Janitor, connection: Any) -> int:
        await connection.execute("DELETE FROM mailroom.outbox WHERE sent_at < clock_timestamp() - interval '0.2 s'")
        return await run_once(self, connection)

    _put(Janitor, "run_once", purging)


@_mutant("what a claim gives is in no order")
def _returning_unsorted() -> None:
    from inbox.by_key import key_order
    from inbox.by_key.claim import reaping_any, reaping_key

    def key(*arguments: Any) -> Operation[Any]:
        messages, course = yield from reaping_key(*arguments)
        return _shuffled(messages), course

    def any_(*arguments: Any) -> Operation[Any]:
        claimed, course = yield from reaping_any(*arguments)
        return replace(claimed, messages=_shuffled(claimed.messages)), course

    _put(key_order, "reaping_key", key)
    _put(key_order, "reaping_any", any_)


def _shuffled(messages: list[Any]) -> list[Any]:
    return random.sample(messages, len(messages))


@_mutant("an attempt is counted in the transaction that is rolled back")
def _attempt_rolled_back() -> None:
    from inbox.by_key.failure import GONE
    from inbox.worker import worker

    def blaming(*arguments: Any) -> Operation[Any]:
        yield from ()
        return GONE

    _put(worker, "blaming", blaming)


@_mutant("a message that its worker dies of is not counted", "F27")
def _death_not_counted() -> None:
    from inbox.worker.in_flight import InFlight

    def nothing(self: InFlight) -> None:
        pass

    _put(InFlight, "take_over", nothing)


@_mutant("a key that is healthy again keeps its key_state row", habits=Habits(failing=0.05))
def _healed_dropped() -> None:
    from inbox.by_key import claim, due

    for sql in (claim.REAP_KEY, claim.REAP_ANY):
        _rewrite(sql, "AND s.alone_to <= g.clock\n", "AND false\n")
    _rewrite(due.HEAL, "AND alone_to <= %(clock)s::bigint AND paused_at IS NULL)", "AND false)")


@_mutant("what takes too long is cut off, and tried again as it was", "F37b")
def _tried_the_same_way() -> None:
    from dispatcher.daemon import Dispatcher
    from dispatcher.delivery.portion import Portion

    _put(Dispatcher, "_session", {**Dispatcher._session, "statement_timeout": "300ms"})
    _put(Portion, "of", lambda self, full: full)


@_mutant("an error that looks like the database's is forgiven for ever", "F39")
def _forgiven_for_ever() -> None:
    from inbox.handling.blame import Patience

    _put(Patience, "_is_rare", lambda self, error, batch: True)


@_mutant("an executable is to blame when its statement is cancelled", "F40")
def _cancelled_is_dead() -> None:
    from dispatcher.executor import ranging
    from dispatcher.executor.applying import apply
    from dispatcher.executor.batch.dead import described, reason_of
    from mailroom.sql.sqlstate import CANCELLED, sqlstate

    def blaming(error: Exception) -> str | None:
        return described(error) if sqlstate(error) == CANCELLED else reason_of(error)

    for module in (apply, ranging):
        _put(module, "reason_of", blaming)


@_mutant("housekeeping passes over nothing, and its errors end the daemon's session", "F41")
def _housekeeping_errors_spread() -> None:
    from dispatcher.housekeeping import housekeeping
    from dispatcher.housekeeping.janitor import Janitor
    from dispatcher.lanes import leading as lead

    async def run(self: Any, leading: asyncio.Event) -> None:
        while True:
            await leading.wait()
            async with lead.open_session(self._dsn, "dispatcher housekeeping", lead.KEEPER) as session:
                while leading.is_set():
                    await self._janitor.run_once(session)
                    await asyncio.sleep(0.02)

    _put(housekeeping.Housekeeping, "run", run)
    _put(Janitor, "_passing", lambda *_: contextlib.nullcontext())
    # As if it had not begun yet: then an error of its own ends it.
    daemon: Any = lead.Leading
    daemon._has_begun = property(lambda _: False, lambda *_: None)


@_mutant("the lanes of a log are read by whoever wants them, without locks")
def _lanes_not_locked() -> None:
    from inbox.by_log import lanes

    _rewrite(lanes.LOCK, " FOR UPDATE SKIP LOCKED) AS l", ") AS l")


@_mutant("what fails leaves the log, and is handed out of it, too", habits=Habits(failing=0.02))
def _diverted_and_handed_out() -> None:
    from inbox.by_log import log_claim

    _rewrite(log_claim.READ, "FROM picked WHERE key NOT IN (SELECT key FROM apart))", "FROM picked)")
