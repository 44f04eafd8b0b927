"""A worker's batch: its progress, and what is recorded if it fails.

The failure is recorded on another session before the batch is rolled back: as long as the batch locks its messages, no
other worker can try them. If the worker knows which message failed, it counts an attempt of that one, and the messages
handled before it are tried one at a time, so that none of them is repeated more than once. If it does not know, all
messages of the batch are tried one at a time.
"""

import asyncio
import contextlib
import operator
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

from inbox.breakers import Deferred
from inbox.by_key.claim import Claimed
from inbox.by_key.failure import Recorded, failed, last_clocks
from inbox.exceptions import Unavailable
from inbox.handling.overtime import HandlerTurn
from inbox.limits import HeldBy
from inbox.order import Order
from inbox.sessions.hold import ENDED, Hold
from mailroom import events
from mailroom.errors import Coded
from mailroom.message import carry
from mailroom.message.message import Message
from mailroom.session.home import HomeDatabase
from mailroom.sql.apart import WritesApart, in_hand
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import is_closed, is_well
from mailroom.sql.sqlstate import (
    ABORTED,
    BLAMES,
    NO_CURSOR,
    NOT_YOURS,
    Meaning,
    is_lost,
    is_unserializable,
    meaning,
    sqlstate,
    was_invalidated,
)

# D-workers-16: Transient errors are forgiven twice per message.
FORGIVEN = 2  # transient errors in a row that are not counted as attempts at the message being handled
# The same of those that come of the transaction's level. A worker's sessions run the user's statements, and keep the
# level that these rely on; above READ COMMITTED claims and deletions of healthy keys get 40001 from each other.
UNSERIALIZABLE = 100
REMEMBERED = 10_000  # messages


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


# Makes deferred constraints fail now instead of at the COMMIT.
# D-workers-4: Blame is never guessed.
SETTLE = Sql("SET CONSTRAINTS ALL IMMEDIATE")


@dataclass(slots=True)
class Batch:
    """One batch and its progress.

    `due` asks for messages of a failing key instead of any keys, `size` is the greatest number of messages. `claimed`
    is the result of the claim, at the monotonic time `claimed_at`, and `order` that of the inbox. `message` is the one
    to blame if the batch fails now, None if that would be unknown. `hold`: the transaction of the claim.
    `is_transient`: the handler raised an error of the batch's own connection. `open`: handlers have started, so the
    batch may fail because of them. `begun`: how many messages were given to them, and `handlers_s` how long they took,
    None while they do. `ends`: all handlers have returned. `forgiven`: whether the failure is not counted, None until
    decided. `recorded`: the recorded outcome. `place`: the database in which the messages are. `turn`: how long a
    handler has been at its message, where that is bounded. `outcome`: how its transaction has ended, as in
    `mailroom.events.BatchEnded`. `calls`: when each call of a handler began and ended, if a listener wants to know.
    `tokens`: how many messages the inbox's rate lets it have, None without a rate. `held`: the limit because of which
    nothing was claimed. `is_try`: it tries one message while the breaker is open, and `has_closed` it. See
    `inbox.limits`. `deferred`: the breakers of prefixes that were open before its claim.
    """

    due: bool = False
    size: int = 1
    claimed: Claimed | None = None
    claimed_at: float = 0.0
    order: Order | None = None
    message: Message | None = None
    hold: Hold | None = None
    is_transient: bool = False
    open: bool = False
    begun: int = 0
    handlers_s: float | None = None
    ends: bool = False
    forgiven: bool | None = None
    recorded: Recorded | None = None
    place: HomeDatabase | None = None
    turn: HandlerTurn | None = None
    outcome: str = "rolled_back"
    calls: list[float] = field(default_factory=list)
    tokens: int | None = None
    held: HeldBy | None = None
    is_try: bool = False
    has_closed: bool = False
    deferred: Deferred | None = None
    _told: tuple[list[Message], float] | None = None  # what a handler that was told to begin was given, and when

    def take(self, claimed: Claimed, order: Order, connection: object, place: HomeDatabase | None = None) -> None:
        """Take the result of a claim on this connection, which is at this place."""
        self.place, self.order = place, order
        self.claimed, self.claimed_at = claimed, time.monotonic()
        self.hold = Hold(connection) if claimed.messages else None

    @property
    def messages(self) -> list[Message]:
        """The claimed messages; empty before the claim."""
        return self.claimed.messages if self.claimed else []

    @property
    def handled_s(self) -> list[float]:
        """How long each call of a handler took, if `calls` has that; a call that has not come back is left out."""
        return list(map(operator.sub, self.calls[1::2], self.calls[::2]))

    @property
    def driver(self) -> object:
        """The driver's own connection, on which the messages are held; None before the claim."""
        return None if self.hold is None else self.hold.driver

    @property
    def is_alone(self) -> bool:
        """Whether this is a single message of a failing key, whose failure repeats no other message."""
        return self.due and len(self.messages) <= 1

    @property
    def is_followed(self) -> bool:
        """Whether its loop goes on with another batch at once, unless the worker stops."""
        return not self.due and self.claimed is not None and bool(self.messages) and not self.claimed.is_all

    @contextlib.contextmanager
    def handling(self, *, whole: bool = False) -> Iterator[Iterator[Any]]:
        """Call the handler inside this context with each message that it gives; with the list of all if `whole`.

        The context decides what an exception means and whom to blame.
        """
        self.open = True
        began = time.monotonic()
        try:
            with carry.handling() as turn_to, self._in_hand():
                yield self._all() if whole else self._turns(turn_to)
        except WritesApart as error:
            raise HandlerFailed(str(error), code=error.code) from error
        except psycopg.Rollback as error:
            # psycopg's transaction context would roll back silently, and the batch would look successful.
            raise HandlerFailed("the handler raised psycopg.Rollback", code="MR-rollback-raised") from error
        except asyncio.CancelledError as error:
            if cancellations():
                raise
            # Something that the handler awaited was cancelled, and not the worker.
            raise HandlerFailed("the handler was cancelled", code="MR-handler-cancelled") from error
        except Exception as error:
            if sqlstate(error) == NOT_YOURS:
                raise HandlerFailed(ENDED, code="MR-transaction-ended") from error
            # Checked here, since SQLAlchemy closes the connection after any error that leaves its context.
            self.is_transient = self._is_of_this_session(error)
            if sqlstate(error) == ABORTED:
                self.message = None  # an earlier statement had failed, perhaps in the handler of an earlier message
            raise
        finally:
            self.handlers_s = time.monotonic() - began
            if len(self.calls) % 2:
                self.calls.append(time.monotonic())
            self._tell_ended(sys.exception())
            if len(self.messages) == 1:
                self.message = self.messages[0]
            if self.turn is not None:
                self.turn.end()

    def _in_hand(self) -> contextlib.AbstractContextManager[None]:
        if self.place is None:
            return contextlib.nullcontext()
        return in_hand(self.driver, self.place.oid, self.place.server_started)

    def _turns(self, turn_to: Callable[[Message], None]) -> Iterator[Message]:
        """Give each message; when the next one is asked for, the handler of the last one has returned."""
        is_heard = events.heard(events.HandlerBegan) or events.heard(events.HandlerEnded)
        # Not by those events: one for each message costs ten times as much, and most listeners only count.
        is_timed, now = events.heard(events.BatchEnded), time.monotonic
        for message in self.messages:
            self.message = message
            self.begun += 1
            turn_to(message)
            if self.turn is not None:
                self.turn.begin()
            if is_heard:
                self._tell_began([message])
            if is_timed:
                self.calls.append(now())
            yield message
            if is_timed:
                self.calls.append(now())
            if is_heard:
                self._tell_ended(None)
            self._check_held()

    def _all(self) -> Iterator[list[Message]]:
        self.begun = len(self.messages)
        if self.begun == 1:
            self.message = self.messages[0]
        if self.turn is not None:
            self.turn.begin()
        self._tell_began(self.messages)
        self.calls.append(time.monotonic())
        yield self.messages.copy()
        self.calls.append(time.monotonic())
        self._tell_ended(None)
        self._check_held()

    def _tell_began(self, messages: list[Message]) -> None:
        if self.order is not None:
            self._told = messages, time.monotonic()
            if events.heard(events.HandlerBegan):
                events.emit(events.HandlerBegan(self.order.schema, self.order.inbox, messages))

    def _tell_ended(self, error: BaseException | None) -> None:
        if self._told is not None and self.order is not None:
            (messages, began), self._told = self._told, None
            if events.heard(events.HandlerEnded):
                took_s = time.monotonic() - began
                events.emit(events.HandlerEnded(self.order.schema, self.order.inbox, messages, error, took_s))

    def _check_held(self) -> None:
        if self.hold is not None and (why := self.hold.why_over()):
            raise HandlerFailed(why, code="MR-transaction-ended" if why == ENDED else "MR-transaction-aborted")

    def _is_of_this_session(self, error: Exception) -> bool:
        """Return whether the batch's own connection was lost or its transaction must be retried.

        The same error on a connection that the handler opened itself is a failure of the message.
        """
        driver = self.driver
        closed = is_closed(driver)
        if closed is None:
            closed = was_invalidated(error)
        return closed or (meaning(error) is Meaning.AGAIN and not is_well(driver))

    def ending(self) -> Operation[None]:
        """Run what comes between the last handler and the COMMIT; an error here may be the fault of any message."""
        self.ends = True
        if len(self.messages) > 1:
            self.message = None
        if self.due and self.order is not None:
            yield SETTLE.at()()
            yield from self.order.healing(self.messages[-1])

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Commit inside this context."""
        try:
            yield
        except Exception as error:
            if not sqlstate(error) or is_lost(error):  # the server's answer to the COMMIT did not come
                self.outcome = "unknown"
            if sqlstate(error) == NO_CURSOR:  # `Hold` missed it, for example behind a pooler
                raise HandlerFailed(ENDED, code="MR-transaction-ended") from error
            raise

    def committed(self) -> None:
        """Record that the batch is committed: no later error is a message's fault."""
        self.message, self.open, self.outcome = None, False, "committed"


def cancellations() -> int:
    """Return how many cancellations of the current task are pending; 0 in a thread without a task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()


def is_transient(error: Exception, batch: Batch) -> bool:
    """Return whether the error is the fault of the database or of our connection, and not of a message."""
    if batch.open and not batch.ends:
        return batch.is_transient
    return meaning(error) not in BLAMES


HANDLED_PER_REPEATED = 10


class Size:
    """How many messages the next batch of a loop may hold: `most`, unless too many had to be repeated recently.

    When a message fails, those handled before it in the batch are rolled back and handled again. To keep a storm of
    failures from repeating a full batch each time, a loop has an allowance: a tenth of the messages it handles, of
    which at most a full batch is saved up. A batch holds one message, and as many more as the allowance covers. So,
    whatever fails, a loop repeats at most a tenth of what it handles, plus one full batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._saved = HANDLED_PER_REPEATED * (most - 1)  # counted in messages handled

    def next(self) -> int:
        """Return the size of the next batch: `most` or a power of two, since each size is a statement to be planned."""
        size = 1 + self._saved // HANDLED_PER_REPEATED
        return size if size == self._most else 1 << (size.bit_length() - 1)

    def handled(self, batch: Batch) -> None:
        """Add to the allowance for a batch that was committed."""
        if not batch.is_alone:
            self._saved = min(self._saved + len(batch.messages), HANDLED_PER_REPEATED * (self._most - 1))

    def failed(self, batch: Batch) -> None:
        """Charge a failed batch: the messages before the failed one are repeated, or all but one if it is unknown."""
        messages, blamed = batch.messages, batch.message
        repeated = len(messages) - 1 if blamed is None else messages.index(blamed)
        self._saved = max(0, self._saved - HANDLED_PER_REPEATED * repeated)


class Patience:
    """How often transient errors struck while a message was being handled; one worker's loops share it.

    Some errors look transient but come from a message: its handler terminates its own backend, exceeds a timeout of its
    session, or runs into the same deadlock each time. If these were never counted, its batch would be retried for ever.
    40001 from the server's own comparison of transactions is hardly ever one of these: it takes many in a row.
    """

    def __init__(self) -> None:
        self._times: dict[UUID, int] = {}

    def forgives(self, error: Exception, batch: Batch) -> bool:
        """Return whether to retry the batch without counting an attempt; repeated calls give the same answer."""
        if batch.forgiven is None:
            batch.forgiven = isinstance(error, Unavailable) or (
                is_transient(error, batch) and (not batch.open or self._is_rare(error, batch))
            )
        return batch.forgiven

    def handled(self, batch: Batch) -> None:
        """Reset the counts of a batch's messages."""
        if self._times:
            for message in batch.messages:
                self._times.pop(message.id, None)

    def _is_rare(self, error: Exception, batch: Batch) -> bool:
        if len(self._times) > REMEMBERED:  # counts remain of messages that other workers have handled
            self._times.clear()
        message = batch.message or batch.messages[0]
        self._times[message.id] = times = self._times.get(message.id, 0) + 1
        return times <= (UNSERIALIZABLE if is_unserializable(error) else FORGIVEN)


# The outcome if it is not known which message failed: all keys of the batch are tried one message at a time.
SUSPECTED = Recorded("alone", 0, 0.0)


def blaming(batch: Batch, error: Exception, fatal: tuple[type[BaseException], ...]) -> Operation[Recorded]:
    """Record a failed batch: the attempt at the message to blame, and which messages are tried one at a time."""
    if (order := batch.order) is None:
        return SUSPECTED  # it failed before it had any message
    blamed, suspects = batch.message, batch.messages
    if blamed is not None:
        suspects = order.suspects(suspects[: suspects.index(blamed)], blamed)
    if suspects:
        keys = last_clocks(suspects)
        reason = f"in a batch that failed: {type(error).__name__}"
        yield from order.suspecting(list(keys), list(keys.values()), reason)
    if blamed is None:
        return SUSPECTED
    return (yield from order.recording(failed(blamed, error, fatal)))
