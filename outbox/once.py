"""`once=`: a message that is sent once, however often its sender runs, and however many run at the same time.

The message's id is computed from its topic and the text. It goes through the ids behind the view `outbox_jdbc`, so an
id is known for seven days from its first send.
"""

from dataclasses import replace
from uuid import UUID, uuid5

from mailroom.errors import InvalidMessage
from mailroom.message.outgoing import INSERT, Outgoing
from mailroom.sql.operation import IN_TRANSACTION, Operation, Row, Sql
from mailroom.values.names import topic_name, utf8

# This must never change: with another one, what was sent once would be sent again.
NAMESPACE = UUID("4962d28c-5274-4fb8-91db-ec61c171a097")


def identified(message: Outgoing, once: str) -> Outgoing:
    """Return the message with the id that its topic and the text of `once` give. Raises `InvalidMessage`."""
    if message.id is not None:
        raise InvalidMessage(
            "Give id or once, not both: with once the id is computed from the topic and its text.",
            code="MR-arguments-conflict",
        )
    if not isinstance(once, str) or not once:
        raise InvalidMessage(
            f"once is {'empty' if once == '' else type(once).__name__}: give the text that is the same whenever this "
            "message is sent again, such as the id of an event that you were sent.",
            code="MR-invalid-argument",
        )
    utf8(once, "text of once")
    return replace(message, id=uuid5(NAMESPACE, f"{topic_name(message.topic)}:{once}"))  # no topic has a colon


# One statement: id and message come together, even if the caller is cancelled in it and goes on to the COMMIT. The
# function waits for an open transaction that has the id, and gives no row if it is known.
# D-messages-4: `once` is one statement.
SEND = Sql(
    "INSERT INTO {schema}.outbox ({names}) SELECT {schema}.outbox_jdbc_take({message_id}), {values}",
    names=", ".join(INSERT.values),
    message_id=INSERT.values["message_id"],
    values=", ".join(value for name, value in INSERT.values.items() if name != "message_id"),
)


def sending_once(schema: str, row: Row) -> Operation[None]:
    """Insert one row of `Outgoing.row` of a message that is `identified`, if its id is not known."""
    yield IN_TRANSACTION
    yield SEND.at(schema=schema)(**dict(zip(INSERT.values, row, strict=True)))
