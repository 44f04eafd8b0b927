"""The order of an inbox by key: a queue of its own for each key, by clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from inbox.by_key import failure, parked_keys
from inbox.by_key.claim import Claimed, Course, Share, reaping_any, reaping_key
from inbox.by_key.due import healing, reaping_due
from inbox.by_key.entries import BY_ROW
from inbox.by_key.failure import Failed, Recorded
from inbox.by_key.parked_keys import Changed, ParkedKey
from inbox.by_key.peek import counting, peeking
from mailroom.message.message import Message
from mailroom.order.traits import BY_KEY, Traits
from mailroom.sql.operation import Operation


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """Each key waits, fails and is parked by itself. See `inbox.order.Order`."""

    traits: ClassVar[Traits] = BY_KEY

    schema: str
    inbox: str

    @property
    def entries(self) -> Mapping[str, str]:
        """By the row of the message."""
        return BY_ROW

    def claiming(self, share: Share, course: Course) -> Operation[tuple[Claimed, Course]]:
        """Of the keys that have waited longest, by the locks of their heads."""
        return reaping_any(self.schema, self.inbox, share, course)

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """Of the first failing key that is due."""
        return reaping_due(self.schema, self.inbox, limit, hold=hold, mine=mine)

    def claiming_key(self, key: str, limit: int, course: Course) -> Operation[tuple[list[Message], Course]]:
        """Of this key's queue."""
        return reaping_key(self.schema, self.inbox, key, limit, course)

    def healing(self, message: Message) -> Operation[None]:
        """The message's key is healthy, or its next message becomes due."""
        return healing(self.schema, self.inbox, message)

    def recording(self, attempt: Failed) -> Operation[Recorded]:
        """The message's key waits, and no other."""
        return failure.recording(self.schema, self.inbox, attempt)

    def suspects(self, before: list[Message], blamed: Message) -> list[Message]:
        """Those of other keys."""
        return [each for each in before if each.key != blamed.key]

    def suspecting(self, keys: Sequence[str], clocks: Sequence[int], error: str) -> Operation[None]:
        """Each key up to its last clock."""
        return failure.suspecting(self.schema, self.inbox, keys, clocks, error)

    def was_in_batch(self, key: str, clock: int, error: str) -> Operation[bool]:
        """By the failure of the message's key."""
        return failure.was_in_batch(self.schema, self.inbox, key, clock, error)

    def peeking(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """By clock."""
        return peeking(self.schema, self.inbox, key, limit)

    def counting(self, key: str | None) -> Operation[int]:
        """Its rows: to take a message is to delete it."""
        return counting(self.schema, self.inbox, key)

    def listing_parked(self, chosen: Mapping[str, object]) -> Operation[list[ParkedKey]]:
        """With the messages of each key in `parked`, and those after them in the inbox."""
        return parked_keys.listing(self.schema, self.inbox, chosen)

    def reading_parked(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """From `parked` and from the inbox, by clock."""
        return parked_keys.reading(self.schema, self.inbox, key, limit)

    def replaying(self, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
        """Back from `parked` into the inbox, below the floors that have passed them."""
        return parked_keys.replaying(self.schema, self.inbox, keys, actor, why)

    def discarding(self, keys: list[str], per_key: int | None) -> Operation[list[Any]]:
        """The first `per_key` messages of each key."""
        return parked_keys.discarding(self.schema, self.inbox, keys, per_key)
