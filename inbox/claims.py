"""Claims of one inbox as operations, for `Inbox`, for a worker, and for the test kit."""

from collections.abc import Sequence
from uuid import UUID

from inbox.claim import Claimed, Course, Share, reaping_any
from inbox.due import reaping_due
from inbox.peek import finding
from inbox.total import reaping_total, reaping_total_due
from mailroom.names import inbox_name, schema_name
from mailroom.sql.operation import Operation
from mailroom.total import is_total


class Claims:
    """Claims messages of an inbox, whatever its order, and remembers the order and where the next claim begins.

    Threads may share an instance.
    """

    def __init__(self, schema: str, inbox: str) -> None:
        """Raise `InvalidName`."""
        self.inbox = inbox_name(inbox)
        self.schema = schema_name(schema)
        self._is_total: bool | None = None  # None: not yet looked up
        self._course = Course()

    @property
    def is_total(self) -> bool:
        """Whether the inbox has total order; False as long as nothing was claimed."""
        return bool(self._is_total)

    def claiming(self, share: Share) -> Operation[Claimed]:
        """Do what `reap_any` does, within the bounds of `share`."""
        if (yield from self.looking_up()):
            return (yield from reaping_total(self.schema, self.inbox, share))
        claimed, self._course = yield from reaping_any(self.schema, self.inbox, share, self._course)
        return claimed

    def claiming_due(self, limit: int = 1, *, hold: bool = False, mine: Sequence[UUID] = ()) -> Operation[Claimed]:
        """Take one message of a failing key that is due, or end it; take up to `limit` if none is suspected."""
        if (yield from self.looking_up()):
            return (yield from reaping_total_due(self.schema, self.inbox, hold=hold, mine=mine))
        return (yield from reaping_due(self.schema, self.inbox, limit, hold=hold, mine=mine))

    def looking_up(self) -> Operation[bool]:
        """Return whether the inbox has total order. Raises `UnknownInbox`."""
        # Checked once per instance, and first: a statement that fails would abort the caller's transaction.
        return (yield from self.finding()) if self._is_total is None else self._is_total

    def finding(self) -> Operation[bool]:
        """The same, looked up anew whether the inbox is there and seen whole, which each claim asks of the server."""
        yield from finding(self.schema, self.inbox)
        if self._is_total is None:
            self._is_total = yield from is_total(self.schema, self.inbox)
        return self._is_total
