"""A worker's batch: what it may claim, what it has claimed, how its handlers run, and how it has ended."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from inbox.breakers import Deferred
from inbox.by_key.claim import Claimed
from inbox.by_key.failure import Recorded
from inbox.handling.run import HandlerFailed, HandlerRun
from inbox.handling.taken import TakenBatch
from inbox.limits import HeldBy
from inbox.order import Order
from inbox.sessions.hold import ENDED, Hold
from mailroom.message.message import Message
from mailroom.session.home import HomeDatabase
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sqlstate import NO_CURSOR, is_lost, sqlstate

# Makes deferred constraints fail now instead of at the COMMIT.
# D-workers-4: Blame is never guessed.
SETTLE = Sql("SET CONSTRAINTS ALL IMMEDIATE")


@dataclass(slots=True)
class Allowed:
    """What the limits of its inbox allow a batch (`inbox.limits`).

    `tokens`: how many messages the inbox's rate lets it have, None without a rate. `held_by`: the limit because of
    which nothing was claimed. `is_try`: it tries one message while the breaker is open, and `has_closed` it.
    `deferred`: the breakers of prefixes that were open before its claim.
    """

    tokens: int | None = None
    held_by: HeldBy | None = None
    is_try: bool = False
    has_closed: bool = False
    deferred: Deferred | None = None


@dataclass(slots=True)
class BatchEnding:
    """How a batch has ended.

    `outcome`: that of its transaction, as in `mailroom.events.BatchEnded`. `forgiven`: whether the failure is not
    counted, None until decided. `recorded`: the recorded outcome of the attempt.
    """

    outcome: str = "rolled_back"
    forgiven: bool | None = None
    recorded: Recorded | None = None


@dataclass(slots=True)
class Batch:
    """One batch and its progress.

    `due` asks for messages of a failing key instead of any keys, `size` is the greatest number of messages. `taken` is
    what was claimed, None before the claim.
    """

    due: bool = False
    size: int = 1
    allowed: Allowed = field(default_factory=Allowed)
    taken: TakenBatch | None = None
    run: HandlerRun = field(default_factory=HandlerRun)
    end: BatchEnding = field(default_factory=BatchEnding)

    def take(self, claimed: Claimed, order: Order, connection: object, place: HomeDatabase | None = None) -> None:
        """Take the result of a claim on this connection, which is at this place."""
        self.taken = TakenBatch(claimed, order, time.monotonic(), Hold(connection) if claimed.messages else None, place)

    @property
    def messages(self) -> list[Message]:
        """The claimed messages; empty before the claim."""
        return self.taken.messages if self.taken else []

    @property
    def is_alone(self) -> bool:
        """Whether this is a single message of a failing key, whose failure repeats no other message."""
        return self.due and len(self.messages) <= 1

    @property
    def is_followed(self) -> bool:
        """Whether its loop goes on with another batch at once, unless the worker stops."""
        return not self.due and self.taken is not None and bool(self.messages) and not self.taken.claimed.is_all

    @property
    def unused(self) -> int:
        """How many of its tokens were not needed, once it is committed."""
        return max(0, (self.allowed.tokens or 0) - len(self.messages))

    def ending(self) -> Operation[None]:
        """Run what comes between the last handler and the COMMIT; an error here may be the fault of any message."""
        self.run.is_over = True
        if len(self.messages) > 1:
            self.run.blamed = None
        if self.due and self.taken is not None:
            yield SETTLE.at()()
            yield from self.taken.order.healing(self.messages[-1])

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Commit inside this context."""
        try:
            yield
        except Exception as error:
            if not sqlstate(error) or is_lost(error):  # the server's answer to the COMMIT did not come
                self.end.outcome = "unknown"
            if sqlstate(error) == NO_CURSOR:  # `Hold` missed it, for example behind a pooler
                raise HandlerFailed(ENDED, code="MR-transaction-ended") from error
            raise

    def committed(self) -> None:
        """Record that the batch is committed: no later error is a message's fault."""
        self.run.blamed, self.run.is_open, self.end.outcome = None, False, "committed"
