"""The reply to an executable's sender: a message with the outcome, sent to the topic named by `notify`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

from dispatcher.executor.batch.fold import KeyContent, Taken
from mailroom.errors import DecodeError, InvalidMessage
from mailroom.message.carry import handling
from mailroom.message.message import parsed
from mailroom.message.outgoing import EventType, Outgoing, row_of, sending_many
from mailroom.sql.operation import Operation, Row

Event: TypeAlias = EventType | None
Status: TypeAlias = Literal[200, 409, 500]
TOO_LARGE = "the details do not fit into a message"


class ReplyRequest(NamedTuple):
    """The executable as the cause of its reply."""

    id: UUID
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of one executable. Status 200: applied; 409: the comparison failed; 500: refused.

    `event` says what happened to the object: C created, U updated, D deleted, None nothing.
    """

    taken: Taken
    status: Status
    details: dict[str, object]
    event: Event = None

    @classmethod
    def of(cls, taken: Taken, before: KeyContent | None, after: KeyContent | None) -> "Reply":
        """Return the reply to a put, an increment or a delete that was applied."""
        if after is None:
            deleted = before is not None
            return cls(taken, 200, {"outcome": "applied", "deleted": int(deleted)}, "D" if deleted else None)
        details: dict[str, object] = {"outcome": "applied"}
        if taken.operation == "increment":
            details["number"] = after.number
        return cls(taken, 200, details, "C" if before is None else "U")

    @classmethod
    def of_call(cls, taken: Taken, result: str | None) -> "Reply":
        """Return the reply to a call that returned this JSON."""
        try:
            details = {"outcome": "applied", "result": None if result is None else parsed(result)}
        except DecodeError:
            details = {"outcome": "applied", "reason": TOO_LARGE}
        return cls(taken, 200, details)

    def row(self) -> Row:
        """Return the row of the message. Details that no message can hold are left out."""
        with handling(ReplyRequest(self.taken.message_id, json.loads(self.taken.headers or "{}"))):
            with suppress(InvalidMessage):
                return row_of(self.message())
            return row_of(replace(self, details={"outcome": self.details["outcome"], "reason": TOO_LARGE}).message())

    def message(self) -> Outgoing:
        """Return the message. An invalid one raises `InvalidMessage` only when its row is asked for."""
        taken = self.taken
        return Outgoing(
            str(taken.notify),
            {"operation": taken.operation, "target": taken.target, "key": taken.key, **self.details},
            taken.key or taken.message_id,
            {"correlation": str(taken.message_id), "status": str(self.status)},
            kind="R",
            message_type="O",
            event_type=self.event,
            after_clock=taken.after_clock,
        )


def sending_replies(schema: str, replies: Sequence[Reply]) -> Operation[int]:
    """Send the replies whose executables ask for one with `notify`; return how many."""
    return (yield from sending_many(schema, [each.row() for each in replies if each.taken.notify]))
