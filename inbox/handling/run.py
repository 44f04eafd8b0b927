"""How the handlers of a batch run: which one is at work, how long they take, and what an exception of one means."""

import asyncio
import contextlib
import operator
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from inbox.handling.overtime import HandlerTurn
from inbox.handling.taken import TakenBatch
from inbox.sessions.hold import ENDED
from mailroom import events
from mailroom.errors import Coded
from mailroom.message import carry
from mailroom.message.message import Message, let_go
from mailroom.sql.apart import WritesApart, in_hand
from mailroom.sql.runner import is_closed, is_well
from mailroom.sql.sqlstate import ABORTED, NOT_YOURS, Meaning, meaning, sqlstate, was_invalidated


# D-workers-14: SystemExit of a handler ends the worker in order.
class Ended(BaseException):
    """A handler ended the process, for example by SystemExit, which `error` holds.

    SystemExit in a task would leave the event loop at once; this exception lets the other loops finish their batches
    first. The batch's in-flight entry stays: the worker that finds it counts it as a death.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class HandlerFailed(Coded):
    """A handler broke its transaction, or raised an exception that would have another meaning in the worker.

    The text is logged, so it contains no values.
    """


@dataclass(slots=True)
class HandlerRun:
    """How the handlers of one batch run.

    `turn`: how long a handler has been at its message, where that is bounded. `blamed` is the message to blame if the
    batch fails now, None if that would be unknown. `is_open`: handlers have started, so the batch may fail because of
    them; `is_over`: all have returned. `is_transient`: a handler raised an error of the batch's own connection.
    `begun`: how many messages were given to them, and `took_s` how long they took, None while they do. `calls`: when
    each call of a handler began and ended, if somebody wants to know.
    """

    turn: HandlerTurn | None = None
    blamed: Message | None = None
    is_open: bool = False
    is_over: bool = False
    is_transient: bool = False
    begun: int = 0
    took_s: float | None = None
    calls: list[float] = field(default_factory=list)
    _told: tuple[list[Message], float] | None = None  # what a handler that was told to begin was given, and when

    @property
    def handled_s(self) -> list[float]:
        """How long each call of a handler took, if `calls` has that; a call that has not come back is left out."""
        return list(map(operator.sub, self.calls[1::2], self.calls[::2]))

    @contextlib.contextmanager
    def handling(self, taken: TakenBatch, *, whole: bool = False) -> Iterator[Iterator[Any]]:
        """Call the handler inside this context with each message that it gives; with the list of all if `whole`.

        The context decides what an exception means and whom to blame.
        """
        self.is_open = True
        began = time.monotonic()
        try:
            with carry.handling() as turn_to, _in_hand(taken):
                yield self._all(taken) if whole else self._turns(taken, turn_to)
        except Exception as error:
            if (failed := _another_meaning(error)) is not None:
                raise failed from error
            # Checked here, since SQLAlchemy closes the connection after any error that leaves its context.
            self.is_transient = _is_of_this_session(error, taken.driver)
            if sqlstate(error) == ABORTED:
                self.blamed = None  # an earlier statement had failed, perhaps in the handler of an earlier message
            raise
        except asyncio.CancelledError as error:
            if cancellations():
                raise
            # Something that the handler awaited was cancelled, and not the worker.
            raise HandlerFailed("the handler was cancelled", code="MR-handler-cancelled") from error
        finally:
            self.took_s = time.monotonic() - began
            if len(self.calls) % 2:
                self.calls.append(time.monotonic())
            self._tell_ended(taken, sys.exception())
            if len(taken.messages) == 1:
                self.blamed = taken.messages[0]
            if self.turn is not None:
                self.turn.end()

    def _turns(self, taken: TakenBatch, turn_to: Callable[[Message], None]) -> Iterator[Message]:
        """Give each message; when the next one is asked for, the handler of the last one has returned."""
        is_heard = events.heard(events.HandlerBegan) or events.heard(events.HandlerEnded)
        # Not by those events: one for each message costs ten times as much, and most listeners only count.
        is_timed, now = events.heard(events.BatchEnded), time.monotonic
        for message in taken.messages:
            self.blamed = message
            self.begun += 1
            turn_to(message)
            if self.turn is not None:
                self.turn.begin()
            if is_heard:
                self._tell_began(taken, [message])
            if is_timed:
                self.calls.append(now())
            yield message
            let_go(message)
            if is_timed:
                self.calls.append(now())
            if is_heard:
                self._tell_ended(taken, None)
            _check_held(taken)

    def _all(self, taken: TakenBatch) -> Iterator[list[Message]]:
        self.begun = len(taken.messages)
        if self.begun == 1:
            self.blamed = taken.messages[0]
        if self.turn is not None:
            self.turn.begin()
        self._tell_began(taken, taken.messages)
        self.calls.append(time.monotonic())
        yield taken.messages.copy()
        self.calls.append(time.monotonic())
        self._tell_ended(taken, None)
        _check_held(taken)

    def _tell_began(self, taken: TakenBatch, messages: list[Message]) -> None:
        self._told = messages, time.monotonic()
        if events.heard(events.HandlerBegan):
            events.emit(events.HandlerBegan(taken.order.schema, taken.order.inbox, messages))

    def _tell_ended(self, taken: TakenBatch, error: BaseException | None) -> None:
        if self._told is not None:
            (messages, began), self._told = self._told, None
            if events.heard(events.HandlerEnded):
                took_s = time.monotonic() - began
                events.emit(events.HandlerEnded(taken.order.schema, taken.order.inbox, messages, error, took_s))


def _in_hand(taken: TakenBatch) -> contextlib.AbstractContextManager[None]:
    if taken.place is None:
        return contextlib.nullcontext()
    return in_hand(taken.driver, taken.place.oid, taken.place.server_started)


def _another_meaning(error: Exception) -> HandlerFailed | None:
    """Return what an exception stands for that would mean something else in the worker; None for any other one."""
    if isinstance(error, WritesApart):
        return HandlerFailed(str(error), code=error.code)
    if isinstance(error, psycopg.Rollback):
        # psycopg's transaction context would roll back silently, and the batch would look successful.
        return HandlerFailed("the handler raised psycopg.Rollback", code="MR-rollback-raised")
    if sqlstate(error) == NOT_YOURS:
        return HandlerFailed(ENDED, code="MR-transaction-ended")
    return None


def _check_held(taken: TakenBatch) -> None:
    if taken.hold is not None and (why := taken.hold.why_over()):
        raise HandlerFailed(why, code="MR-transaction-ended" if why == ENDED else "MR-transaction-aborted")


def _is_of_this_session(error: Exception, driver: object) -> bool:
    """Return whether the batch's own connection was lost or its transaction must be retried.

    The same error on a connection that the handler opened itself is a failure of the message.
    """
    closed = is_closed(driver)
    if closed is None:
        closed = was_invalidated(error)
    return closed or (meaning(error) is Meaning.AGAIN and not is_well(driver))


def cancellations() -> int:
    """Return how many cancellations of the current task are pending; 0 in a thread without a task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()
