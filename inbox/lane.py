"""A lane of a worker: batch after batch, asleep when there is nothing, and what is done when one fails.

A batch that fails is rolled back. If its worker knows which message is to blame, that attempt is recorded and the
others go on; if nobody knows, the keys of the batch are tried one message at a time, until it shows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import psycopg

from inbox.claim import Claimed
from inbox.failure import Recorded, recording, suspecting
from inbox.note import Note, Notes, last_clocks
from inbox.sleeping import InboxBell
from mailroom import backoff
from mailroom.bell import heard
from mailroom.message import Message
from mailroom.operation import Operation, T
from mailroom.sqlstate import ABORTED, READ_ONLY, RETRIED, sqlstate
from mailroom.transaction import is_aborted

log = logging.getLogger("mailroom.worker")

LONGEST_PAUSE_S = 10.0


class HandlerFailed(Exception):
    """A handler caught an error of the database and returned, as if its transaction could still be committed."""


@dataclass(slots=True)
class Batch:
    """One batch, and how far it came.

    `due` asks for one message of a key in trouble instead of a full batch. `claimed` is what a claim gave, at that
    monotonic time. `message` is the one that is to blame if the batch fails now; `lost` says that its connection was
    lost while it was handled. `open`: handlers have begun, and the batch may fail by what they did; `ends`: all have
    returned.
    """

    due: bool = False
    claimed: Claimed | None = None
    claimed_at: float = 0.0
    message: Message | None = None
    lost: bool = False
    open: bool = False
    ends: bool = False

    @property
    def messages(self) -> list[Message]:
        """What was claimed; nothing as long as nothing is."""
        return self.claimed.messages if self.claimed else []

    @contextlib.contextmanager
    def handling(self, message: Message, connection: Any) -> Iterator[None]:
        """Call the handler within."""
        self.message, self.open = message, True
        try:
            yield
            if is_aborted(connection):
                raise HandlerFailed("the handler returned, but a statement had failed in its transaction")
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Of something that the handler waited for; the worker itself goes on.
            raise HandlerFailed("the handler was cancelled") from error
        except Exception as error:
            # Asked here: what a handler failed on, an engine closes afterwards as a matter of course.
            self.lost = bool(getattr(connection, "closed", False) or getattr(connection, "invalidated", False))
            if sqlstate(error) == ABORTED:
                self.message = None  # a statement had failed before, perhaps one of an earlier message's handler
            raise
        finally:
            if len(self.messages) == 1:
                self.message = message

    def handled(self) -> None:
        """Say that all handlers have returned: what fails now is the COMMIT, and only one message can be blamed."""
        self.ends = True
        if len(self.messages) > 1:
            self.message = None

    def committed(self) -> None:
        """Say that what fails from now on is no message's fault."""
        self.message, self.open = None, False


def _is_cancelled() -> bool:
    """Tell whether the task that runs this was told to end; a thread never is."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


class Due:
    """When a key in trouble is next to be tried, as far as this worker knows; seconds by `monotonic`."""

    def __init__(self, poll_interval_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._poll_interval_s = poll_interval_s
        self._monotonic = monotonic
        self._at = inf
        self._not_before = self._recorded_at = -inf

    def in_s(self) -> float:
        """In how many seconds; 0 for now."""
        return max(0.0, self._at - self._monotonic())

    def told(self, in_s: float | None, at: float) -> None:
        """Take what a claim told at that time; a key that was due and could not be had is looked at after a while."""
        if at < self._recorded_at:
            self._earlier(in_s, at)  # it did not know of that one
        elif in_s is None:
            self._at = inf
        elif in_s > 0:
            self._at = at + in_s
        else:
            now = self._monotonic()
            self._at = min(max(now, self._not_before), self._at if self._at > now else inf)

    def recorded(self, in_s: float | None) -> None:
        """Take what a recorded failure told: one key more."""
        self._recorded_at = self._monotonic()
        self._earlier(in_s, self._recorded_at)

    def had(self, in_s: float | None, at: float) -> None:
        """One was tried, and the next of the others is due in so many seconds from then."""
        self._at = self._not_before = -inf
        self.told(in_s, at)

    def missed(self, in_s: float | None, at: float) -> None:
        """None of those that are due could be had: whoever holds them has them for now. The next one is due then."""
        self._at = self._not_before = self._monotonic() + self._poll_interval_s
        self._earlier(in_s, at)

    def _earlier(self, in_s: float | None, at: float) -> None:
        if in_s is not None:
            self._at = min(self._at, at + in_s)


class Service(Protocol):
    """What a lane needs of its worker."""

    name: str
    schema: str
    poll_interval_s: float
    fatal: tuple[type[BaseException], ...]
    stopping: asyncio.Event

    async def work(self, batch: Batch, note: Note) -> None:
        """Claim, handle and commit one batch."""
        ...

    async def within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""
        ...


class Lane:
    """One lane; `due` and `notes` are shared with the worker's other lanes."""

    def __init__(self, service: Service, bell: InboxBell, notes: Notes, due: Due) -> None:
        self._service = service
        self._bell = bell
        self._notes = notes
        self._due = due
        self._note = Note()
        self._batch = Batch()
        self._failures = 0
        self._is_drained = False

    async def run(self) -> None:
        """Work until the worker stops; raises what no retry mends."""
        try:
            while not self._service.stopping.is_set():
                await self._turn()
        except asyncio.CancelledError:
            # Its batch is rolled back and no message is to blame. A handler that ends the process leaves its note.
            with contextlib.suppress(psycopg.Error):
                await self._notes.apart(self._notes.clear, self._note)
            raise
        finally:
            self._bell.get_up(self)

    async def _turn(self) -> None:
        try:
            if not self._due.in_s():
                await self._work(due=True)
            elif self._is_drained:
                await self._sleep()
            else:
                self._bell.get_up(self)
                await self._work()
            self._failures = 0
        except Exception as error:
            await self._recover(error)

    async def _sleep(self) -> None:
        """Have deliveries ring, scan for what came before they did, and wait.

        Woken, it does not get up, so that the next scan is the one before it waits again; not until there is more than
        a batch to do, when nothing has to ring any more.
        """
        ring = self._bell.next_ring()
        rings = await self._bell.asleep(self, self._until_look_s())  # without the bell, this is the poll
        await self._work()
        if self._is_drained and rings and not self._service.stopping.is_set():
            await heard(ring, self._until_look_s())

    def _until_look_s(self) -> float:
        return min(self._service.poll_interval_s, self._due.in_s())

    async def _work(self, *, due: bool = False) -> None:
        self._batch = batch = Batch(due)
        try:
            await self._service.work(batch, self._note)
        finally:
            if batch.claimed is not None:
                self._learn(batch.claimed, batch)

    def _learn(self, claimed: Claimed, batch: Batch) -> None:
        if not batch.due:
            self._is_drained = claimed.is_all
            self._due.told(claimed.due_in_s, batch.claimed_at)
        elif claimed.messages:
            self._due.had(claimed.due_in_s, batch.claimed_at)
        else:
            self._due.missed(claimed.due_in_s, batch.claimed_at)

    async def _recover(self, error: Exception) -> None:
        batch = self._batch
        try:
            if is_passing(error, batch):
                await self._pause(error, "trying the batch again")
            elif batch.message is not None:
                await self._record(batch.message, error)
            elif batch.open:
                await self._suspect(batch.messages, error)
            else:
                raise error
        except Exception as trouble:
            if trouble is error or not is_passing(trouble, Batch()):
                raise
            await self._pause(trouble, "could not record what failed")

    async def _pause(self, error: Exception, what: str) -> None:
        self._failures += 1
        pause_s = backoff.pause_s(self._failures, LONGEST_PAUSE_S)
        if backoff.is_worth_a_line(self._failures, pause_s):
            log.warning("%s: %s (%s)", self._service.name, what, type(error).__name__)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.stopping.wait(), pause_s)

    async def _record(self, message: Message, error: Exception) -> None:
        service = self._service
        recorded: Recorded = await service.within(
            recording(service.schema, service.name, message, error, service.fatal)
        )
        self._due.recorded(recorded.due_in_s)
        # Not the error's text: it may hold what the message holds.
        log.warning(
            "%s: %s failed, attempt %d: %s; %s",
            service.name, message.id, recorded.attempt, type(error).__name__, recorded.fate,
        )  # fmt: skip

    async def _suspect(self, messages: list[Message], error: Exception) -> None:
        service = self._service
        keys = last_clocks(messages)
        reason = f"in a batch that failed: {type(error).__name__}"
        await service.within(suspecting(service.schema, service.name, list(keys), list(keys.values()), reason))
        self._due.recorded(0)
        log.warning(
            "%s: a batch of %d failed (%s), trying its messages one by one",
            service.name, len(messages), type(error).__name__,
        )  # fmt: skip


def is_passing(error: Exception, batch: Batch) -> bool:
    """Tell whether it is the trouble of the database or of our connection to it, and not the message's."""
    state = sqlstate(error)
    if state in RETRIED or getattr(error, "connection_invalidated", False):
        return True
    if batch.message is not None and not batch.ends:
        # A handler may lose connections of its own; that is a failure of its message.
        return batch.lost
    cause = getattr(error, "orig", None) or error
    return (
        state == READ_ONLY
        or state[:2] in ("08", "53", "57")
        or isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError | ConnectionError)
        # psycopg's own, not the server's: a session that ended right behind a BEGIN or COMMIT gave two answers to it.
        or (isinstance(cause, psycopg.InternalError) and not state)
    )
