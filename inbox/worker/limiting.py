"""How one worker keeps to the limits of its inbox, and counts when its breaker has to open."""

import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from inbox import breakers, limits
from inbox.handling.batch import Batch
from inbox.limits import HeldBy
from mailroom import events
from mailroom.message.message import Message
from mailroom.registry.breakers import Prefix, prefix_of
from mailroom.sql.operation import Operation

log = logging.getLogger("mailroom.worker")

# How long a worker of an inbox without limits may not know of new ones: it asks in the transaction of a claim.
KNOWN_S = 5.0
# The longest time between two looks while a limit holds a loop. What holds it may end at any time.
LOOK_S = 1.0

WINDOW_S = 60.0
LEAST = 20  # attempts in the window, for a share of them to say anything
MOST_PREFIXES = 1_000  # whose attempts one worker counts


class Outcomes:
    """The attempts of one worker within the last minute, and how many of them failed."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seconds: deque[list[int]] = deque()  # of each second: which, attempts, failures
        self.attempts = self.failures = 0

    def add(self, attempts: int, failures: int) -> None:
        """Count attempts that have ended, and how many of these failed."""
        now = int(self._monotonic())
        self._forget(now)
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append([now, 0, 0])
        self._seconds[-1][1] += attempts
        self._seconds[-1][2] += failures
        self.attempts += attempts
        self.failures += failures

    def tripped(self, percent: int) -> bool:
        """Return whether enough attempts were made, and this share of them failed."""
        return self.attempts >= LEAST and 100 * self.failures >= percent * self.attempts

    def clear(self) -> None:
        """Begin anew."""
        self._seconds.clear()
        self.attempts = self.failures = 0

    def are_well(self) -> bool:
        """Return whether none has failed within the last minute."""
        self._forget(int(self._monotonic()))
        return not self.failures

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            _, attempts, failures = self._seconds.popleft()
            self.attempts -= attempts
            self.failures -= failures


class ByPrefix:
    """The attempts of one worker by prefix: of those that had a failure, at most `MOST_PREFIXES`.

    What succeeds before the first failure of a prefix is not counted, so it costs nothing where all goes
    well.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._of: OrderedDict[str, Outcomes] = OrderedDict()  # the least recently failing first

    def handled(self, prefixes: Iterable[str]) -> None:
        """Count attempts that have succeeded."""
        for prefix in prefixes if self._of else ():
            if (outcomes := self._of.get(prefix)) is None:
                continue
            if outcomes.are_well():
                del self._of[prefix]
            else:
                outcomes.add(1, 0)

    def failed(self, prefix: str) -> Outcomes:
        """Count an attempt that has failed; return those of its prefix."""
        if prefix not in self._of:
            self._of[prefix] = Outcomes(self._monotonic)
        self._of.move_to_end(prefix)
        if len(self._of) > MOST_PREFIXES:
            self._of.popitem(last=False)
        self._of[prefix].add(1, 1)
        return self._of[prefix]

    def clear(self, prefix: str) -> None:
        """Begin anew with a prefix."""
        self._of.pop(prefix, None)


@dataclass(frozen=True, slots=True)
class Opened:
    """A breaker that has opened, and why; `prefix` is None if it is that of the whole inbox."""

    why: str
    prefix: str | None


class Limiting:
    """The limits of one worker's inbox; its loops share it."""

    def __init__(self, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._schema = schema
        self._inbox = inbox
        self._monotonic = monotonic
        self._known = limits.NONE
        self._seen_at = float("-inf")
        self._outcomes = Outcomes(monotonic)
        self._by_prefix = ByPrefix(monotonic)
        self._deferred, self._deferred_at = breakers.NOTHING, float("-inf")

    @property
    def is_rated(self) -> bool:
        """Whether a claim needs tokens."""
        return self._known.is_rated

    @property
    def has_open(self) -> bool:
        """Whether breakers of prefixes are open, so that `deferring` comes before a claim."""
        return self._known.has_open

    def deferring(self, batch: Batch) -> Operation[list[str]]:
        """Have the keys of open prefixes wait; return the prefixes of which it is time to try a key."""
        batch.deferred = self._deferred = yield from breakers.deferring(self._schema, self._inbox, self._deferred)
        self._deferred_at = self._monotonic()
        for each in batch.deferred.open:
            self._by_prefix.clear(each.prefix)  # what was before says nothing of what comes after
        return [each.prefix for each in batch.deferred.open if each.try_in_s <= 0]

    def granting(self, prefix: str) -> Operation[bool]:
        """Have a key of this prefix tried; return whether there is one."""
        return (yield from breakers.granting(self._schema, self._inbox, prefix))

    def try_in_s(self) -> float:
        """Return in how many seconds to look whether a key of an open prefix is to be tried; inf if none is open."""
        if not self._known.has_open or not self._deferred.open:
            return inf
        first = min(each.try_in_s for each in self._deferred.open)
        return max(LOOK_S, first - (self._monotonic() - self._deferred_at))

    def learning(self) -> Operation[None]:
        """See which limits there are."""
        self._known, self._seen_at = (yield from limits.seeing(self._schema, self._inbox)), self._monotonic()

    def taking(self, batch: Batch, back: int) -> Operation[None]:
        """Take tokens for a batch, or hold it; `back` of those taken before were not needed."""
        taken = yield from limits.taking(self._schema, self._inbox, batch.size, back)
        if taken is None:
            return
        batch.tokens, wait_s = taken
        if not batch.tokens:
            batch.held = HeldBy("rate", wait_s)
        elif batch.tokens < batch.size:
            batch.size = 1 << (batch.tokens.bit_length() - 1)  # each size is a statement to be planned

    def holding(self, batch: Batch) -> Operation[bool]:
        """Return whether a limit holds this batch (`batch.held`); otherwise it has its slot, and may be the try."""
        if not self._known.is_gated and self._monotonic() - self._seen_at < KNOWN_S:
            return False
        yield from self.learning()
        batch.held = yield from self._why_held(batch)
        if batch.held is not None and batch.tokens:
            yield from limits.giving_back(self._schema, self._inbox, batch.tokens)
            batch.tokens = 0
        return batch.held is not None

    def _why_held(self, batch: Batch) -> Operation[HeldBy | None]:
        known = self._known
        if known.has_open and batch.deferred is None:
            return HeldBy("breaker", 0.0)  # it opened a moment ago: first its keys have to wait
        if known.is_rated and batch.tokens is None:
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
                batch.is_try, batch.size = True, 1
        if known.concurrency is not None and not (
            yield from limits.locking_slot(self._schema, self._inbox, known.concurrency)
        ):
            return HeldBy("concurrency", LOOK_S)
        return None

    def claimed(self, batch: Batch) -> Operation[None]:
        """Give back the tokens of a claim that took nothing; of any other its loop gives back the rest later."""
        if batch.tokens and not batch.messages:
            yield from limits.giving_back(self._schema, self._inbox, batch.tokens)
            batch.tokens = 0

    def blaming(self, batch: Batch) -> Operation[None]:
        """Record that a try of a key has failed, before its failure: rows are locked in this order everywhere."""
        message = batch.message
        if message is not None and (prefix := self._tried(batch, message)) is not None:
            yield from breakers.failing_try(self._schema, self._inbox, prefix, message.key)

    def _tried(self, batch: Batch, message: Message) -> str | None:
        """Return the prefix of a message that was claimed as a try; None if it is not."""
        if not batch.due or batch.deferred is None:
            return None
        for each in batch.deferred.open:
            if prefix_of(message.key, each.separator) == each.prefix:
                return each.prefix
        return None

    def closes(self, batch: Batch) -> str | None:
        """Return the prefix whose breaker closes, now that this batch is committed: such a batch has one key."""
        return self._tried(batch, batch.messages[0]) if batch.messages else None

    def closing(self, prefix: str) -> Operation[bool]:
        """Close the breaker of a prefix; return whether it was open."""
        return (yield from breakers.closing_prefix(self._schema, self._inbox, prefix))

    def ending(self, batch: Batch) -> Operation[None]:
        """Close the breaker with the batch of the try, in its transaction."""
        if batch.is_try:
            batch.has_closed = yield from limits.closing(self._schema, self._inbox)

    def failing(self, batch: Batch) -> Operation[None]:
        """Record that the try has failed."""
        if batch.is_try:
            yield from limits.moving_on(self._schema, self._inbox)

    def committed(self, batch: Batch) -> None:
        """Count the messages of a batch that was committed."""
        if self._known.breaker_by is not None:
            self._by_prefix.handled(prefix_of(each.key, self._known.breaker_by) for each in batch.messages)
        elif self._known.breaker_percent is not None:
            self._outcomes.add(len(batch.messages), 0)
        if batch.has_closed:
            self._tell(False, f"{self._inbox}: the breaker is closed: a message was handled, and workers go on")

    def failed(self, message: Message) -> Operation[Opened | None] | None:
        """Count a failed attempt; return the operation that opens the breaker if it has to open.

        Its result is None if the breaker is open already.
        """
        percent, by = self._known.breaker_percent, self._known.breaker_by
        if percent is None:
            return None
        of = None if by is None else Prefix(prefix_of(message.key, by), by)
        if of is None:
            outcomes = self._outcomes
            outcomes.add(1, 1)
        else:
            outcomes = self._by_prefix.failed(of.prefix)
        return self._opening(of, outcomes) if outcomes.tripped(percent) else None

    def _opening(self, of: Prefix | None, outcomes: Outcomes) -> Operation[Opened | None]:
        share = 100 * outcomes.failures // max(1, outcomes.attempts)
        why = f"{outcomes.failures} of {outcomes.attempts} attempts failed ({share} %) within {WINDOW_S:.0f} s"
        if of is None:
            is_new = yield from limits.opening(self._schema, self._inbox, why)
        else:
            is_new = yield from breakers.opening_prefix(self._schema, self._inbox, of, why)
            self._known = replace(self._known, has_open=True)
        return Opened(why, None if of is None else of.prefix) if is_new else None

    def opened(self, opened: Opened | None) -> None:
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

    def closed(self, prefix: str, was_open: bool) -> None:
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
