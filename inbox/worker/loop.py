"""A loop of a worker: it runs batch after batch, sleeps when there is nothing to do, and handles failures.

A batch that fails is rolled back. Its failure is recorded before that (`inbox.handling.blame`), while it still locks
its messages.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from inbox.by_key.failure import Recorded
from inbox.exceptions import Unavailable
from inbox.handling.arguments import NotAwaited
from inbox.handling.batch import Batch
from inbox.handling.blame import Patience, is_transient
from inbox.handling.frames import frames
from inbox.handling.overtime import TimedOut
from inbox.handling.run import Ended, HandlerFailed
from inbox.handling.size import Size
from inbox.handling.taken import TakenBatch
from inbox.handling.told import is_chosen, told
from inbox.limits import HeldBy
from inbox.sessions.wakeup import InboxListener
from inbox.worker.connecting import NotConnected, reason
from inbox.worker.in_flight import Entry, InFlight
from inbox.worker.limiting import Limiting, Within, pause_s
from inbox.worker.options import WorkerOptions
from inbox.worker.pace import Pace
from mailroom import events
from mailroom.errors import MailroomError, coded
from mailroom.message.message import Message
from mailroom.session import backoff
from mailroom.session.listener import heard
from mailroom.session.repeats import Repeats
from mailroom.sql.operation import Operation

log = logging.getLogger("mailroom.worker")

LONGEST_PAUSE_S = 10.0


class Due:
    """When the next failing key is due, as far as this worker knows; in seconds of `monotonic`."""

    def __init__(self, poll_interval_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._poll_interval_s = poll_interval_s
        self._monotonic = monotonic
        self._at = inf
        self._not_before = self._recorded_at = -inf

    def in_s(self) -> float:
        """Return the seconds until then; 0 means now."""
        return max(0.0, self._at - self._monotonic())

    def reported(self, in_s: float | None, at: float) -> None:
        """Take the time that a claim returned at `at`; after a miss, a key that is due already waits for the poll."""
        if at < self._recorded_at:
            self._earlier(in_s, at)  # that claim did not know of the failure recorded since
        elif in_s is None:
            self._at = inf
        elif in_s > 0:
            self._at = at + in_s
        else:
            now = self._monotonic()
            self._at = min(max(now, self._not_before), self._at if self._at > now else inf)

    def recorded(self, in_s: float | None) -> None:
        """Take the time of a failure that was just recorded: one more key is due then."""
        self._recorded_at = self._monotonic()
        self._earlier(in_s, self._recorded_at)

    def claimed(self, in_s: float | None, at: float) -> None:
        """Take the result of a claim that got a failing key at `at`; the next one is due `in_s` later."""
        self._at = self._not_before = -inf
        self.reported(in_s, at)

    def missed(self, in_s: float | None, at: float) -> None:
        """Take the result of a claim that got none, since others lock the due keys: wait for the poll or the next."""
        self._at = self._not_before = self._monotonic() + self._poll_interval_s
        self._earlier(in_s, at)

    def _earlier(self, in_s: float | None, at: float) -> None:
        if in_s is not None:
            self._at = min(self._at, at + in_s)


@dataclass(frozen=True, slots=True)
class Service:
    """What a loop needs from its worker, which has only the public names that its users need.

    `starting` raises an error that says what is wrong if no claim can succeed. `work` claims, handles and commits one
    batch, `blaming` records that it failed, `within` runs an operation in a transaction of its own, and `report` calls
    the user's `on_error`.
    """

    schema: str
    inbox: str
    options: WorkerOptions
    blaming: Callable[[Batch, Exception], Operation[Recorded]]
    stopping: asyncio.Event
    patience: Patience
    limiting: Limiting
    troubles: dict[object, Exception]
    repeats: Repeats
    starting: Callable[[], Operation[None]]
    work: Callable[[Batch, Entry], Awaitable[None]]
    within: Within
    report: Callable[[Message | None, Exception], Awaitable[None]]


class Loop:
    """One loop; the worker's loops share `listener`, `in_flight` and `due`."""

    def __init__(self, service: Service, listener: InboxListener, in_flight: InFlight, due: Due) -> None:
        self._service = service
        self._listener = listener
        self._in_flight = in_flight
        self._due = due
        self._entry = Entry()
        self._batch = Batch()
        self._size = Size(service.options.batch)
        self._pace = Pace(service.options.batch, service.options.batch_s)
        self._failures = 0
        self._is_held = False  # what the handler needs is down, since it last handled a batch
        self._is_drained = False
        self._was_due = False
        self._unused = 0  # tokens of the last batch
        self._claimed_at = time.monotonic()
        self._is_working = False

    def idle_s(self) -> float:
        """Return since when it has claimed nothing, in seconds; 0 while a batch is in hand. Safe from any thread."""
        is_in_hand = self._is_working and bool(self._batch.messages)
        return 0.0 if is_in_hand else time.monotonic() - self._claimed_at

    async def run(self) -> None:
        """Run until the worker stops; raises errors that no retry can fix."""
        try:
            while not self._service.stopping.is_set():
                await self._turn()
        except SystemExit as error:
            raise Ended(error) from error
        except Exception as error:
            raise await self._explained(error) from error
        finally:
            self._listener.wake_up(self)

    async def _explained(self, error: Exception) -> Exception:
        """Return the error that best explains the loop's end: a schema or inbox that is gone, or `error` itself."""
        try:
            await self._service.within(self._service.starting())
        except MailroomError as found:
            return found
        except Exception as another:
            log.debug("%s: not explained (%s)", self._service.inbox, type(another).__name__)
        return error

    async def _turn(self) -> None:
        try:
            # They take turns, so that failing keys that are due again and again do not hold up healthy ones.
            if not self._due.in_s() and not self._was_due:
                await self._work(due=True)
            elif self._is_drained and not self._was_due:
                await self._sleep()
            else:
                self._listener.wake_up(self)
                await self._work()
            if self._batch.messages or not self._is_held:
                self._failures, self._is_held = 0, False
                self._service.repeats.over()
        except Exception as error:
            await self._recover(error)

    async def _sleep(self) -> None:
        """Ask deliveries to notify, claim once more what came before that, and wait.

        After a notification the loop still counts as asleep, so that its next claim is also the last one before it
        waits again. It counts as awake once there is more than one batch to do, when no notification is needed.
        """
        ring = self._listener.next_ring()
        rings = await self._listener.asleep(self, self._until_check_s())  # without a listener this is the poll
        if self._service.stopping.is_set():
            return
        await self._work()
        if self._is_drained and rings and not self._service.stopping.is_set():
            await heard(ring, self._until_check_s())

    def _until_check_s(self) -> float:
        return min(self._service.options.poll_interval_s, self._due.in_s(), self._service.limiting.try_in_s())

    async def _work(self, *, due: bool = False) -> None:
        self._batch = batch = Batch(due, min(self._size.next(), self._pace.next()))
        self._was_due = due
        service, limiting = self._service, self._service.limiting
        unused, self._unused = self._unused, 0
        if await limiting.before(batch, unused, service.within):
            self._due.recorded(0.0)
        if batch.allowed.held_by is None:
            await self._run(batch)
            self._size.handled(batch)
            self._unused = batch.unused
            await limiting.after(batch, service.within)
        if batch.allowed.held_by is not None:
            await self._hold(batch.allowed.held_by)

    async def _run(self, batch: Batch) -> None:
        """Have a batch claimed, handled and committed, and learn from it, whatever becomes of it."""
        began = time.monotonic()
        self._is_working = True
        try:
            await self._service.work(batch, self._entry)
        except TimedOut:
            self._entry = Entry()  # a handler that still has the last batch keeps that one's
            raise
        finally:
            self._is_working = False
            took_s = time.monotonic() - began
            if batch.taken is not None:
                self._claimed_at = time.monotonic()
                self._learn(batch.taken, due=batch.due)
            if batch.run.begun and not batch.due:
                handlers_s = took_s if batch.run.took_s is None else batch.run.took_s  # None: it hangs
                self._pace.took(batch.run.begun, handlers_s, took_s - handlers_s)
            if batch.messages and events.heard(events.BatchEnded):
                of, ended, handled_s = self._service, batch.end.outcome, batch.run.handled_s
                events.emit(events.BatchEnded(of.schema, of.inbox, batch.messages, batch.due, ended, handled_s, took_s))

    async def _hold(self, held: HeldBy) -> None:
        """Wait while a limit holds it, at most until it is time to look again. It has no transaction meanwhile.

        It counts as asleep: so `mailroom doctor` sees that the inbox has a worker.
        """
        service = self._service
        self._is_drained = False  # nobody has looked: after the wait it claims, and does not wait for the poll
        self._claimed_at = time.monotonic()  # a worker that is held is well
        wait_s = pause_s(held)
        if events.heard(events.ClaimHeld):
            events.emit(events.ClaimHeld(service.schema, service.inbox, held.limit, wait_s))
        until = time.monotonic() + wait_s
        await self._listener.asleep(self, wait_s)
        await heard(service.stopping, until - time.monotonic())

    def _learn(self, taken: TakenBatch, *, due: bool) -> None:
        self._service.troubles.pop(self, None)
        claimed = taken.claimed
        if not due:
            self._is_drained = claimed.is_all
            if claimed.has_diverted:
                self._due.claimed(claimed.due_in_s, taken.at)
            else:
                self._due.reported(claimed.due_in_s, taken.at)
        elif claimed.messages or claimed.ended:
            self._due.claimed(claimed.due_in_s, taken.at)
        else:
            self._due.missed(claimed.due_in_s, taken.at)

    async def _recover(self, error: Exception) -> None:
        if isinstance(error, NotAwaited):
            raise error  # the program is wrong, so every message would fail
        batch, service = self._batch, self._service
        try:
            if isinstance(error, NotConnected):
                await self._pause(error.error, "no connection, trying again")
            elif service.patience.forgives(error, batch):
                await self._pause(error, "retrying the batch")
            elif not batch.run.is_open:
                raise error
            else:
                # Usually recorded before the rollback; not if the COMMIT failed, or if recording failed then.
                recorded = batch.end.recorded
                if recorded is None:
                    recorded = await service.within(service.blaming(batch, error))
                self._size.failed(batch)
                await self._report(recorded, error)
                if batch.run.blamed is not None:
                    await service.limiting.after(batch, service.within, failed=batch.run.blamed)
        except Exception as another:
            why = another.error if isinstance(another, NotConnected) else another
            if another is error or not (why is not another or is_transient(another, Batch())):
                raise
            await self._pause(why, "could not record a failure")

    async def _pause(self, error: Exception, what: str) -> None:
        self._failures += 1
        if events.heard(events.TriedAgain):
            service, reconnects = self._service, self._batch.taken is None
            events.emit(events.TriedAgain(service.schema, "worker", service.inbox, error, reconnects))
        pause_s = backoff.pause_s(self._failures, LONGEST_PAUSE_S)
        if isinstance(error, Unavailable):
            self._is_held = True
            pause_s = pause_s if error.after_s is None else error.after_s
        why = type(error).__name__
        if self._batch.taken is None:
            self._service.troubles[self], why = error, reason(error)
        again = self._service.repeats.struck(f"{what} ({why})")
        if again is not None and not self._service.stopping.is_set():
            fields = {"inbox": self._service.inbox, "error": why}
            log.warning("%s: %s (%s)%s", self._service.inbox, what, why, again, extra=fields)
        await heard(self._service.stopping, pause_s)

    async def _report(self, recorded: Recorded, error: Exception) -> None:
        service, batch, message = self._service, self._batch, self._batch.run.blamed
        self._due.recorded(recorded.due_in_s)
        if events.heard(events.AttemptFailed):
            attempt, outcome = recorded.attempt, recorded.outcome
            events.emit(events.AttemptFailed(service.schema, service.inbox, message, attempt, outcome, error))
        # The text of any other error may contain values of the message.
        what = coded(str(error) if isinstance(error, HandlerFailed | TimedOut) else type(error).__name__, error)
        level, fields = logging.WARNING, {"inbox": service.inbox, "error": what}
        where = "" if is_chosen(error) else frames(error)
        if message is None or batch.taken is None:
            text = f"a batch of {len(batch.messages)} failed ({what}), trying its messages one at a time"
        else:
            of = told(batch.taken.order, recorded, message.id, message.key, what, error)
            level, fields = of.level, of.fields | {"topic": message.topic}
            text = f"{message.id} (topic {message.topic}, key {message.key!r}) failed, {of.text}"
        log.log(level, "%s: %s%s", service.inbox, text, where, extra={**fields, "frames": where})
        try:
            await service.report(message, error)
        except Exception as another:
            log.error("%s: on_error failed: %s%s", service.inbox, type(another).__name__, frames(another))
