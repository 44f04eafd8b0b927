"""How one worker keeps to the limits of its inbox, and opens its breaker."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from inbox import breakers, limits
from inbox.by_key.failure import Recorded
from inbox.handling.batch import Batch
from inbox.limits import HeldBy
from inbox.worker.outcomes import ByPrefix, Outcomes
from mailroom import events
from mailroom.message.message import Message
from mailroom.registry.breakers import Prefix, prefix_of
from mailroom.sql.operation import Operation, T

log = logging.getLogger("mailroom.worker")

# How long a worker of an inbox without limits may not know of new ones: it asks in the transaction of a claim.
KNOWN_S = 5.0
# The longest time between two looks while a limit holds a loop. What holds it may end at any time.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A breaker that has opened, and why; `prefix` is None if it is that of the whole inbox."""

    why: str
    prefix: str | None


class Within(Protocol):
    """Runs an operation in a transaction of its own."""

    async def __call__(self, operation: Operation[T]) -> T: ...  # noqa: D102


class Limiting:
    """The limits of one worker's inbox, as a policy: its loops share it, and ask it `before` and `after` each batch.

    What has to be in the transaction of the batch, or in that of its failure, goes around the operation of the batch
    (`claiming`, `recording`), or is a part of it (`ending`).
    """

    def __init__(self, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._schema = schema
        self._inbox = inbox
        self._monotonic = monotonic
        self._known = limits.NONE
        self._seen_at = float("-inf")
        self._outcomes = Outcomes(monotonic)
        self._by_prefix = ByPrefix(monotonic)
        self._deferred, self._deferred_at = breakers.NOTHING, float("-inf")

    def learning(self) -> Operation[None]:
        """See which limits there are."""
        self._known, self._seen_at = (yield from limits.seeing(self._schema, self._inbox)), self._monotonic()

    def try_in_s(self) -> float:
        """Return in how many seconds to look whether a key of an open prefix is to be tried; inf if none is open."""
        if not self._known.has_open or not self._deferred.open:
            return inf
        first = min(each.try_in_s for each in self._deferred.open)
        return max(LOOK_S, first - (self._monotonic() - self._deferred_at))

    # -- The two calls of a loop --------------------------------------------------------------------------------------

    async def before(self, batch: Batch, unused: int, within: Within) -> bool:
        """Take the tokens of a batch, or hold it; have the keys wait whose breakers are open.

        `unused` are tokens that the last batch did not need. Returns whether a key is now due, to be tried.
        """
        if self._known.is_rated:
            await within(self._taking(batch, unused))
            if batch.allowed.held_by is not None:
                return False
        is_due = False
        if self._known.has_open:
            for prefix in await within(self._deferring(batch)):
                is_due |= await within(breakers.granting(self._schema, self._inbox, prefix))
        return is_due

    async def after(self, batch: Batch, within: Within, *, failed: Message | None = None) -> None:
        """Count what became of a batch: it is over, or the message `failed`. Open or close the breaker by it."""
        if failed is not None:
            of, outcomes = self._failed(failed)
            if outcomes is not None:
                self._tell_opened(await within(self._opening(of, outcomes)))
            return
        self._committed(batch)
        prefix = self._tried(batch, batch.messages[0]) if batch.messages else None
        if prefix is not None:  # such a batch has one key
            # After the COMMIT: with the batch, others would wait for the rows of all the keys of the prefix.
            self._tell_closed(prefix, await within(breakers.closing_prefix(self._schema, self._inbox, prefix)))

    # -- In the transactions of a batch -------------------------------------------------------------------------------

    def claiming(self, batch: Batch, claim: Operation[None]) -> Operation[None]:
        """Claim, unless a limit holds the batch; otherwise it has its slot, and may be the try.

        Tokens of a claim that took nothing are given back at once, the rest of others before the next batch.
        """
        if not self._known.is_gated and self._monotonic() - self._seen_at < KNOWN_S:
            yield from claim
        else:
            yield from self.learning()
            batch.allowed.held_by = yield from self._why_held(batch)
            if batch.allowed.held_by is None:
                yield from claim
        if batch.allowed.tokens and not batch.messages:
            yield from limits.giving_back(self._schema, self._inbox, batch.allowed.tokens)
            batch.allowed.tokens = 0

    def recording(self, batch: Batch, record: Operation[Recorded]) -> Operation[Recorded]:
        """Record a failed batch, and that a try has failed.

        That of a key comes before the record, and that of the inbox after it: rows are locked in this order everywhere.
        """
        blamed = batch.run.blamed
        if blamed is not None and (prefix := self._tried(batch, blamed)) is not None:
            yield from breakers.failing_try(self._schema, self._inbox, prefix, blamed.key)
        recorded = yield from record
        if batch.allowed.is_try:
            yield from limits.moving_on(self._schema, self._inbox)
        return recorded

    def ending(self, batch: Batch) -> Operation[None]:
        """Close the breaker with the batch of the try, in its transaction."""
        if batch.allowed.is_try:
            batch.allowed.has_closed = yield from limits.closing(self._schema, self._inbox)

    # -----------------------------------------------------------------------------------------------------------------

    def _taking(self, batch: Batch, back: int) -> Operation[None]:
        """Take tokens for a batch, or hold it; `back` of those taken before were not needed."""
        taken = yield from limits.taking(self._schema, self._inbox, batch.size, back)
        if taken is None:
            return
        batch.allowed.tokens, wait_s = tokens, _ = taken
        if not tokens:
            batch.allowed.held_by = HeldBy("rate", wait_s)
        elif tokens < batch.size:
            batch.size = 1 << (tokens.bit_length() - 1)  # each size is a statement to be planned

    def _deferring(self, batch: Batch) -> Operation[list[str]]:
        """Have the keys of open prefixes wait; return the prefixes of which it is time to try a key."""
        self._deferred = yield from breakers.deferring(self._schema, self._inbox, self._deferred)
        batch.allowed.deferred, self._deferred_at = self._deferred, self._monotonic()
        for each in self._deferred.open:
            self._by_prefix.clear(each.prefix)  # what was before says nothing of what comes after
        return [each.prefix for each in self._deferred.open if each.try_in_s <= 0]

    def _why_held(self, batch: Batch) -> Operation[HeldBy | None]:
        known = self._known
        if known.has_open and batch.allowed.deferred is None:
            return HeldBy("breaker", 0.0)  # it opened a moment ago: first its keys have to wait
        if known.is_rated and batch.allowed.tokens is None:
            return HeldBy("rate", 0.0)  # it has one since a moment ago
        if known.is_open:
            self._outcomes.clear()  # what was before says nothing of what comes after
            if known.try_in_s is not None and known.try_in_s <= 0:
                seen = yield from limits.trying(self._schema, self._inbox)
                if seen is None:
                    return HeldBy("breaker", LOOK_S)
                known = self._known = seen
            if known.is_open:
                if known.try_in_s is None or known.try_in_s > 0:
                    return HeldBy("breaker", known.try_in_s or 0.0)
                batch.allowed.is_try, batch.size = True, 1
        if known.concurrency is not None and not (
            yield from limits.locking_slot(self._schema, self._inbox, known.concurrency)
        ):
            return HeldBy("concurrency", LOOK_S)
        return None

    def _tried(self, batch: Batch, message: Message) -> str | None:
        """Return the prefix of a message that was claimed as a try; None if it is not."""
        if not batch.due or batch.allowed.deferred is None:
            return None
        for each in batch.allowed.deferred.open:
            if prefix_of(message.key, each.separator) == each.prefix:
                return each.prefix
        return None

    def _committed(self, batch: Batch) -> None:
        """Count the messages of a batch that was committed."""
        if self._known.breaker_by is not None:
            self._by_prefix.handled(prefix_of(each.key, self._known.breaker_by) for each in batch.messages)
        elif self._known.breaker_percent is not None:
            self._outcomes.add(len(batch.messages), 0)
        if batch.allowed.has_closed:
            self._tell(False, f"{self._inbox}: the breaker is closed: a message was handled, and workers go on")

    def _failed(self, message: Message) -> tuple[Prefix | None, Outcomes | None]:
        """Count a failed attempt; return what it belongs to, and its attempts if the breaker has to open."""
        percent, by = self._known.breaker_percent, self._known.breaker_by
        if percent is None:
            return None, None
        of = None if by is None else Prefix(prefix_of(message.key, by), by)
        if of is None:
            outcomes = self._outcomes
            outcomes.add(1, 1)
        else:
            outcomes = self._by_prefix.failed(of.prefix)
        return of, outcomes if outcomes.tripped(percent) else None

    def _opening(self, of: Prefix | None, outcomes: Outcomes) -> Operation[Opened | None]:
        """Open the breaker; return None if it is open already."""
        why = outcomes.said()
        if of is None:
            is_new = yield from limits.opening(self._schema, self._inbox, why)
        else:
            is_new = yield from breakers.opening_prefix(self._schema, self._inbox, of, why)
            self._known = replace(self._known, has_open=True)
        return Opened(why, None if of is None else of.prefix) if is_new else None

    def _tell_opened(self, opened: Opened | None) -> None:
        """Tell that the breaker is open, once that is committed."""
        self._outcomes.clear()
        if opened is not None:
            of, what = opened.prefix, "nothing" if opened.prefix is None else "nothing of its keys"
            self._tell(
                True,
                f"{self._inbox}: {_named(of)} is open: {opened.why}. Workers claim {what}, except one message at a "
                f"time to try, the first in {limits.TRY_S:.0f} s. To close it: mailroom inbox resume {self._inbox}",
                of,
            )

    def _tell_closed(self, prefix: str, was_open: bool) -> None:
        """Tell that the breaker of a prefix is closed, once that is committed."""
        if was_open:
            self._tell(
                False, f"{self._inbox}: {_named(prefix)} is closed: a message was handled, and its keys go on", prefix
            )

    def _tell(self, is_open: bool, text: str, prefix: str | None = None) -> None:
        fields = {"inbox": self._inbox} | ({} if prefix is None else {"prefix": prefix})
        log.log(logging.WARNING if is_open else logging.INFO, "%s", text, extra=fields)
        if events.heard(events.BreakerTurned):
            events.emit(events.BreakerTurned(self._schema, self._inbox, is_open, prefix))


def _named(prefix: str | None) -> str:
    return "the breaker" if prefix is None else f"the breaker of prefix {prefix!r}"


def pause_s(held: HeldBy) -> float:
    """Return how long a held loop waits, with jitter, so that those that were held together do not come together."""
    return min(held.for_s, LOOK_S) + random.uniform(0.0, 0.1)  # noqa: S311  # no secret
