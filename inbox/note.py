"""Notes of batches under way: what a worker had in hand when it died, so that a deadly message is counted and stopped.

A lane commits a note of its batch before the handlers run, on another session, and deletes it in the batch's own
transaction. Committed, the note is gone; as long as the batch is open, it locks the note. So a note that nobody locks
was left by a batch that ended without its lane: no process id is asked about, no clock decides.
"""

import asyncio
import contextlib
import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import psycopg

from inbox.failure import Recorded, recording_failure, suspecting
from mailroom import settings
from mailroom.message import Message
from mailroom.operation import Operation, Sql
from mailroom.pooler import is_pooled
from mailroom.severing import answered
from mailroom.transaction import run_async

log = logging.getLogger("mailroom.worker")

WATCH_INTERVAL_S = 1.0
# Its lane locks a note an instant after writing it; a younger one than this is not looked at.
AGE_S = 1.0
DIED = "the worker died with it"
# Through a pooler a note waits for a connection to the server, and all of them may be in the hands of lanes that wait
# for theirs: a batch waits so long, and then it and those after it go without one for a while.
FREE_WITHIN_S = 1.0
WITHOUT_S = 10.0

WRITE = Sql(
    """
INSERT INTO {schema}.worker AS w (id, inbox, host, pid, claimed_at, messages, keys, clocks)
VALUES (%(id)s::uuid, '{inbox}', %(host)s::text, %(pid)s::bigint, clock_timestamp(), %(messages)s::bigint,
        %(keys)s::text[], %(clocks)s::bigint[])
ON CONFLICT (id) DO UPDATE SET claimed_at = excluded.claimed_at, messages = excluded.messages, keys = excluded.keys,
                               clocks = excluded.clocks
"""
)
REMOVE = Sql("DELETE FROM {schema}.worker WHERE id = %(id)s::uuid")

# A server that went down took all batches with it, and no message is to blame.
LEFT = Sql(
    """
WITH found AS MATERIALIZED (
    SELECT id FROM {schema}.worker
    WHERE inbox = '{inbox}' AND claimed_at < clock_timestamp() - %(age_s)s::float8 * interval '1 s'
    ORDER BY claimed_at LIMIT 10 FOR UPDATE SKIP LOCKED)
DELETE FROM {schema}.worker AS w USING found WHERE w.id = found.id
RETURNING host, pid::bigint, claimed_at > pg_postmaster_start_time(), keys, clocks, messages::bigint,
    (SELECT message_id FROM {schema}.inbox_{inbox} AS i WHERE i.key = keys[1] AND i.clock = clocks[1])
""",
    columns=("text", "bigint", "boolean", "text[]", "bigint[]", "bigint", "uuid"),
)


@dataclass(slots=True)
class Note:
    """A lane's note; `written` says that one may stand in the table."""

    id: UUID = field(default_factory=uuid4)
    written: bool = False


def removing(schema: str, note: Note) -> Operation[None]:
    """Delete the note: in the batch's transaction, which then holds it as long as it is open."""
    yield REMOVE.at(schema=schema)(id=note.id)


def last_clocks(messages: Sequence[Message]) -> dict[str, int]:
    """Return each key of a batch and its last clock in it."""
    return {message.key: message.clock for message in messages}  # in clock order: the last one stays


class Notes:
    """The notes of one worker process, over a session of their own; lost, it is made anew at the next use."""

    def __init__(self, dsn: str, schema: str, inbox: str) -> None:
        # A note that a crash of the server takes along says nothing that is missed. What waits for a lock waits for
        # a batch, and the lanes' notes stand in line behind it.
        self._session = settings.UNATTENDED | {"synchronous_commit": "off", "lock_timeout": "100ms"}
        self._dsn = dsn
        self._schema = schema
        self._inbox = inbox
        self._connection: psycopg.AsyncConnection | None = None
        self._lock = asyncio.Lock()
        self._without_until = 0.0

    async def write(self, note: Note, messages: Sequence[Message]) -> None:
        """Commit the note of a batch; through a pooler that has no connection free, leave it out."""
        keys = last_clocks(messages)
        writing = self._writing(note, list(keys), list(keys.values()), len(messages))
        if time.monotonic() < self._without_until:
            return
        note.written = True
        async with self._held() as connection:
            if not is_pooled(connection):
                await run_async(connection, writing)
                return
            try:
                await answered(connection, run_async(connection, writing), FREE_WITHIN_S)
            except psycopg.OperationalError:
                self._without_until = time.monotonic() + WITHOUT_S
                log.warning("%s: the pooler has no connection free, working without notes for a while", self._inbox)

    async def clear(self, note: Note) -> None:
        """Remove the note of a batch that was rolled back; its lane lives."""
        if note.written:
            async with self._held() as connection:
                await run_async(connection, removing(self._schema, note))
            note.written = False

    async def take_over(self) -> None:
        """Look for notes of the dead, and have what they had in hand counted or tried alone."""
        try:
            async with self._held() as connection:
                found = True
                while found:
                    async with connection.transaction():
                        found = await run_async(connection, self._taking_over()) > 0
        except psycopg.errors.LockNotAvailable:
            log.debug("%s: what the dead had in hand is being tried: looking again later", self._inbox)
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            log.warning("%s: not looking for batches of the dead: %s", self._inbox, type(error).__name__)

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self.take_over()

    async def close(self) -> None:
        """Close the session."""
        if self._connection is not None:
            await self._connection.close()

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[psycopg.AsyncConnection]:
        async with self._lock:  # statements of several lanes do not mix with a transaction of the watch
            if self._connection is None or self._connection.closed:
                self._connection = await settings.connect_async(self._dsn, f"worker notes {self._inbox}", self._session)
            try:
                yield self._connection
            except psycopg.errors.LockNotAvailable:
                raise
            except BaseException:
                # Its state is unknown: left within a transaction, it would keep every note from being written.
                await self._connection.close()
                raise

    def _writing(self, note: Note, keys: list[str], clocks: list[int], messages: int) -> Operation[None]:
        yield WRITE.at(schema=self._schema, inbox=self._inbox)(
            id=note.id, host=platform.node(), pid=os.getpid(), messages=messages, keys=keys, clocks=clocks
        )

    def _taking_over(self) -> Operation[int]:
        rows = yield LEFT.at(schema=self._schema, inbox=self._inbox)(age_s=AGE_S)
        for host, pid, is_their_own, keys, clocks, messages, message_id in rows:
            if not is_their_own:
                continue
            if messages > 1:
                yield from suspecting(self._schema, self._inbox, keys, clocks, DIED)
                log.warning("%s: worker %d on %s died with %d messages", self._inbox, pid, host, messages)
            elif message_id is not None:
                recorded: Recorded = yield from recording_failure(
                    self._schema, self._inbox, keys[0], clocks[0], message_id, DIED, "fail"
                )
                log.warning(
                    "%s: worker %d on %s died with %s, attempt %d: %s",
                    self._inbox, pid, host, message_id, recorded.attempt, recorded.fate,
                )  # fmt: skip
        return len(rows)
