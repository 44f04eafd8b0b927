"""What depends on the order of an inbox, and which order an inbox has.

An inbox is a queue per key (`inbox.by_key.key_order`), one queue in total order (`inbox.total_order.total_order`), or a
reader of a log (`inbox.by_log.log_order`). Which of these it is, is looked up once. The code that claims, handles,
fails or parks uses what this returns, and its traits. Only the order knows where its messages are, and what is left of
those that were taken.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from uuid import UUID

from inbox.by_key.claim import Claimed, Course, Share
from inbox.by_key.failure import Failed, Recorded
from inbox.by_key.key_order import KeyOrder
from inbox.by_key.parked_keys import Changed, ParkedKey
from inbox.by_log.log_order import LogOrder
from inbox.total_order.total_order import TotalOrder
from mailroom.errors import ConfigurationError
from mailroom.logs.readers import LOG
from mailroom.message.message import Message
from mailroom.order.traits import Traits, reading_traits
from mailroom.schema import finding
from mailroom.sql.operation import Operation


# D-reap-1: The order of an inbox is looked up in one place.
class Order(Protocol):
    """The order of one inbox."""

    traits: ClassVar[Traits]

    @property
    def schema(self) -> str:
        """The node's schema."""

    @property
    def inbox(self) -> str:
        """The inbox."""

    @property
    def entries(self) -> Mapping[str, str]:
        """How an in-flight entry finds its first message (`inbox.by_key.entries`)."""

    def claiming(self, share: Share, course: Course) -> Operation[tuple[Claimed, Course]]:
        """Take the next messages that nobody works on; return them, and the course of the next claim.

        After the commit no claim returns them again, and after a rollback the next one does.
        """

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """Take one message of what is failing and due, or end it; take up to `limit` if none is suspected."""

    def claiming_key(self, key: str, limit: int, course: Course) -> Operation[tuple[list[Message], Course]]:
        """Take the oldest messages of one key; wait while another transaction works on it. Return the next course.

        Raises `ConfigurationError` if no key can be reaped without others.
        """

    def healing(self, message: Message) -> Operation[None]:
        """Record that what was failing is handled up to `message`."""

    def recording(self, attempt: Failed) -> Operation[Recorded]:
        """Record a failed attempt, and its outcome."""

    def suspects(self, before: list[Message], blamed: Message) -> list[Message]:
        """Return which of the messages `before` the blamed one its record does not have tried one at a time."""

    def suspecting(self, keys: Sequence[str], clocks: Sequence[int], error: str) -> Operation[None]:
        """Have the messages of a batch tried one at a time, given by the last clock of each of their keys."""

    def was_in_batch(self, key: str, clock: int, error: str) -> Operation[bool]:
        """Return whether this message was in a batch that ended with this error, and no attempt was counted since."""

    def peeking(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """Return the oldest messages of one key or of all, without taking or locking them."""

    def counting(self, key: str | None) -> Operation[int]:
        """Count the messages of one key or of all that wait to be taken."""

    def listing_parked(self, chosen: Mapping[str, object]) -> Operation[list[ParkedKey]]:
        """Return what is parked of what is chosen, and count its messages."""

    def reading_parked(self, key: str | None, limit: int) -> Operation[list[Message]]:
        """Return the first messages that are parked under this key."""

    def replaying(self, keys: list[str], actor: str, why: str | None) -> Operation[Changed]:
        """Let what is parked and locked under these keys go on, with all its messages."""

    def discarding(self, keys: list[str], per_key: int | None) -> Operation[list[Any]]:
        """Delete the first messages of what is parked and locked under these keys.

        The rows say how many messages of each key were deleted and whether the key is free, and have the commands among
        them, to be answered.
        """


ORDERS: dict[str, Callable[..., Order]] = {each.traits.name: each for each in (KeyOrder, TotalOrder, LogOrder)}


def reading_order(schema: str, inbox: str) -> Operation[Order]:
    """Return the order of an inbox that is there."""
    traits = yield from reading_traits(schema, inbox)
    of_log = (yield LOG.at(schema=schema, inbox=inbox)()) if traits.reads_log else [()]
    return ORDERS[traits.name](schema, inbox, *of_log[0])


def finding_order(schema: str, inbox: str) -> Operation[Order]:
    """Return the order of an inbox. Raises `UnknownInbox`."""
    yield from finding(schema, inbox)
    return (yield from reading_order(schema, inbox))


def finding_in_parts(schema: str, inbox: str) -> Operation[None]:
    """Raise `UnknownInbox` unless there is such an inbox, and `ConfigurationError` unless it may be read in parts."""
    yield from finding(schema, inbox)
    traits = yield from reading_traits(schema, inbox)
    if traits.reads_log:
        raise ConfigurationError(
            f"Inbox {inbox!r} reads a log, which keeps what was read. Read the log itself, by "
            'spark.read.format("inbox").option("log", ...), or stream the inbox.',
            code="MR-log-not-in-parts",
        )
    if not traits.in_parts:
        raise ConfigurationError(
            f"Inbox {inbox!r} has {traits.name} order. Spark reads and drains inboxes in parts, and their order would "
            "be lost: use a Worker, or subscribe another inbox to the same topics for Spark.",
            code="MR-total-order-not-in-parts",
        )
