"""A batch of a worker, how far it came, and what follows if it fails.

What follows is recorded on another session before the batch is rolled back: as long as it locks its messages, nobody
else can try them. If its worker knows which message is to blame, that attempt is counted; the messages that had been
handled before it are tried one at a time, so that none of them is repeated more than once. If nobody knows, all are.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import psycopg

from inbox.claim import Claimed
from inbox.due import healing
from inbox.failure import Recorded, last_clocks, recording, suspecting
from inbox.worker.hold import ENDED, mark, why_over
from mailroom.message import Message
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import driver_of, is_closed, is_well
from mailroom.sql.sqlstate import ABORTED, BLAMES, NO_CURSOR, NOT_YOURS, Meaning, meaning, sqlstate

FORGIVEN = 2  # times in a row that a message may be in hand when passing trouble comes, and not be counted
REMEMBERED = 10_000  # messages


class Ended(BaseException):
    """A handler ended the process, by SystemExit say; asyncio, which would leave the loop at once, does not know this.

    The note of its batch stays: who finds it counts that as a death. The other lanes finish their batches.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class HandlerFailed(Exception):
    """A handler left its transaction so that it cannot be committed, or raised what would mean something else here.

    What it says is logged, so it holds no values.
    """


# Has a deferred constraint fail now, and not at the COMMIT.
SETTLE = Sql("SET CONSTRAINTS ALL IMMEDIATE")


@dataclass(slots=True)
class Batch:
    """One batch, and how far it came.

    `due` asks for what is tried of a key in trouble instead of a batch of any keys, `size` for how many messages at
    most. `claimed` is what a claim gave, at that
    monotonic time. `message` is the one that is to blame if the batch fails now; `passing` says that what its handler
    raised was the trouble of the batch's own connection. `open`: handlers have begun, and the batch may fail by what
    they did; `ends`: all have returned. `forgiven`: it failed by what passes; `recorded`: what follows is recorded.
    """

    due: bool = False
    size: int = 1
    claimed: Claimed | None = None
    claimed_at: float = 0.0
    message: Message | None = None
    driver: object = None
    mark: object = None
    is_transient: bool = False
    open: bool = False
    ends: bool = False
    forgiven: bool | None = None
    recorded: Recorded | None = None

    def take(self, claimed: Claimed, connection: object) -> None:
        """Take what a claim gave on this connection."""
        self.claimed, self.claimed_at = claimed, time.monotonic()
        # Now: of a session whose connection is lost it cannot be had any more.
        self.driver = driver_of(connection) if claimed.messages else None
        self.mark = mark(self.driver)

    @property
    def messages(self) -> list[Message]:
        """What was claimed; nothing as long as nothing is."""
        return self.claimed.messages if self.claimed else []

    @property
    def is_alone(self) -> bool:
        """Whether it is one message of a key in trouble, which repeats no other."""
        return self.due and len(self.messages) <= 1

    @contextlib.contextmanager
    def handling(self, message: Message, connection: object) -> Iterator[None]:
        """Call the handler within."""
        self.message, self.open = message, True
        try:
            yield
            if why := why_over(connection, self.driver, self.mark):
                raise HandlerFailed(why)
        except psycopg.Rollback as error:
            # It would end the transaction around it without a word, and be taken for success.
            raise HandlerFailed("the handler raised psycopg.Rollback") from error
        except asyncio.CancelledError as error:
            if cancellations():
                raise
            # Of something that the handler waited for; the worker itself goes on.
            raise HandlerFailed("the handler was cancelled") from error
        except Exception as error:
            if sqlstate(error) == NOT_YOURS:
                raise HandlerFailed(ENDED) from error
            # Asked here: what a handler failed on, an engine closes afterwards as a matter of course.
            self.is_transient = self._is_of_this_session(error)
            if sqlstate(error) == ABORTED:
                self.message = None  # a statement had failed before, perhaps one of an earlier message's handler
            raise
        finally:
            if len(self.messages) == 1:
                self.message = message

    def _is_of_this_session(self, error: Exception) -> bool:
        """Tell whether the batch's own connection was lost or its transaction has to be run again.

        A handler may have trouble of that kind with a connection of its own; that is a failure of its message.
        """
        closed = is_closed(self.driver)
        if closed is None:
            closed = getattr(error, "connection_invalidated", False)
        return closed or (meaning(error) is Meaning.AGAIN and not is_well(self.driver))

    def ending(self, schema: str, inbox: str) -> Operation[None]:
        """Do what comes between the last handler and the COMMIT; what fails now may be the fault of any of them."""
        self.ends = True
        if len(self.messages) > 1:
            self.message = None
        if self.due:
            yield SETTLE.at()()
            yield from healing(schema, inbox, self.messages[-1])

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Commit within."""
        try:
            yield
        except Exception as error:
            if sqlstate(error) == NO_CURSOR:  # by a pooler, say, that does not pass on what the server reports
                raise HandlerFailed(ENDED) from error
            raise

    def committed(self) -> None:
        """Say that what fails from now on is no message's fault."""
        self.message, self.open = None, False


def cancellations() -> int:
    """Return how often the task that runs this was told to end; a thread never is."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()


def is_transient(error: Exception, batch: Batch) -> bool:
    """Tell whether it is the trouble of the database or of our connection to it, and not the message's."""
    if batch.message is not None and not batch.ends:
        return batch.is_transient
    return meaning(error) not in BLAMES


HANDLED_PER_REPEATED = 10


class Size:
    """How many messages the next batch of a lane may hold: `most`, unless too much had to be repeated lately.

    What was handled in a batch before the message that failed is rolled back and handled once more. So that a storm of
    failures does not repeat a full batch for each of them, a lane has an allowance: of a tenth of what it handles, and
    no more than a full batch is saved up. A batch holds one message, and as many more as the allowance can pay for. So
    whatever fails when, a lane repeats at most a tenth of what it handles, and once a full batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._saved = HANDLED_PER_REPEATED * (most - 1)  # counted in messages handled

    def next(self) -> int:
        """Return the size of the next batch; a power of two, since for each size a statement has to be planned."""
        size = 1 + self._saved // HANDLED_PER_REPEATED
        return size if size == self._most else 1 << (size.bit_length() - 1)

    def handled(self, batch: Batch) -> None:
        """Take that a batch was committed."""
        if not batch.is_alone:
            self._saved = min(self._saved + len(batch.messages), HANDLED_PER_REPEATED * (self._most - 1))

    def failed(self, batch: Batch) -> None:
        """Take that a batch failed by its messages: those before the one to blame are repeated, or all the others."""
        messages, blamed = batch.messages, batch.message
        repeated = len(messages) - 1 if blamed is None else messages.index(blamed)
        self._saved = max(0, self._saved - HANDLED_PER_REPEATED * repeated)


class Patience:
    """How often messages were being handled when trouble came that passes, in one worker; free to share by its lanes.

    Some trouble looks like the database's and is a message's: a handler that ends its own backend, outlasts a timeout
    of its session, or runs into the same deadlock each time. Forgiven for ever, it would roll back its batch for ever.
    """

    def __init__(self) -> None:
        self._times: dict[UUID, int] = {}

    def forgives(self, error: Exception, batch: Batch) -> bool:
        """Tell whether to try the batch again and count nothing; asked as often as one likes of one batch."""
        if batch.forgiven is None:
            batch.forgiven = is_transient(error, batch) and (not batch.open or self._is_rare(batch))
        return batch.forgiven

    def handled(self, batch: Batch) -> None:
        """Forget what its messages were forgiven."""
        if self._times:
            for message in batch.messages:
                self._times.pop(message.id, None)

    def _is_rare(self, batch: Batch) -> bool:
        if len(self._times) > REMEMBERED:  # others have handled them since
            self._times.clear()
        message = batch.message or batch.messages[0]
        self._times[message.id] = times = self._times.get(message.id, 0) + 1
        return times <= FORGIVEN


# Of a batch of which nobody knows the message to blame; all of its keys are tried one message at a time.
SUSPECTED = Recorded("alone", 0, 0.0)


def blaming(
    schema: str, inbox: str, batch: Batch, error: Exception, fatal: tuple[type[BaseException], ...]
) -> Operation[Recorded]:
    """Record what follows from a batch that failed."""
    blamed, suspects = batch.message, batch.messages
    if blamed is not None:
        suspects = [each for each in suspects[: suspects.index(blamed)] if each.key != blamed.key]
    if suspects:
        keys = last_clocks(suspects)
        reason = f"in a batch that failed: {type(error).__name__}"
        yield from suspecting(schema, inbox, list(keys), list(keys.values()), reason)
    if blamed is None:
        return SUSPECTED
    return (yield from recording(schema, inbox, blamed, error, fatal))
