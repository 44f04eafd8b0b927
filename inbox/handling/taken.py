"""What a worker's claim took: nothing of it changes while handlers are at work."""

from dataclasses import dataclass

from inbox.by_key.claim import Claimed
from inbox.order import Order
from inbox.sessions.hold import Hold
from mailroom.message.message import Message
from mailroom.session.home import HomeDatabase


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """The result of a claim, at the monotonic time `at`.

    `order` is that of the inbox. `hold`: the transaction of the claim, None if it took nothing. `place`: the database
    in which the messages are.
    """

    claimed: Claimed
    order: Order
    at: float
    hold: Hold | None = None
    place: HomeDatabase | None = None

    @property
    def messages(self) -> list[Message]:
        """The claimed messages."""
        return self.claimed.messages

    @property
    def driver(self) -> object:
        """The driver's own connection, on which the messages are held; None if there are none."""
        return None if self.hold is None else self.hold.driver
