"""Clocks for messages that are put into inboxes by hand: after all that was delivered, under the dispatch lock."""

from mailroom.errors import MailroomError
from mailroom.order.clock import DISPATCH_LOCK, REACHED, raising_ceiling
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

WAITS = Sql("SELECT EXISTS (SELECT FROM {schema}.fan_out)", columns=("boolean",))


def making_room(schema: str, clocks: int) -> Operation[int]:
    """Take the dispatch lock, and return the clock after which there is room for this many."""
    # In a statement of its own: the next one must see everything that the previous deliverer committed.
    yield DISPATCH_LOCK.at(schema=schema)()
    [(waits,)] = yield WAITS.at(schema=schema)()
    if waits:
        raise MailroomError(
            "Messages are being delivered to many inboxes, and what is requeued or replayed must come after them. Try "
            "again in a moment, while a dispatcher runs (mailroom dispatcher run).",
            code="MR-delivery-unfinished",
        )
    # A crash may have set the sequence back, and no clock may be used twice. A dispatcher does so after connecting.
    (base,) = the_one((yield REACHED.at(schema=schema)()), NODE_ROW, schema)
    yield from raising_ceiling(schema, base + clocks)
    return int(base)
