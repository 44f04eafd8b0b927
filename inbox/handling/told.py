"""What the log says of a failed attempt: at ERROR if it was the last one, then with the command to run.

What a handler has chosen by `Park` or `Skip` is not a failure of its code: it is logged at WARNING, and without a
stack.

It names the message, its topic and its key, and the error, but no value.
"""

import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from inbox.by_key.failure import Recorded
from inbox.exceptions import Park, Skip
from inbox.order import Order
from mailroom.errors import Coded
from mailroom.values import shell


@dataclass(frozen=True, slots=True)
class Told:
    """How an attempt ended: the level, the end of the log's text, and the fields of the record."""

    level: int
    text: str
    fields: dict[str, Any]


def is_chosen(error: BaseException | None) -> bool:
    """Tell whether the handler has chosen how its message ends."""
    return isinstance(error, Park | Skip)


def told(order: Order, recorded: Recorded, id: UUID, key: str, error: str, cause: Exception | None = None) -> Told:
    """Return what the log says of an attempt at the message of this id; `error` holds no value of it."""
    command = _command(order, recorded.outcome, key)
    fields = {
        "inbox": order.inbox, "message_id": id, "key": key, "error": error,
        "code": cause.code if isinstance(cause, Coded) else None,
        "attempt": recorded.attempt, "attempts": recorded.max_attempts, "outcome": recorded.outcome,
        "command": command,
    }  # fmt: skip
    # Without a number if there was nothing to count: others have consumed or parked it meanwhile.
    number = f"attempt {recorded.attempt} of {recorded.max_attempts}: " if recorded.attempt else ""
    text = f"{number}{error.removesuffix('.')}; {recorded.outcome}"
    if command is None:
        return Told(logging.WARNING, text, fields)
    return Told(logging.WARNING if is_chosen(cause) else logging.ERROR, f"{text}. See: {command}", fields)


def _command(order: Order, outcome: str, key: str) -> str | None:
    """Return the command that shows what became of a message that is not tried again; None for another one."""
    # A skipped one has no number yet: the key's next claim makes it a dead letter.
    if outcome == "skip":
        return shell.command("dead-letter", "list", "--inbox", order.inbox, schema=order.schema)
    if outcome != "park":
        return None
    of_key = ("--key", key) if order.traits.parks_one else ()
    return shell.command("parked", "show", order.inbox, *of_key, schema=order.schema)
