"""`mailroom trace`."""

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, say, shown, working
from mailroom.cli.parameters import KEY, LIMIT
from mailroom.errors import MailroomError
from mailroom.node import trace as message_trace
from mailroom.node.key_trace import SHOWN, KeyPlaces, trace_key
from mailroom.node.trace import Location
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.runner import run
from mailroom.values.shell import quoted


class _MessageId(click.ParamType[UUID]):
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> UUID:
        """Return the id of a text; people know keys better than ids, so what is none is probably a key."""
        try:
            return UUID(value)
        except ValueError:
            self.fail(f"{value!r} is not the id of a message. To find a key: mailroom trace --key {quoted(value)}")


@click.command()
@click.argument("message_id", metavar="[ID]", type=_MessageId(), required=False)
@click.option("--key", metavar="K", type=KEY, help="Find the messages of this key instead.")
@click.option(
    "--limit", type=LIMIT, help=f"With --key: how many messages of each inbox, log, link and table. [{SHOWN}]"
)
@pass_call
def trace(call: Call, message_id: UUID | None, key: str | None, limit: int | None) -> None:
    """Tell where a message is, what caused it and what it caused, by its id; or find the messages of a key.

    The id is what its send returned. A message is in the outbox until the dispatcher takes it, then scheduled for
    later, or in every inbox that gets it, or among the dead letters. On its way to another node it is in transit until
    that node has received it. One whose key is parked is held there. A message that was reaped is gone, unless its
    inbox keeps it (mailroom archive), and so is an executable that was executed: then this exits with 1. A message is
    caused by the one in whose handler it was sent. An inbox whose table is locked is left out, and a line on stderr
    says so.
    What a message caused is shown even if the message itself is gone, up to 1,000 effects. Every table of the
    node is read, so this takes a while on a large backlog.

    With --key it tells where the messages of a key are, and in which inboxes the key is failing, parked or paused. That
    reads a bounded number of rows: the outbox, scheduled messages, dead letters, links and the archive have no index by
    key, and of each one end is looked through. A line on stderr says what was not looked at.

    \b
    Examples:
      mailroom trace --key order-42
      mailroom trace 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11
      mailroom trace 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11 --json
    """
    if message_id is None and key is not None:
        _find_key(call, key, SHOWN if limit is None else limit)
        return
    if message_id is None or key is not None:
        raise click.UsageError("Give the ID of a message, or --key K.")
    if limit is not None:
        raise click.UsageError("--limit is for --key.")
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


def _find_key(call: Call, key: str, limit: int) -> None:
    with working("looking for the key"), call.looking("trace") as connection:
        found = trace_key(connection, key, limit=limit, schema=call.schema)
    if call.json:
        document(found)
        click.get_current_context().exit(1 if found.is_nowhere else 0)
    for line in lines_of_key(found):
        say(line)
    for place in found.places:
        say(f"{place.id} {described(place)}")
    for each in found.unseen:
        note(f"Not looked at: {each.place}: {each.why}.")
    if found.is_nowhere:
        raise MailroomError(
            f"Nothing of key {key!r} was found in schema {call.schema}: nothing of it waits, or it stands where it was "
            "not looked at.",
            code="MR-message-nowhere",
        )


def lines_of_key(found: KeyPlaces) -> Iterator[str]:
    """Return how a key stands in inboxes, and what inboxes have yet to read of it in logs; a sentence for each."""
    for each in found.states:
        what = "The key" if each.key else "The whole inbox, and so the key,"
        then = {
            "paused": f"paused since {shown(each.since)} by {each.paused_by}",
            "parked": f"parked since {shown(each.since)}: {each.error}",
        }.get(
            each.state, f"failing, {each.attempts} times so far, and is tried at {shown(each.retry_at)}: {each.error}"
        )
        yield f"{what} in inbox {each.inbox} is {then}."
    for log in found.unread:
        if log.unread:
            yield (
                f"Inbox {log.inbox} has yet to read {log.unread:,} of its messages in log {log.log}, from clock "
                f"{log.first}: it has read lane {log.lane} up to clock {log.clock}."
            )
        else:
            yield f"Inbox {log.inbox} has read all of its messages in log {log.log}, those that it retries aside."


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
            taken = "reaped" if place.reason is None else "discarded"
            return f"was {taken} from inbox {place.inbox} with clock {place.clock} at {shown(place.since)} {about}."
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
