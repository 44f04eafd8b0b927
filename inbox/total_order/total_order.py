"""Total order of an inbox: one queue, by (sent_clock, origin), the same at every node that gets the same messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from inbox.by_key import failure, parked_keys
from inbox.by_key.claim import Claimed, Course, Share
from inbox.by_key.entries import BY_ROW
from inbox.by_key.failure import Failed, Recorded
from inbox.by_key.parked_keys import Changed, ParkedKey
from inbox.by_key.peek import counting, peeking_total
from inbox.total_order import total_failure, total_parked
from inbox.total_order.total_claim import healing_total, reaping_total, reaping_total_due
from mailroom.errors import ConfigurationError
from mailroom.message.message import Message
from mailroom.order.traits import IN_TOTAL, Traits
from mailroom.sql.operation import Operation


@dataclass(frozen=True, slots=True)
class TotalOrder:
    """The inbox waits, fails and is parked as a whole, under the key ''. See `inbox.order.Order`."""

    traits: ClassVar[Traits] = IN_TOTAL

    schema: str
    inbox: str

    @property
    def entries(self) -> Mapping[str, str]:
        """By the row of the message."""
        return BY_ROW

    def claiming(self, share: Share, course: Course) -> Operation[tuple[Claimed, Course]]:
        """Up to what is stable, by the lock of the inbox's head; so one transaction at a time."""
        return (yield from reaping_total(self.schema, self.inbox, share)), course

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """The lowest message, never more of them."""
        return reaping_total_due(self.schema, self.inbox, hold=hold, mine=mine)

    def claiming_key(self, key: str, limit: int, course: Course) -> Operation[tuple[list[Message], Course]]:
        """Keys have no queues here."""
        raise ConfigurationError(
            f"Inbox {self.inbox!r} has total order, so no key can be reaped by itself: take the next messages, "
            "whatever their keys, with reap_any (mailroom inbox reap --any).",
            code="MR-total-order-has-no-keys",
        )

    def healing(self, message: Message) -> Operation[None]:
        """The inbox is healthy, or its next message becomes due."""
        return healing_total(self.schema, self.inbox, message)

    def recording(self, attempt: Failed) -> Operation[Recorded]:
        """All messages wait."""
        return failure.recording(self.schema, self.inbox, attempt, total_failure.RECORD)

    def suspects(self, before: list[Message], blamed: Message) -> list[Message]:
        """None: the record has all messages before the failed one tried alone."""
        return []

    def suspecting(self, keys: Sequence[str], clocks: Sequence[int], error: str) -> Operation[None]:
        """All messages up to the last of these."""
        return failure.suspecting(self.schema, self.inbox, keys, clocks, error, total_failure.SUSPECT)

    def was_in_batch(self, key: str, clock: int, error: str) -> Operation[bool]:
        """By the failure of the inbox, up to a sent_clock."""
        return failure.was_in_batch(self.schema, self.inbox, key, clock, error, failing="''", upto="i.sent_clock")

    def peeking(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """By (sent_clock, origin), also those of one key."""
        return peeking_total(self.schema, self.inbox, key, limit)

    def counting(self, key: str | None) -> Operation[int]:
        """Its rows, also those above what is stable."""
        return counting(self.schema, self.inbox, key)

    def listing_parked(self, chosen: Mapping[str, object]) -> Operation[list[ParkedKey]]:
        """The inbox with all its messages, if it is parked."""
        return parked_keys.listing(self.schema, self.inbox, chosen, total_parked.KEYS)

    def reading_parked(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """From the inbox, where they stay."""
        return total_parked.reading(self.schema, self.inbox, limit)

    def replaying(self, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
        """The messages are in their places."""
        return total_parked.replaying(self.schema, self.inbox, actor, why)

    def discarding(self, keys: list[str], per_key: int | None) -> Operation[list[Any]]:
        """The first `per_key` messages of all."""
        return total_parked.discarding(self.schema, self.inbox, per_key)
