"""In-flight entries: the messages a worker was handling when it died, so that one that kills workers is counted.

A loop adds an entry for its batch on another session before the handlers run, and removes it afterwards. An open batch
locks its messages. So an entry whose messages exist and are not locked belongs to a batch that ended without its loop.
If, in addition, its process no longer holds its lock (`inbox.worker.life`), that process died during the batch. Process
ids are not compared.
"""

import asyncio
import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import psycopg

from inbox.claim import PINNED
from inbox.failure import Recorded, last_clocks, recording_failure, suspecting
from inbox.worker.batch import Batch
from inbox.worker.life import SESSION, Lives
from inbox.worker.unawaited import WITHIN_S, NoSession, Unanswered, Unawaited
from mailroom import settings
from mailroom.message import Message
from mailroom.session.home import Home, Place
from mailroom.session.repeats import Repeats
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.runner import run
from mailroom.total import is_total

log = logging.getLogger("mailroom.worker")

WATCH_INTERVAL_S = 1.0
# A loop removes its entry shortly after its batch was rolled back, so younger entries are ignored. Less than
# `life.DEAD_S`, which is what `begin` waits for: every entry of a process found dead has to be old enough.
AGE_S = 1.0
BEGIN_S = 0.2  # between two checks before the first batch
DIED = "the worker died while handling it"
DIED_CLASS = "WorkerDied"  # no exception was seen
# Behind a pooler an entry waits for a server connection, and the loops may hold all of them. If the last entry is still
# waiting when the next one is to be sent, batches run without entries for this long.
WITHOUT_S = 10.0

ADD = Sql(
    """
INSERT INTO {schema}.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks, life, xact)
VALUES (%(id)s::uuid, '{inbox}', %(host)s::text, %(pid)s::bigint, clock_timestamp(), %(messages)s::bigint,
        %(keys)s::text[], %(clocks)s::bigint[], %(life)s::integer,
        (SELECT xmax::text::bigint FROM {schema}.inbox_{inbox}
         WHERE key = (%(keys)s::text[])[1] AND clock = (%(clocks)s::bigint[])[1]))
ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at, messages = excluded.messages, keys = excluded.keys,
                               clocks = excluded.clocks, life = excluded.life, xact = excluded.xact
"""
)
REMOVE = Sql("DELETE FROM {schema}.worker WHERE id = %(id)s::uuid")

# The lock on an entry's first message tells whether its batch has ended, since a batch is claimed and released as a
# whole. If that message is gone, either the batch was committed, or another worker has consumed the message since, and
# the one that killed the worker may still be there. Entries are locked last, so those of live workers never are.
# (SELECT ...) IS NULL stays an index probe; NOT EXISTS may be planned as a full scan.
# A server crash ends all batches, so entries from before its start blame no message. An entry without a life (from
# behind a pooler) says nothing of its process, so it counts as soon as its batch has ended.
TAKE_OVER = Sql(
    """
WITH ended AS MATERIALIZED (
    SELECT w.id, m.message_id
    FROM (SELECT id, keys[1] AS key, clocks[1] AS clock FROM {schema}.worker WHERE inbox = '{inbox}'
          AND claimed_at < clock_timestamp() - %(age_s)s::float8 * interval '1 s' AND id <> ALL (%(mine)s::uuid[])
          AND (life IS NULL OR life = ANY (%(dead)s::integer[]))) AS w
    LEFT JOIN LATERAL (
        SELECT message_id FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock
        FOR UPDATE SKIP LOCKED) AS m ON true
    WHERE m.message_id IS NOT NULL
       OR (SELECT clock FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock) IS NULL),
held AS MATERIALIZED (
    SELECT w.id, e.message_id FROM ended AS e, LATERAL (
        SELECT id FROM {schema}.worker AS w WHERE w.id = e.id
        AND claimed_at < clock_timestamp() - %(age_s)s::float8 * interval '1 s' FOR UPDATE SKIP LOCKED) AS w)
DELETE FROM {schema}.worker AS w USING held WHERE w.id = held.id
RETURNING host, pid::bigint, claimed_at > pg_postmaster_start_time(), keys, clocks, messages::bigint, message_id
""",
    columns=("text", "bigint", "boolean", "text[]", "bigint[]", "bigint", "uuid"),
)


@dataclass(slots=True)
class Entry:
    """The in-flight entry of a loop; `written` is true while its row may exist. `place` is where its batch is."""

    id: UUID = field(default_factory=uuid4)
    written: bool = False
    place: Place | None = None


class InFlight:
    """The in-flight entries of one worker. Its methods block: on an event loop call them by `run_in_thread`.

    One session sends the entries. Another one checks for entries of dead workers: it may have to wait for locks, and no
    batch should wait with it.
    """

    def __init__(
        self, home: Home | str, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home = Home.of(home)
        # An entry that is lost in a crash of the server is not missed: the crash ended its batch too.
        session = settings.UNATTENDED | PINNED | {"synchronous_commit": "off", "lock_timeout": "100ms"}
        self._sender = Unawaited(home, f"worker in flight {inbox}", session)
        self._watcher = Unawaited(home, f"worker watch {inbox}", session | SESSION)
        self._names = {"schema": schema, "inbox": inbox}
        self._mine: set[UUID] = set()
        self._left: set[UUID] = set()  # of batches that have ended
        self._without_until = 0.0
        self._lives = Lives(schema, inbox, monotonic)
        self._closing = threading.Event()
        self._checking = threading.RLock()
        self._repeats, self._left_out = Repeats(), Repeats()
        self._threads = ThreadPoolExecutor(2, f"mailroom-in-flight-{inbox}")

    async def run_in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in a thread reserved for it; handlers may keep all of asyncio's own threads busy."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def add(self, entry: Entry, messages: Sequence[Message]) -> None:
        """Send the entry of a batch; leave entries out for a while if there is no session for them where the batch is.

        Behind a pooler that may be since no connection is free. No batch waits for that, or fails by it.
        """
        if time.monotonic() < self._without_until:
            return
        keys = last_clocks(messages)
        before = entry.written
        entry.written = True
        self._mine.add(entry.id)
        self._left.discard(entry.id)
        adding = ADD.at(**self._names)(
            id=entry.id, host=platform.node(), pid=os.getpid(), messages=len(messages), keys=list(keys),
            clocks=list(keys.values()), life=self._lives.mine,
        )  # fmt: skip
        try:
            with self._sender.at(entry.place):
                self._sender.send(adding)
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
            with self._sender.at(entry.place):
                try:
                    self._sender.send(removing)
                except Unanswered:
                    self._sender.send(removing)  # on a new session, since the old one is closed
            entry.written = False
            self._mine.discard(entry.id)
            self._left.discard(entry.id)

    def _leave(self, entry: Entry) -> bool:
        """Leave the entry of a committed batch for the next one of its loop to overwrite, or for `close` to remove.

        If the process dies before that, it blames nothing: its messages are gone. Return false if the entry has no
        life: it could be found while the process goes on.
        """
        if self._lives.mine is None:
            return False
        self._left.add(entry.id)
        return True

    def replace(self, entry: Entry, operation: Operation[T]) -> T:
        """Run an operation where the batch is, and remove its entry in one transaction, before it is rolled back."""
        with self._sender.at(entry.place), self._sender.session() as connection, connection.transaction():
            run(connection, self._removing(entry))
            result = run(connection, operation)
        entry.written = False
        self._mine.discard(entry.id)
        return result

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
        """Take over from dead workers before the first batch, which might hold the message that killed the last one.

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
        while self._lives.undecided and not self._closing.wait(BEGIN_S):
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
            self._lives.hold_lock(connection)
            with connection.transaction():
                found = run(connection, self._taking_over())
            self._lives.end_paused(connection)
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
            self._sender.close()
        finally:
            self._watcher.close()
            if is_checked:
                self._checking.release()

    def _watch(self, found: Callable[[], object]) -> None:
        try:
            while not self._closing.wait(WATCH_INTERVAL_S):
                if self._check():
                    found()
        finally:
            self._watcher.close()  # it may have been reopened after `close`

    def _check(self) -> bool:
        with self._checking:
            if not self._closing.is_set():
                with contextlib.suppress(psycopg.OperationalError):
                    self._sender.settle()
            return self.take_over()

    def _taking_over(self) -> Operation[bool]:
        if not (yield from self._lives.checking()):
            return False
        rows = yield TAKE_OVER.at(**self._names)(age_s=AGE_S, mine=list(self._mine), dead=self._lives.dead())
        for host, pid, is_their_own, keys, clocks, messages, message_id in rows:
            if is_their_own and (messages > 1 or message_id is not None):
                yield from self._blaming(f"worker {pid} on {host}", keys, clocks, messages, message_id)
        return bool(rows)

    def _blaming(self, dead: str, keys: list[str], clocks: list[int], messages: int, first: UUID) -> Operation[None]:
        schema, inbox = self._names["schema"], self._names["inbox"]
        whole = yield from is_total(schema, inbox)
        if messages > 1:
            yield from suspecting(schema, inbox, keys, clocks, DIED, is_total=whole)
            log.warning("%s: %s died while handling a batch of %d messages", inbox, dead, messages)
        else:
            recorded: Recorded = yield from recording_failure(
                schema, inbox, keys[0], clocks[0], first, DIED, DIED_CLASS, "fail", is_total=whole
            )
            log.warning(
                "%s: %s died while handling %s, attempt %d: %s", inbox, dead, first, recorded.attempt, recorded.outcome
            )
