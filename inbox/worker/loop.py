"""A lane of a worker: batch after batch, asleep when there is nothing, and what is done when one fails.

A batch that fails is rolled back. What follows is recorded before (`inbox.blame`), while it still locks its messages.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

from inbox.claim import Claimed
from inbox.failure import Recorded
from inbox.worker.arguments import NotAwaited
from inbox.worker.batch import Batch, Ended, HandlerFailed, Patience, Size, blaming, is_transient
from inbox.worker.frames import frames
from inbox.worker.in_flight import Entry, InFlight
from inbox.worker.wakeup import InboxListener
from mailroom.message import Message
from mailroom.session import backoff
from mailroom.session.listener import heard
from mailroom.sql.operation import Operation, T

log = logging.getLogger("mailroom.worker")

LONGEST_PAUSE_S = 10.0


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

    def reported(self, in_s: float | None, at: float) -> None:
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
        self.reported(in_s, at)

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
    batch: int
    poll_interval_s: float
    fatal: tuple[type[BaseException], ...]
    stopping: asyncio.Event
    patience: Patience

    async def work(self, batch: Batch, entry: Entry) -> None:
        """Claim, handle and commit one batch."""
        ...

    async def within(self, operation: Operation[T]) -> T:
        """Run an operation in a transaction of its own."""
        ...

    async def report(self, message: Message | None, error: Exception) -> None:
        """Hand an error of a handler over to whom the user named."""
        ...


class Loop:
    """One lane; `due` and `notes` are shared with the worker's other lanes."""

    def __init__(self, service: Service, listener: InboxListener, in_flight: InFlight, due: Due) -> None:
        self._service = service
        self._listener = listener
        self._in_flight = in_flight
        self._due = due
        self._entry = Entry()
        self._batch = Batch()
        self._size = Size(service.batch)
        self._failures = 0
        self._is_drained = False
        self._was_due = False

    async def run(self) -> None:
        """Work until the worker stops; raises what no retry mends."""
        try:
            while not self._service.stopping.is_set():
                await self._turn()
        except SystemExit as error:
            raise Ended(error) from error
        finally:
            self._listener.wake_up(self)

    async def _turn(self) -> None:
        try:
            # In turns: keys in trouble that are due again and again do not hold up the healthy ones.
            if not self._due.in_s() and not self._was_due:
                await self._work(due=True)
            elif self._is_drained and not self._was_due:
                await self._sleep()
            else:
                self._listener.wake_up(self)
                await self._work()
            self._failures = 0
        except Exception as error:
            await self._recover(error)

    async def _sleep(self) -> None:
        """Have deliveries ring, scan for what came before they did, and wait.

        Woken, it does not get up, so that the next scan is the one before it waits again; not until there is more than
        a batch to do, when nothing has to ring any more.
        """
        ring = self._listener.next_ring()
        rings = await self._listener.asleep(self, self._until_check_s())  # without the bell, this is the poll
        if self._service.stopping.is_set():
            return
        await self._work()
        if self._is_drained and rings and not self._service.stopping.is_set():
            await heard(ring, self._until_check_s())

    def _until_check_s(self) -> float:
        return min(self._service.poll_interval_s, self._due.in_s())

    async def _work(self, *, due: bool = False) -> None:
        self._batch = batch = Batch(due, self._size.next())
        self._was_due = due
        try:
            await self._service.work(batch, self._entry)
        finally:
            if batch.claimed is not None:
                self._learn(batch.claimed, batch)
        self._size.handled(batch)

    def _learn(self, claimed: Claimed, batch: Batch) -> None:
        if not batch.due:
            self._is_drained = claimed.is_all
            self._due.reported(claimed.due_in_s, batch.claimed_at)
        elif claimed.messages or claimed.ended:
            self._due.had(claimed.due_in_s, batch.claimed_at)
        else:
            self._due.missed(claimed.due_in_s, batch.claimed_at)

    async def _recover(self, error: Exception) -> None:
        if isinstance(error, NotAwaited):
            raise error  # it is the program that is wrong, for every message
        batch, service = self._batch, self._service
        try:
            if service.patience.forgives(error, batch):
                await self._pause(error, "trying the batch again")
            elif not batch.open:
                raise error
            else:
                # Only what failed at its COMMIT, or could not be recorded before it was rolled back, is recorded now.
                recorded = batch.recorded
                if recorded is None:
                    recorded = await service.within(blaming(service.schema, service.name, batch, error, service.fatal))
                self._size.failed(batch)
                await self._tell(recorded, error)
        except Exception as trouble:
            if trouble is error or not is_transient(trouble, Batch()):
                raise
            await self._pause(trouble, "could not record what failed")

    async def _pause(self, error: Exception, what: str) -> None:
        self._failures += 1
        pause_s = backoff.pause_s(self._failures, LONGEST_PAUSE_S)
        if backoff.is_worth_a_line(self._failures, pause_s):
            log.warning("%s: %s (%s)", self._service.name, what, type(error).__name__)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.stopping.wait(), pause_s)

    async def _tell(self, recorded: Recorded, error: Exception) -> None:
        service, batch = self._service, self._batch
        self._due.recorded(recorded.due_in_s)
        # Not the text of any other error: it may hold what the message holds.
        what = str(error) if isinstance(error, HandlerFailed) else type(error).__name__
        if batch.message is None:
            text = f"a batch of {len(batch.messages)} failed ({what}), trying its messages one by one"
        else:
            text = f"{batch.message.id} failed, attempt {recorded.attempt}: {what}; {recorded.outcome}"
        log.warning("%s: %s%s", service.name, text, frames(error))
        try:
            await service.report(batch.message, error)
        except Exception as trouble:
            log.error("%s: on_error failed: %s%s", service.name, type(trouble).__name__, frames(trouble))
