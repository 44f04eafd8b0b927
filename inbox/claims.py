"""Claims of one inbox as operations, for `Inbox`, for a worker, and for the test kit."""

from collections.abc import Sequence
from uuid import UUID

from inbox.by_key.claim import Claimed, Course, Share
from inbox.by_key.peek import finding
from inbox.order import Order, reading_order
from mailroom.message.message import Message
from mailroom.sql.operation import Operation
from mailroom.values.names import inbox_name, schema_name


class Claims:
    """Claims messages of an inbox, and remembers its order and where the next claim begins.

    Threads may share an instance.
    """

    def __init__(self, schema: str, inbox: str) -> None:
        """Raise `InvalidName`."""
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)
        self._order: Order | None = None  # None: not yet looked up
        self._course = Course()

    def claiming(self, share: Share) -> Operation[Claimed]:
        """Do what `reap_any` does, within the bounds of `share`."""
        order = yield from self.looking_up()
        claimed, self._course = yield from order.claiming(share, self._course)
        return claimed

    def claiming_key(self, key: str, limit: int) -> Operation[list[Message]]:
        """Do what `reap` does."""
        order = yield from self.looking_up()
        taken, self._course = yield from order.claiming_key(key, limit, self._course)
        return taken

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """Take one message of a failing key that is due, or end it; take up to `limit` if none is suspected."""
        order = yield from self.looking_up()
        return (yield from order.claiming_due(limit, hold=hold, mine=mine))

    def looking_up(self) -> Operation[Order]:
        """Return the inbox's order. Raises `UnknownInbox`."""
        # Checked once per instance, and first: a statement that fails would abort the caller's transaction.
        return (yield from self.finding()) if self._order is None else self._order

    def finding(self) -> Operation[Order]:
        """Do the same, and ask again whether the inbox exists and is seen whole, as each claim does."""
        yield from finding(self.schema, self.inbox)
        if self._order is None:
            self._order = yield from reading_order(self.schema, self.inbox)
        return self._order
