"""`mailroom trace`."""

from uuid import UUID

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, say, shown, working
from mailroom.errors import MailroomError
from mailroom.node import trace as message_trace
from mailroom.node.trace import Location
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.runner import run


@click.command()
@click.argument("message_id", metavar="ID", type=click.UUID)
@pass_call
def trace(call: Call, message_id: UUID) -> None:
    """Tell where a message is, what caused it and what it caused, by the id that its send returned.

    It is in the outbox until the dispatcher takes it, then scheduled for later, or in every inbox that gets it, or
    among the dead letters. On its way to another node it is in transit until that node has received it. One whose key
    is parked is held there. A message that was reaped is gone, unless its inbox keeps it (mailroom archive), and so is
    an executable that was executed: then this exits with 1. A message is caused by the one in whose handler it was
    sent. An inbox whose table is locked is left out, and a line on stderr says so.
    What a message caused is shown even if the message itself is gone, up to 1,000 effects. Every table of the
    node is read, so this takes a while on a large backlog.

    \b
    Examples:
      mailroom trace 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11
      mailroom trace 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11 --json
    """
    with working("reading every table"), call.looking("trace") as connection:
        locked = run(connection, reading_locked(call.schema))
        but = locked_inboxes(locked)
        places = message_trace.trace(connection, message_id, but=but, schema=call.schema)
        has_cause = any(place.causation is not None for place in places)
        causes = message_trace.causes(connection, message_id, but=but, schema=call.schema) if has_cause else []
        effects = message_trace.effects(connection, message_id, but=but, schema=call.schema)
    for table in locked:
        note(f"{table}. What is there is not told.")
    if call.json:
        document({"id": message_id, "places": places, "causes": causes, "effects": effects})
        click.get_current_context().exit(0 if places else 1)
    for place in places:
        say(f"{message_id} {described(place)}")
    for cause in dict.fromkeys(place.causation for place in places if place.causation is not None):
        if cause not in {place.id for place in causes}:
            say(f"It follows from {cause}, which is gone.")
    for place in causes:
        say(f"It follows from {place.id}, which {described(place)}")
    for place in effects:
        say(f"From it follows {place.id}, which {described(place)}")
    if not places:
        seen = " that can be read" if locked else ""
        raise MailroomError(
            f"{message_id} is nowhere in schema {call.schema}{seen}: it was reaped or executed, it expired, it was an "
            "event without subscribers, the nodes that it went to have received it, or its transaction has not "
            "committed.",
            code="MR-message-nowhere",
        )


def described(place: Location) -> str:
    """Return where a message is, as the rest of a sentence that begins with it."""
    about = f"(topic {place.topic}, key {place.key}, sent {shown(place.sent_at)})"
    # For its effects, what stands before them is not counted.
    ahead = "" if place.ahead is None else f", {place.ahead:,} before it"
    ahead_in_inbox = ahead if place.is_one_queue or place.ahead is None else f", {place.ahead:,} of its key before it"
    what = "the inbox" if place.is_one_queue else "its key"
    match place.where:
        case "outbox":
            return f"is in the outbox{ahead} {about}: the dispatcher has not taken it yet."
        case "outbox_executable":
            return f"waits to be executed{ahead} {about}: the executor has not taken it yet."
        case "scheduled":
            return f"is scheduled for {shown(place.since)} {about}."
        case "parked":
            return (
                f"is held in inbox {place.inbox} with clock {place.clock}{ahead_in_inbox} {about}; {what} is parked "
                f"since {shown(place.since)}: {place.reason}."
            )
        case "transit":
            return f"is on its way to {place.link} with clock {place.clock} since {shown(place.since)}{ahead} {about}."
        case "reaped":
            return f"was reaped from inbox {place.inbox} with clock {place.clock} at {shown(place.since)} {about}."
        case "log":
            return f"is in log {place.inbox} with clock {place.clock} since {shown(place.since)} {about}."
        case "dead_letter":
            skipped = "" if place.inbox is None else f", skipped by inbox {place.inbox}"
            return f"is a dead letter since {shown(place.since)}{skipped} {about}: {place.reason}."
    waits = f"; {what} failed {place.attempts} times and waits until {shown(place.retry_at)}: {place.reason}"
    return (
        f"is in inbox {place.inbox} with clock {place.clock} since {shown(place.since)}{ahead_in_inbox} "
        f"{about}{waits if place.retry_at else ''}."
    )
