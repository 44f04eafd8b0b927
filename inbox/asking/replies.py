"""Taking the replies that this process waits for out of its service's inbox: one background session for all of them.

All processes of the service share the inbox, and each takes by key only what it waits for. A reply is taken in a
transaction of its own and handed over after its COMMIT: at most once. A reply that is not waited for stays, until the
janitor drops it (`expire_s`).
"""

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from uuid import UUID
from weakref import WeakValueDictionary

import psycopg

from inbox.by_key.claim import NULLS, PINNED
from inbox.by_key.peek import finding
from inbox.keeping import FITS, keeping
from inbox.sessions.wakeup import InboxListener
from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.message.message import COLUMNS, SELECTED, Message, messages
from mailroom.order.traits import reading_traits
from mailroom.schema import checking
from mailroom.session import backoff, settings
from mailroom.session.disconnect import answered_within
from mailroom.session.home import Home
from mailroom.session.listener import heard
from mailroom.session.repeats import Repeats, cause
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import lone_statement
from mailroom.sql.runner import run_async
from mailroom.values.names import DEFAULT_SCHEMA

log = logging.getLogger("mailroom.requests")

# It does not wait for the disk: after a crash of the server a reply that was handed over may be back, and is not
# waited for.
REPLIES_SESSION = settings.UNATTENDED | PINNED | {"synchronous_commit": "off"}
# D-messages-8: `Requests` looks for its replies by key.
ANSWER_S = 10.0  # the server has so long to let replies be taken, before the session counts as dead
LONGEST_PAUSE_S = 10.0

OUTSIDE = "Replies are not taken here: send requests inside of `with Requests(...)`."

# A reply's key is its request's id, which no other message has. A reply that another transaction holds is left to it.
# D-messages-7: All processes of a service share one inbox for replies.
TAKE = Sql(
    """
WITH bound AS MATERIALIZED (
    SELECT paused_at IS NULL AS is_open, {fits} AS fits FROM {schema}.inbox_registry WHERE name = '{inbox}'),
wanted AS MATERIALIZED (
    SELECT l.place FROM pg_catalog.unnest(%(keys)s::text[]) AS k (key), LATERAL (
        SELECT ctid AS place FROM {schema}.inbox_{inbox} AS i
        WHERE i.key = k.key AND i.kind = 'R'::"char"
          AND (SELECT is_open AND fits FROM bound)
        ORDER BY i.clock LIMIT 1 FOR UPDATE SKIP LOCKED) AS l),
gone AS (
    DELETE FROM {schema}.inbox_{inbox} AS i USING wanted WHERE i.ctid = wanted.place RETURNING i.*){archived}
SELECT {selected}, NULL::boolean FROM gone
UNION ALL
SELECT {nulls}, (SELECT fits FROM bound)
ORDER BY clock
""",
    columns=COLUMNS | {"fits": "boolean"},
    fits=FITS,
    selected=SELECTED,
    nulls=NULLS,
)


def taking(schema: str, inbox: str, keys: list[str]) -> Operation[list[Message]]:
    """Take the first reply under each of these keys, if there is one."""
    for keeps in (False, True):  # replies are seldom kept: then it costs another statement
        *taken, last = yield TAKE.at(**keeping(keeps), schema=schema, inbox=inbox)(keys=keys)
        if TAKE.named([last])[0].fits is not False:
            return messages(taken)
    return []  # the setting was changed between the two statements, and the next ring or poll looks again


KEPT = Sql("SELECT expire_s FROM {schema}.inbox_registry WHERE name = '{inbox}'", columns=("float8",))


def checking_kept(schema: str, inbox: str) -> Operation[None]:
    """Raise an error unless there is such an inbox, which drops replies that no request waits for any more."""
    yield from checking(schema)
    yield from finding(schema, inbox)
    if (yield from reading_traits(schema, inbox)).reads_log:
        raise ConfigurationError(
            f"Inbox {inbox!r} reads a log, and replies never enter one. Make an inbox for replies: "
            "mailroom inbox create NAME --expire-s 600",
            code="MR-log-has-no-replies",
        )
    if (yield KEPT.at(schema=schema, inbox=inbox)()) in ([], [(None,)]):
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise ConfigurationError(
            f"Inbox {inbox!r} would keep replies that no request waits for any more. Let it drop them: "
            f"mailroom inbox set {inbox} --expire-s 600{option}",
            code="MR-replies-kept",
        )


class Expected:
    """One request, and its reply once that was taken; None if replies are no longer taken."""

    def __init__(self, request_id: UUID) -> None:
        self.key = str(request_id)
        self.reply: Future[Message | None] = Future()


class Replies:
    """Takes replies to what is expected, until closed. A request that is no longer referred to is not waited for."""

    def __init__(self, home: Home, schema: str, inbox: str, poll_interval_s: float) -> None:
        self._home = home
        self._schema = schema
        self._inbox = inbox
        self._poll_interval_s = poll_interval_s
        self._listener = InboxListener(home, schema, inbox)
        # Weak: a request whose transaction rolled back is never answered, and must not be waited for for ever.
        self._expected: WeakValueDictionary[str, Expected] = WeakValueDictionary()
        self._changing = threading.Lock()
        self._wanted = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._repeats = Repeats()

    def expect(self, expected: Expected) -> None:
        """Wait for a reply, from any thread. Call it before the request is sent: then no reply comes too early."""
        with self._changing:
            loop = self._loop
            if self._is_closed or loop is None:
                raise ConfigurationError(OUTSIDE, code="MR-requests-closed")
            self._expected[expected.key] = expected
        loop.call_soon_threadsafe(self._wanted.set)

    def forget(self, expected: Expected) -> None:
        """Stop waiting for its reply. A program that keeps an exception's traceback still refers to the request."""
        with self._changing:
            self._expected.pop(expected.key, None)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Allow requests: `run` is about to run in this loop."""
        self._loop = loop

    async def run(self) -> None:
        """Take replies until cancelled; reconnect when the session is lost."""
        listening = asyncio.create_task(self._listener.run())
        failures = 0
        try:
            while True:
                try:
                    connection = await self._home.connect_async(f"requests {self._inbox}", REPLIES_SESSION)
                    async with connection:
                        while True:
                            await self._turn(connection)
                            failures = 0
                            self._repeats.over()
                except (psycopg.Error, ConnectionFailed, ConfigurationError, OSError, TimeoutError) as error:
                    failures += 1
                    why = cause(error)
                    if (again := self._repeats.struck(why)) is not None:
                        log.warning("%s: takes no replies for now (%s)%s", self._inbox, why, again)
                    await asyncio.sleep(backoff.pause_s(failures, LONGEST_PAUSE_S))
        finally:
            self._close()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _turn(self, connection: psycopg.AsyncConnection) -> None:
        """Take what has come, whenever a delivery notifies; without notifications, as often as the poll says."""
        ring = self._listener.next_ring()
        # It stays asleep, so that each delivery notifies: falling asleep again would cost each request a round trip.
        rings = await self._listener.asleep(self, self._poll_interval_s)
        if not self._keys():
            self._wanted.clear()
            if not self._keys():
                await self._wanted.wait()
                if rings:  # the reply will ring: looking for it now would only hold up the request
                    await heard(ring, self._poll_interval_s)
            return
        if keys := self._keys():
            self._hand_over(await answered_within(connection, self._taken(connection, keys), ANSWER_S))
        if rings and self._keys():
            await heard(ring, self._poll_interval_s)

    def _keys(self) -> list[str]:
        with self._changing:
            return list(self._expected)

    async def _taken(self, connection: psycopg.AsyncConnection, keys: list[str]) -> list[Message]:
        async with lone_statement(connection):
            return await run_async(connection, taking(self._schema, self._inbox, keys))

    def _hand_over(self, taken: list[Message]) -> None:
        for message in taken:
            with self._changing:
                expected = self._expected.pop(message.key, None)
            if expected is not None:
                expected.reply.set_result(message)

    def _close(self) -> None:
        with self._changing:
            self._is_closed = True
            left = list(self._expected.values())
            self._expected.clear()
        for expected in left:
            expected.reply.set_result(None)


class ReplyThread:
    """A thread in which replies are taken, for programs without a loop of their own."""

    def __init__(self, replies: Replies, name: str) -> None:
        self._replies = replies
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        # It is a daemon thread: a program that forgets to close it still ends.
        self._thread = threading.Thread(target=self._run, name=f"mailroom-requests-{name}", daemon=True)

    def start(self) -> None:
        """Begin to take replies."""
        self._replies.begin(self._loop)
        self._task = self._loop.create_task(self._replies.run())
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended())

    async def _ended(self) -> None:
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task

    def stop(self) -> None:
        """Take no more replies, and wait until the session is closed."""
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()
