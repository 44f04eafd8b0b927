"""How one worker keeps to the limits of its inbox, and counts when its breaker has to open."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable

from inbox import limits
from inbox.handling.batch import Batch
from inbox.limits import HeldBy
from mailroom import events
from mailroom.sql.operation import Operation

log = logging.getLogger("mailroom.worker")

# How long a worker of an inbox without limits may not know of new ones: it asks in the transaction of a claim.
KNOWN_S = 5.0
# The longest time between two looks while a limit holds a loop. What holds it may end at any time.
LOOK_S = 1.0

WINDOW_S = 60.0
LEAST = 20  # attempts in the window, for a share of them to say anything


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

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            _, attempts, failures = self._seconds.popleft()
            self.attempts -= attempts
            self.failures -= failures


class Limiting:
    """The limits of one worker's inbox; its loops share it."""

    def __init__(self, schema: str, inbox: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._schema = schema
        self._inbox = inbox
        self._monotonic = monotonic
        self._known = limits.NONE
        self._seen_at = float("-inf")
        self._outcomes = Outcomes(monotonic)

    @property
    def is_rated(self) -> bool:
        """Whether a claim needs tokens."""
        return self._known.is_rated

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
        if self._known.breaker_percent is not None:
            self._outcomes.add(len(batch.messages), 0)
        if batch.has_closed:
            self._tell(False, f"{self._inbox}: the breaker is closed: a message was handled, and workers go on")

    def failed(self) -> bool:
        """Count a failed attempt; return whether the breaker has to open."""
        percent = self._known.breaker_percent
        if percent is None:
            return False
        self._outcomes.add(1, 1)
        return self._outcomes.tripped(percent)

    def opening(self) -> Operation[str | None]:
        """Open the breaker; return why, or None if it is open already."""
        outcomes = self._outcomes
        share = 100 * outcomes.failures // max(1, outcomes.attempts)
        why = f"{outcomes.failures} of {outcomes.attempts} attempts failed ({share} %) within {WINDOW_S:.0f} s"
        is_new = yield from limits.opening(self._schema, self._inbox, why)
        return why if is_new else None

    def opened(self, why: str | None) -> None:
        """Tell that the breaker is open, once that is committed."""
        self._outcomes.clear()
        if why is not None:
            self._tell(
                True,
                f"{self._inbox}: the breaker is open: {why}. Workers claim nothing, except one message at a time to "
                f"try, the first in {limits.TRY_S:.0f} s. To close it: mailroom inbox resume {self._inbox}",
            )

    def _tell(self, is_open: bool, text: str) -> None:
        log.log(logging.WARNING if is_open else logging.INFO, "%s", text, extra={"inbox": self._inbox})
        if events.heard(events.BreakerTurned):
            events.emit(events.BreakerTurned(self._schema, self._inbox, is_open))


def pause_s(held: HeldBy) -> float:
    """Return how long a held loop waits, with jitter, so that those that were held together do not come together."""
    return min(held.for_s, LOOK_S) + random.uniform(0.0, 0.1)  # noqa: S311  # no secret
