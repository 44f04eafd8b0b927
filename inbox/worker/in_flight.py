"""In-flight entries: the messages a worker was handling when it died, so that one that kills workers is counted.

A loop adds an entry for its batch on another session before the handlers run, and removes it afterwards. An open batch
locks its messages. So an entry whose messages exist and are not locked belongs to a batch that ended without its loop.
If, in addition, its process no longer holds its lock (`inbox.sessions.alive`), that process died during the batch.
Process ids are not compared.

The entry also names the transaction of its batch. Once that is rolled back, no claim of another worker takes a key of
the entry until the death is counted. So no message is tried more often than allowed.
"""

import asyncio
import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import psycopg
from psycopg.errors import InsufficientPrivilege

from inbox.by_key.claim import PINNED
from inbox.by_key.entries import BY_ROW
from inbox.by_key.failure import Failed, last_clocks
from inbox.handling.batch import Batch
from inbox.handling.told import told
from inbox.order import reading_order
from inbox.sessions.alive import HOLDS, WATCH_SESSION, Processes, terminating
from inbox.sessions.unawaited import WITHIN_S, NoSession, Unanswered, Unawaited
from mailroom.message.message import Message
from mailroom.session import settings
from mailroom.session.home import Home, HomeDatabase
from mailroom.session.repeats import Repeats
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.runner import run

log = logging.getLogger("mailroom.worker")

WATCH_INTERVAL_S = 1.0
UNDECIDED_S = 0.2  # the same, while a process is silent that may be alive
# A loop removes its entry shortly after its batch was rolled back, so younger entries that say nothing of their process
# are ignored.
AGE_S = 1.0
DIED = "the worker died while handling it"
DIED_IN_BATCH = "the worker died while handling a batch with it"
DIED_CLASS = "WorkerDied"  # no exception was seen
# Behind a pooler an entry waits for a server connection, and the loops may hold all of them. If the last entry is still
# waiting when the next one is to be sent, batches run without entries for this long.
WITHOUT_S = 10.0

ADD = Sql(
    """
INSERT INTO {schema}.my_worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, process_number, xact)
VALUES (%(id)s::uuid, '{inbox}', %(host)s::text, %(pid)s::bigint, clock_timestamp(), %(messages)s::bigint,
        %(keys)s::text[], %(clocks)s::bigint[], %(number)s::integer,
        (SELECT nullif(greatest(0, {full_xact}), 0) FROM (
            SELECT xmax::text::bigint AS x, pg_current_xact_id()::text::bigint AS n FROM {holder}) AS h))
ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at, messages = excluded.messages, keys = excluded.keys,
                               clocks = excluded.clocks, process_number = excluded.process_number, xact = excluded.xact
""",
    full_xact="n - ((n - x) & 4294967295)",  # the newest one before this transaction whose lower half is xmax
)
REMOVE = Sql("UPDATE {schema}.my_worker SET deleted = true WHERE id = %(id)s::uuid")

HOLDERS = Sql(
    """
SELECT l.pid::bigint FROM {schema}.my_worker AS w JOIN pg_locks AS l ON {holds}
WHERE w.id = %(id)s::uuid
""",
    columns=("bigint",),
    holds=HOLDS,
)
# A process that goes on says which batches it has lost: others may have their messages.
IS_LOST = """CASE WHEN xact < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
           THEN pg_xact_status(xact::text::xid8) = 'aborted' END"""
LET_GO = Sql(
    """
UPDATE {schema}.my_worker SET xact = NULL
WHERE id = ANY (%(mine)s::uuid[])
  AND {is_lost}
""",
    is_lost=IS_LOST,
)
# No removal of an entry is waited for, so a crash of the server may bring back one that this process no longer knows as
# its own. A crash ends every session, so each new one looks once.
LET_GO_ALL = Sql(
    """
UPDATE {schema}.my_worker SET xact = NULL
WHERE process_number = %(number)s::integer
  AND {is_lost}
""",
    is_lost=IS_LOST,
)
# The lock on an entry's first message tells whether its batch has ended, since a batch is claimed and released as a
# whole. If that message is gone, either the batch was committed, or another worker has consumed the message since, and
# the one that killed the worker may still be there. Entries are locked last, so those of live workers never are.
# A server crash ends all batches, so entries from before its start blame no message. An entry without a number (from
# behind a pooler) says nothing of its process, so it counts as soon as its batch has ended. So does one of several
# messages whose process is silent: it blames none of them, so that waiting for certainty would only hold them up.
# The time is a subselect, since a volatile condition on a view would be looked at only after the row was locked.
# D-workers-10: A batch of several messages is taken over once its worker is silent.
TAKE_OVER = Sql(
    """
WITH ended AS MATERIALIZED (
    SELECT w.id, w.claimed_at, m.message_id
    FROM (SELECT id, claimed_at, keys[1] AS key, clocks[1] AS clock FROM {schema}.my_worker
          WHERE inbox = '{inbox}' AND id <> ALL (%(mine)s::uuid[])
          AND CASE WHEN process_number IS NULL THEN claimed_at < {old}
                   WHEN messages > 1 THEN process_number = ANY (%(silent)s::integer[])
                   ELSE process_number = ANY (%(dead)s::integer[]) END) AS w
    LEFT JOIN LATERAL ({found}) AS m ON true
    WHERE m.message_id IS NOT NULL
       OR {is_gone}),
held AS MATERIALIZED (
    SELECT w.id, e.message_id FROM ended AS e, LATERAL (
        SELECT id FROM {schema}.my_worker AS w WHERE w.id = e.id AND w.claimed_at = e.claimed_at
        FOR UPDATE SKIP LOCKED) AS w)
UPDATE {schema}.my_worker AS w SET deleted = true FROM held WHERE w.id = held.id
RETURNING host, pid::bigint, claimed_at > pg_postmaster_start_time(), keys, clocks, messages::bigint, message_id
""",
    columns={
        "host": "text",
        "pid": "bigint",
        "is_their_own": "boolean",
        "keys": "text[]",
        "clocks": "bigint[]",
        "messages": "bigint",
        "message_id": "uuid",
    },
    old="(SELECT clock_timestamp() - %(age_s)s::float8 * interval '1 s')",
)


@dataclass(slots=True)
class Entry:
    """The in-flight entry of a loop; `written` is true while its row may exist. `place` is where its batch is."""

    id: UUID = field(default_factory=uuid4)
    written: bool = False
    place: HomeDatabase | None = None


class InFlight:
    """The in-flight entries of one worker. Its methods block: on an event loop call them by `run_in_thread`.

    One session sends the entries and checks for those of dead workers, which waits 0.1 s for locks at most. Behind a
    pooler the check has a session of its own: it may wait there for the connection of a batch.
    """

    def __init__(
        self, home: Home | str, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home = Home.of(home)
        # An entry that is lost in a crash of the server is not missed: the crash ended its batch too. One that was
        # removed and comes back is let go (`LET_GO_ALL`).
        session = settings.UNATTENDED | PINNED | {"synchronous_commit": "off", "lock_timeout": "100ms"}
        name = settings.of_this_process(f"worker in flight {inbox}")
        self._watcher = Unawaited(home, name, session | WATCH_SESSION)
        self._apart = Unawaited(home, name, session)
        self._names = {"schema": schema, "inbox": inbox}
        self._mine: set[UUID] = set()
        self._removed: set[UUID] = set()  # nobody waits for that, so they may still be there
        self._left: set[UUID] = set()  # of batches that have ended
        self._looked_on: psycopg.Connection | None = None  # the session that has looked for what a crash brought back
        self._without_until = 0.0
        self._processes = Processes(schema, inbox, monotonic)
        self._closing = threading.Event()
        self._checking = threading.RLock()
        self._repeats, self._left_out = Repeats(), Repeats()
        self._threads = ThreadPoolExecutor(2, f"mailroom-in-flight-{inbox}")

    @property
    def mine(self) -> list[UUID]:
        """The entries of this worker, and those that it has removed: its next claim may come before that is done."""
        return [*self._mine, *self._removed]

    @property
    def _sender(self) -> Unawaited:
        return self._apart if self._watcher.is_pooled else self._watcher

    async def run_in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in a thread reserved for it; handlers may keep all of asyncio's own threads busy."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def add(
        self, entry: Entry, messages: Sequence[Message], *, due: bool = False, entries: Mapping[str, str] = BY_ROW
    ) -> None:
        """Send the entry of a batch; leave entries out for a while if there is no session for them where the batch is.

        Behind a pooler that happens if no connection is free. No batch waits for that, or fails because of it. `due`:
        the messages are of a failing key. `entries` are those of the inbox's order.
        """
        if time.monotonic() < self._without_until:
            return
        keys = last_clocks(messages)
        before = entry.written
        entry.written = True
        self._mine.add(entry.id)
        self._removed.discard(entry.id)
        self._left.discard(entry.id)
        adding = ADD.at(holder=entries["holder"], **self._names)(
            id=entry.id, host=platform.node(), pid=os.getpid(), messages=len(messages), keys=list(keys),
            clocks=list(keys.values()), number=self._processes.mine,
        )  # fmt: skip
        try:
            with (sender := self._sender).at(entry.place):
                sender.send(adding)
                # A death has to be on record before others can take its messages, where each is counted exactly.
                # Compared with a batch, waiting for that costs nothing. The first try of a single message does not
                # wait: if it was not on record in time, both tries are counted.
                if (due or len(messages) > 1) and self._processes.mine is not None:
                    sender.settle(WITHIN_S)
        except (Unanswered, NoSession, psycopg.errors.LockNotAvailable) as error:
            self._without_until = time.monotonic() + WITHOUT_S
            if isinstance(error, NoSession):
                entry.written = before
            why = "their table is locked" if isinstance(error, psycopg.errors.LockNotAvailable) else str(error)
            if (again := self._left_out.struck(why)) is not None:
                log.log(
                    logging.ERROR if isinstance(error, NoSession) and error.elsewhere else logging.WARNING,
                    "%s: working without in-flight entries: deaths of this worker are not counted (%s)%s",
                    self._names["inbox"], why, again,
                )  # fmt: skip
        else:
            self._left_out.over()

    def remove(self, entry: Entry) -> None:
        """Remove the entry of a batch that has ended, in a process that goes on."""
        if entry.written:
            removing = REMOVE.at(**self._names)(id=entry.id)
            with (sender := self._sender).at(entry.place):
                try:
                    sender.send(removing)
                except Unanswered:
                    sender.send(removing)  # on a new session, since the old one is closed
            entry.written = False
            self._removed.add(entry.id)
            self._mine.discard(entry.id)
            self._left.discard(entry.id)

    def _leave(self, entry: Entry) -> bool:
        """Leave the entry of a committed batch for the next one of its loop to overwrite, or for `close` to remove.

        If the process dies before that, it blames nothing: its messages are gone. Return false if the entry has no
        number: it could be found while the process goes on.
        """
        if self._processes.mine is None:
            return False
        self._left.add(entry.id)
        return True

    def replace(self, entry: Entry, operation: Operation[T]) -> T:
        """Run an operation where the batch is, and remove its entry in one transaction, before it is rolled back."""
        sender = self._sender
        with sender.at(entry.place), sender.session(WITHIN_S) as connection, connection.transaction():
            run(connection, self._removing(entry))
            result = run(connection, operation)
        entry.written = False
        self._mine.discard(entry.id)
        return result

    def end(self, entry: Entry, operation: Operation[T]) -> T:
        """Do what `replace` does, and then have the server end the session of the batch, which rolls it back."""
        with self._sender.at(entry.place), self._sender.session() as connection:
            holders = run(connection, self._holding(entry))
            with connection.transaction():
                run(connection, self._removing(entry))
                result = run(connection, operation)
            entry.written = False
            self._mine.discard(entry.id)
            try:
                for backend in holders:
                    run(connection, terminating(backend))
                why = None if holders else "its session is unknown"
            except InsufficientPrivilege:
                why = "this role may not terminate its session; grant it pg_signal_backend"
            if why is not None:
                log.warning("%s: its keys wait until the handler returns: %s", self._names["inbox"], why)
        return result

    def _holding(self, entry: Entry) -> Operation[list[int]]:
        rows = yield HOLDERS.at(**self._names)(id=entry.id)
        return [backend for (backend,) in rows]

    def _removing(self, entry: Entry) -> Operation[None]:
        yield REMOVE.at(**self._names)(id=entry.id)

    @contextlib.contextmanager
    def removing(self, entry: Entry, batch: Batch) -> Iterator[None]:
        """Remove the entry when the batch has ended, except by an exception that ends the process.

        It is left if the next batch follows at once.
        """
        try:
            yield
        except Exception:
            # At once: while the failure is being recorded, the entry would look like that of a dead worker. If removing
            # it fails, the next batch overwrites it; the handler's exception matters more.
            with contextlib.suppress(psycopg.Error):
                self.remove(entry)
            raise
        if batch.is_followed and self._leave(entry):
            return
        # The batch was committed, so nothing is to be retried. If the server is too slow to remove the entry, raising
        # would make the loop pause after each batch; the next batch overwrites the entry.
        with contextlib.suppress(psycopg.OperationalError):
            self.remove(entry)

    @contextlib.asynccontextmanager
    async def removing_async(self, entry: Entry, batch: Batch) -> AsyncIterator[None]:
        """Do what `removing` does, for async handlers."""
        try:
            yield
        except (Exception, asyncio.CancelledError):  # a cancelled handler has ended too
            with contextlib.suppress(psycopg.Error):
                await self.run_in_thread(self.remove, entry)
            raise
        if batch.is_followed and self._leave(entry):
            return
        with contextlib.suppress(psycopg.OperationalError):
            await self.run_in_thread(self.remove, entry)

    def begin(self) -> None:
        """Take over from dead workers before the first batch, so that it need not wait for the next check.

        Raises `Elsewhere` if that would be in another database.
        """
        try:
            self._watcher.settle()
        except NoSession as error:
            if error.elsewhere is not None:
                raise error.elsewhere from None
        except psycopg.OperationalError as error:
            log.debug("%s: lost a session at once (%s)", self._names["inbox"], type(error).__name__)
        self.take_over()

    def take_over(self) -> bool:
        """Find entries of dead workers, record their messages as failed or suspect; return whether there were any."""
        try:
            with self._checking:
                return not self._closing.is_set() and self._take_over()
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: messages of dead workers are locked, checking again later", self._names["inbox"])
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            why = str(error) if isinstance(error, NoSession) else type(error).__name__
            if not self._closing.is_set() and (again := self._repeats.struck(why)) is not None:
                log.warning("%s: could not check for dead workers (%s)%s", self._names["inbox"], why, again)
        return False

    def _take_over(self) -> bool:
        with self._watcher.session() as connection:
            self._processes.hold_lock(connection)
            with connection.transaction():
                if connection is not self._looked_on:
                    run(connection, self._letting_go_all())
                found = run(connection, self._taking_over())
            self._looked_on = connection
            self._processes.end_paused(connection)
            self._repeats.over()
            return found

    async def watch(self, found: Callable[[], None]) -> None:
        """Hold the process's lock and check for dead workers, until cancelled; call `found` when there were any.

        This runs in a thread of its own, which no handler can block. It is a daemon thread, so that it does not keep
        the process alive if its event loop is abandoned.
        """
        loop, ended = asyncio.get_running_loop(), Future[None]()
        ended.set_running_or_notify_cancel()

        def work() -> None:
            try:
                self._watch(lambda: loop.call_soon_threadsafe(found))
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        threading.Thread(target=work, name=f"mailroom-watch-{self._names['inbox']}", daemon=True).start()
        try:
            await asyncio.wrap_future(ended)
        finally:
            self._closing.set()

    def close(self) -> None:
        """Close the sessions, after the check under way: it is cut off only if the server does not answer."""
        self._closing.set()
        self._threads.shutdown(wait=False)
        is_checked = self._checking.acquire(timeout=WITHIN_S)
        try:
            for left in self._left:
                with contextlib.suppress(psycopg.OperationalError):
                    self._sender.send(REMOVE.at(**self._names)(id=left))
            self._apart.close()
        finally:
            self._watcher.close()
            if is_checked:
                self._checking.release()

    def _watch(self, found: Callable[[], object]) -> None:
        while not self._closing.wait(UNDECIDED_S if self._processes.undecided else WATCH_INTERVAL_S):
            if self._check():
                found()

    def _check(self) -> bool:
        with self._checking:
            if not self._closing.is_set():
                with contextlib.suppress(psycopg.OperationalError):
                    self._sender.settle()
            return self.take_over()

    def _letting_go_all(self) -> Operation[None]:
        yield LET_GO_ALL.at(**self._names)(number=self._processes.number)

    def _taking_over(self) -> Operation[bool]:
        if self._mine:
            yield LET_GO.at(**self._names)(mine=list(self._mine))
        if not (yield from self._processes.checking()):
            return False
        processes = self._processes
        entries = (yield from reading_order(**self._names)).entries
        rows = yield TAKE_OVER.at(found=entries["found"], is_gone=entries["is_gone"], **self._names)(
            age_s=AGE_S, mine=self.mine, dead=processes.dead(), silent=processes.silent
        )
        for each in TAKE_OVER.named(rows):
            if each.is_their_own and (each.messages > 1 or each.message_id is not None):
                dead = f"worker {each.pid} on {each.host}"
                yield from self._blaming(dead, each.keys, each.clocks, each.messages, each.message_id)
        return bool(rows)

    def _blaming(self, dead: str, keys: list[str], clocks: list[int], messages: int, first: UUID) -> Operation[None]:
        inbox = self._names["inbox"]
        order = yield from reading_order(**self._names)
        if messages > 1:
            yield from order.suspecting(keys, clocks, DIED_IN_BATCH)
            text = "%s: %s died while handling a batch of %d messages"
            log.warning(text, inbox, dead, messages, extra={"inbox": inbox})
        else:
            key, clock = keys[0], clocks[0]
            # A message that kills its worker probably killed the last one too, so that start counts as well.
            if (yield from order.was_in_batch(key, clock, DIED_IN_BATCH)):
                yield from order.recording(Failed(key, clock, first, DIED_IN_BATCH, DIED_CLASS))
            recorded = yield from order.recording(Failed(key, clock, first, DIED, DIED_CLASS))
            of = told(order, recorded, first, key, DIED)
            log.log(
                of.level, "%s: %s died while handling %s (key %r), %s", inbox, dead, first, key, of.text,
                extra=of.fields,
            )  # fmt: skip
