"""Notes of batches under way: what a worker had in hand when it died, so that a deadly message is counted and stopped.

A lane sends a note of its batch on another session before the handlers run, and removes it after. An open batch locks
its messages. So a note whose messages are there, and locked by nobody, was left by a batch that ended without its lane:
no process id is asked about, no clock decides.
"""

import asyncio
import contextlib
import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import psycopg

from inbox.claim import PINNED
from inbox.failure import Recorded, recording_failure, suspecting
from inbox.posting import Post, Unanswered
from mailroom import settings
from mailroom.message import Message
from mailroom.operation import Operation, Sql
from mailroom.transaction import run

log = logging.getLogger("mailroom.worker")

WATCH_INTERVAL_S = 1.0
# A lane removes a note an instant after its batch was rolled back; a younger one than this is not looked at.
AGE_S = 1.0
DIED = "the worker died with it"
# Through a pooler a note waits for a connection to the server, and all of them may be in the hands of lanes. If the
# last one still waits when the next is due, batches go without for a while.
WITHOUT_S = 10.0

WRITE = Sql(
    """
INSERT INTO {schema}.worker (id, inbox, host, pid, claimed_at, messages, keys, clocks)
VALUES (%(id)s::uuid, '{inbox}', %(host)s::text, %(pid)s::bigint, clock_timestamp(), %(messages)s::bigint,
        %(keys)s::text[], %(clocks)s::bigint[])
ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at, messages = excluded.messages, keys = excluded.keys,
                               clocks = excluded.clocks
"""
)
REMOVE = Sql("DELETE FROM {schema}.worker WHERE id = %(id)s::uuid")

# A note's first message tells about them all: a batch is claimed, and then committed or rolled back, as a whole.
# A server that went down took all batches with it, and no message is to blame.
LEFT = Sql(
    """
WITH ended AS MATERIALIZED (
    SELECT w.id, m.message_id
    FROM (SELECT id, keys[1] AS key, clocks[1] AS clock FROM {schema}.worker
          WHERE inbox = '{inbox}' AND claimed_at < clock_timestamp() - %(age_s)s::float8 * interval '1 s'
          ORDER BY claimed_at FOR UPDATE SKIP LOCKED) AS w
    LEFT JOIN LATERAL (
        SELECT message_id FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock
        FOR UPDATE SKIP LOCKED) AS m ON true
    WHERE m.message_id IS NOT NULL
       OR NOT EXISTS (SELECT FROM {schema}.inbox_{inbox} AS i WHERE i.key = w.key AND i.clock = w.clock))
DELETE FROM {schema}.worker AS w USING ended WHERE w.id = ended.id
RETURNING host, pid::bigint, claimed_at > pg_postmaster_start_time(), keys, clocks, messages::bigint, message_id
""",
    columns=("text", "bigint", "boolean", "text[]", "bigint[]", "bigint", "uuid"),
)


@dataclass(slots=True)
class Note:
    """A lane's note; `written` says that one may stand in the table."""

    id: UUID = field(default_factory=uuid4)
    written: bool = False


def last_clocks(messages: Sequence[Message]) -> dict[str, int]:
    """Return each key of a batch and its last clock in it."""
    return {message.key: message.clock for message in messages}  # in clock order: the last one stays


class Notes:
    """The notes of one worker process, over a session of their own; for any thread but that of the loop (`apart`)."""

    def __init__(self, dsn: str, schema: str, inbox: str) -> None:
        # A note that a crash of the server takes along says nothing that is missed. What waits for a lock waits for
        # a batch, and the lanes' notes stand in line behind it.
        session = settings.UNATTENDED | PINNED | {"synchronous_commit": "off", "lock_timeout": "100ms"}
        self._post = Post(dsn, f"worker notes {inbox}", session)
        self._names = {"schema": schema, "inbox": inbox}
        self._without_until = 0.0
        self._thread = ThreadPoolExecutor(1, f"mailroom-notes-{inbox}")

    async def apart(self, work: Callable[..., object], *arguments: object) -> None:
        """Do from the loop what may wait, in a thread of their own: handlers may keep those of asyncio busy."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def write(self, note: Note, messages: Sequence[Message]) -> None:
        """Send the note of a batch; through a pooler that has no connection free, leave it out."""
        if time.monotonic() < self._without_until:
            return
        keys = last_clocks(messages)
        note.written = True
        try:
            self._post.send(
                WRITE.at(**self._names)(
                    id=note.id, host=platform.node(), pid=os.getpid(), messages=len(messages), keys=list(keys),
                    clocks=list(keys.values()),
                )
            )  # fmt: skip
        except Unanswered:
            self._without_until = time.monotonic() + WITHOUT_S
            log.warning("%s: notes are not taken, working without them for a while", self._names["inbox"])

    def clear(self, note: Note) -> None:
        """Remove the note of a batch that has ended; its lane lives."""
        if note.written:
            removing = REMOVE.at(**self._names)(id=note.id)
            try:
                self._post.send(removing)
            except Unanswered:
                self._post.send(removing)  # on another session, since that one is closed
            note.written = False

    @contextlib.contextmanager
    def clearing(self, note: Note) -> Iterator[None]:
        """Remove the note when its batch has ended, unless by what ends the process too."""
        try:
            yield
        except Exception:
            # At once: while a failure is recorded, the note would look like one of the dead.
            self.clear(note)
            raise
        self.clear(note)

    @contextlib.asynccontextmanager
    async def clearing_async(self, note: Note) -> AsyncIterator[None]:
        """The same, async."""
        try:
            yield
        except Exception:
            await self.apart(self.clear, note)
            raise
        await self.apart(self.clear, note)

    def take_over(self) -> None:
        """Look for notes of the dead, and have what they had in hand counted or tried alone."""
        try:
            with self._post.session() as connection, connection.transaction():
                run(connection, self._taking_over())
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: what the dead had in hand is being tried: looking again later", self._names["inbox"])
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            log.warning("%s: not looking for batches of the dead: %s", self._names["inbox"], type(error).__name__)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self.apart(self.take_over)

    def close(self) -> None:
        """Close the session."""
        self._post.close()
        self._thread.shutdown(wait=False)

    def _taking_over(self) -> Operation[None]:
        rows = yield LEFT.at(**self._names)(age_s=AGE_S)
        for host, pid, is_their_own, keys, clocks, messages, message_id in rows:
            if is_their_own and message_id is not None:
                yield from self._blaming(f"worker {pid} on {host}", keys, clocks, messages, message_id)

    def _blaming(self, dead: str, keys: list[str], clocks: list[int], messages: int, first: UUID) -> Operation[None]:
        schema, inbox = self._names["schema"], self._names["inbox"]
        if messages > 1:
            yield from suspecting(schema, inbox, keys, clocks, DIED)
            log.warning("%s: %s died with %d messages", inbox, dead, messages)
        else:
            recorded: Recorded = yield from recording_failure(schema, inbox, keys[0], clocks[0], first, DIED, "fail")
            log.warning("%s: %s died with %s, attempt %d: %s", inbox, dead, first, recorded.attempt, recorded.fate)
