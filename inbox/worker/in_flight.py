"""Notes of batches under way: what a worker had in hand when it died, so that a deadly message is counted and stopped.

A lane sends a note of its batch on another session before the handlers run, and removes it after. An open batch locks
its messages. So a note whose messages are there, and locked by nobody, is of a batch that ended without its lane; and
if its process does not speak any more (`inbox.worker.life`), that one died with it. No process id is asked about.
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
from inbox.worker.life import SESSION, Lives
from inbox.worker.unawaited import Unanswered, Unawaited
from mailroom import settings
from mailroom.message import Message
from mailroom.sql.operation import Operation, Sql, T
from mailroom.sql.runner import run

log = logging.getLogger("mailroom.worker")

WATCH_INTERVAL_S = 1.0
# A lane removes a note an instant after its batch was rolled back; a younger one than this is not looked at.
AGE_S = 1.0
BEGIN_S = 0.2  # between two looks before the first batch
DIED = "the worker died with it"
# Through a pooler a note waits for a connection to the server, and all of them may be in the hands of lanes. If the
# last one still waits when the next is due, batches go without for a while.
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

# A note's first message tells whether its batch has ended: a batch is claimed and let go as a whole. If it is gone, the
# batch was committed, or others had that message meanwhile and the one it died of may still be there. Notes are locked
# last, so that those of the living are not. No plan makes (SELECT ..) IS NULL a look at all messages; EXISTS it may.
# A server that went down took all batches with it, and no message is to blame. Of a note without a life nothing more is
# known than that its batch has ended.
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
    """A lane's note; `written` says that one may stand in the table."""

    id: UUID = field(default_factory=uuid4)
    written: bool = False


class InFlight:
    """The notes of one worker process; for any thread but that of the loop (`apart`).

    Over one session they are sent, over another those of the dead are looked for: that may have to wait, and no batch
    is to wait with it.
    """

    def __init__(self, dsn: str, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        # A note that a crash of the server takes along says nothing that is missed.
        session = settings.UNATTENDED | PINNED | {"synchronous_commit": "off", "lock_timeout": "100ms"}
        self._sender = Unawaited(dsn, f"worker in flight {inbox}", session)
        self._watcher = Unawaited(dsn, f"worker watch {inbox}", session | SESSION)
        self._names = {"schema": schema, "inbox": inbox}
        self._mine: set[UUID] = set()
        self._without_until = 0.0
        self._lives = Lives(schema, inbox, monotonic)
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(2, f"mailroom-notes-{inbox}")

    async def run_in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Do from the loop what may wait, in a thread of their own: handlers may keep those of asyncio busy."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def add(self, entry: Entry, messages: Sequence[Message]) -> None:
        """Send the note of a batch; through a pooler that has no connection free, leave it out."""
        if time.monotonic() < self._without_until:
            return
        keys = last_clocks(messages)
        entry.written = True
        self._mine.add(entry.id)
        try:
            self._sender.send(
                ADD.at(**self._names)(
                    id=entry.id, host=platform.node(), pid=os.getpid(), messages=len(messages), keys=list(keys),
                    clocks=list(keys.values()), life=self._lives.mine,
                )
            )  # fmt: skip
        except Unanswered:
            self._without_until = time.monotonic() + WITHOUT_S
            log.warning("%s: notes are not taken, working without them for a while", self._names["inbox"])

    def remove(self, entry: Entry) -> None:
        """Remove the note of a batch that has ended; its lane lives."""
        if entry.written:
            removing = REMOVE.at(**self._names)(id=entry.id)
            try:
                self._sender.send(removing)
            except Unanswered:
                self._sender.send(removing)  # on another session, since that one is closed
            entry.written = False
            self._mine.discard(entry.id)

    def replace(self, entry: Entry, operation: Operation[T]) -> T:
        """Run, in a transaction of its own, what is to be known before a batch is rolled back, in place of its note."""
        with self._sender.session() as connection, connection.transaction():
            run(connection, self._removing(entry))
            told = run(connection, operation)
        entry.written = False
        self._mine.discard(entry.id)
        return told

    def _removing(self, entry: Entry) -> Operation[None]:
        yield REMOVE.at(**self._names)(id=entry.id)

    @contextlib.contextmanager
    def removing(self, entry: Entry) -> Iterator[None]:
        """Remove the note when its batch has ended, unless by what ends the process too."""
        try:
            yield
        except Exception:
            # At once: while a failure is recorded, the note would look like one of the dead. If it cannot be, it is
            # with the next batch; what the handler raised says more.
            with contextlib.suppress(psycopg.Error):
                self.remove(entry)
            raise
        # Its batch was committed, so there is nothing to try again. A server that is too slow to take the note away
        # would have the lane pause after each batch; it goes with the next one.
        with contextlib.suppress(psycopg.OperationalError):
            self.remove(entry)

    @contextlib.asynccontextmanager
    async def removing_async(self, entry: Entry) -> AsyncIterator[None]:
        """The same, async."""
        try:
            yield
        except (Exception, asyncio.CancelledError):  # cancelled, its handler has ended too
            with contextlib.suppress(psycopg.Error):
                await self.run_in_thread(self.remove, entry)
            raise
        with contextlib.suppress(psycopg.OperationalError):
            await self.run_in_thread(self.remove, entry)

    def begin(self) -> None:
        """Take over before the first batch, which may hold what the last worker died of: wait until that is certain."""
        self.take_over()
        while self._lives.undecided and not self._closing.wait(BEGIN_S):
            self.take_over()

    def take_over(self) -> bool:
        """Look for notes of the dead, and have what they had in hand counted or tried alone; tell if there was any."""
        try:
            with self._watcher.session() as connection:
                self._lives.hold_lock(connection)
                with connection.transaction():
                    found = run(connection, self._taking_over())
                self._lives.end_paused(connection)
                return found
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: what the dead had in hand is being tried: looking again later", self._names["inbox"])
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            log.warning("%s: not looking for batches of the dead: %s", self._names["inbox"], type(error).__name__)
        return False

    async def watch(self, found: Callable[[], None]) -> None:
        """Speak and look again and again, until cancelled; call `found` when there was something.

        In a thread of its own, which no handler blocks, and a daemon, so that a loop that is left does not keep its
        process from ending.
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
        """Close the sessions."""
        self._closing.set()
        self._threads.shutdown(wait=False)
        try:
            self._sender.close()
        finally:
            self._watcher.close()

    def _watch(self, found: Callable[[], object]) -> None:
        try:
            while not self._closing.wait(WATCH_INTERVAL_S):
                if self._check():
                    found()
        finally:
            self._watcher.close()  # it may have been made anew when the others were closed

    def _check(self) -> bool:
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
        if messages > 1:
            yield from suspecting(schema, inbox, keys, clocks, DIED)
            log.warning("%s: %s died with %d messages", inbox, dead, messages)
        else:
            recorded: Recorded = yield from recording_failure(schema, inbox, keys[0], clocks[0], first, DIED, "fail")
            log.warning("%s: %s died with %s, attempt %d: %s", inbox, dead, first, recorded.attempt, recorded.outcome)
