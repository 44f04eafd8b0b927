"""`mailroom outbox`."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, get_args
from uuid import UUID

import click

from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, progress_bar, say, say_whole
from mailroom.cli.parameters import KEY, TOPIC, OneOf, moment
from mailroom.errors import InvalidMessage, MailroomError, coded
from mailroom.message.outgoing import EventType, MessageType, Outgoing, row_of, sending, sending_many
from mailroom.node.trace import Location, trace
from mailroom.session import settings
from mailroom.sql.runner import run
from outbox.cancel import cancelling_by_hand
from outbox.csv_source import CsvSource
from outbox.once import identified, sending_once

HELD_ROWS = 10_000  # held in memory at a time
STDIN = Path("-")
KINDS = {"message": "M", "event": "E", "command": "C"}
ALONE = "\0"  # the value of --json without a value; nobody can type it


def header(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE.")
    return name, value


@click.group(cls=Group)
def outbox() -> None:
    """Send messages from a shell, and cancel them."""


@outbox.command()
@click.argument("topic", type=TOPIC)
@click.option("--value", "values", metavar="JSON", multiple=True, help="The value of one message. Prints its id.")
@click.option(
    "--key", metavar="K", type=KEY, help="Its key: messages of one key are reaped in the order sent. [unordered]"
)
@click.option(
    "--csv",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="A CSV file, one message per row; - is stdin.",
)
@click.option("--key-column", metavar="C", help="The column with the key; a row with an empty key is unordered.")
@click.option("--columns", metavar="A,B,...", help="The columns that make up the value. [all]")
@click.option("--header", "headers", metavar="NAME=VALUE", type=header, multiple=True, help="A header; repeatable.")
@click.option(
    "--deliver-at",
    metavar="TIME",
    type=moment,
    help="Deliver it not before this time: ISO 8601 with a zone, or +SECONDS.",
)
@click.option("--expires-at", metavar="TIME", type=moment, help="Drop it if it is not delivered by this time.")
@click.option("--kind", type=OneOf(list(KINDS)), default="message", show_default=True, help="Who must get it.")
@click.option(
    "--once",
    metavar="TEXT",
    help="Send it once to the topic for this text, however often this is run within seven days.",
)
@click.option("--message-type", type=OneOf(get_args(MessageType)), default="U", show_default=True)
@click.option("--event-type", type=OneOf(get_args(EventType)))
@click.option(
    "--json",
    "as_json",
    metavar="[VALUE]",
    is_flag=False,
    flag_value=ALONE,
    multiple=True,
    help="Print JSON, for programs. Write it last: followed by a VALUE, it means --value.",
)
@pass_call
def send(
    call: Call, /, topic: str, values: tuple[str, ...], key: str | None, file: Path | None, key_column: str | None,
    columns: str | None, headers: tuple[tuple[str, str], ...], kind: str, once: str | None, as_json: tuple[str, ...],
    **fields: Any,
) -> None:  # fmt: skip
    """Send one message, or each row of a CSV file, to a topic.

    A CSV file is UTF-8 with a heading; the value of a row is a map of column name to text. The file is streamed and
    sent in one transaction: if a row is wrong, nothing is sent. Headers, times, kind and types apply to every row.

    At least one inbox must get a message, and exactly one a command; an event needs none. To ask for a reply to a
    command, give --header reply_to=TOPIC. Message type (Object, Database, Collection, User-defined) and event type
    (Created, Updated, Deleted) are only passed on.

    With --once the id is computed from topic and TEXT. If a message with that id was sent within seven days, nothing is
    sent, and the id is printed all the same: any number of crons can run the same command.

    \b
    Examples:
      mailroom outbox send order.paid --key order-42 --value '{"state": "paid"}'
      mailroom outbox send order.remind --key order-42 --value null --deliver-at +3600 --header user=ada
      mailroom outbox send report.due --value null --once "report $(date +%F)"
      mailroom outbox send flights --csv flights.csv --key-column tailnum --columns flight,origin,dest
      zcat flights.csv.gz | mailroom outbox send flights --csv - --key-column tailnum
    """
    call.json = call.json or ALONE in as_json
    if len(dict(headers)) < len(headers):
        raise click.UsageError("A header is given twice; a message has at most one of each name.")
    values += tuple(text for text in as_json if text != ALONE)
    if len(values) + (file is not None) != 1:
        raise click.UsageError("Give one --value JSON, or --csv FILE.")
    with wrong_usage():
        fields |= {"headers": dict(headers), "kind": KINDS[kind]}
        row_of(Outgoing(topic, None, **fields))
    if file is None:
        if key_column is not None or columns is not None:
            raise click.UsageError("--key-column and --columns go with --csv.")
        _send_one(call, topic, values[0], key, once, fields)
    else:
        if key is not None:
            raise click.UsageError("--key goes with --value; with --csv the key is in a column: --key-column.")
        if once is not None:
            raise click.UsageError("--once goes with --value: it stands for one message.")
        _send_csv(call, topic, file, key_column, next(csv.reader([columns or ""]), []), fields)


def _send_one(call: Call, topic: str, value: str, key: str | None, once: str | None, fields: dict[str, Any]) -> None:
    with wrong_usage():
        message = Outgoing(topic, parsed(value), key, **fields)
        row = row_of(message if once is None else identified(message, once))
    with call.connection("outbox send", settings.SESSION | settings.UNDER_POLICIES) as connection:
        run(connection, (sending if once is None else sending_once)(call.schema, row))
    if call.json:
        document({"id": row[0], "topic": topic, "key": key})
    else:
        say_whole(str(row[0]))


def _send_csv(
    call: Call, topic: str, file: Path, key_column: str | None, columns: list[str], fields: dict[str, Any]
) -> None:
    size = file.stat().st_size if file != STDIN and file.is_file() else None
    sent = 0
    with (
        _opened(file) as binary,
        # Bytes that are not UTF-8 become surrogates, so that the error can name the row.
        io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines,
        call.connection("outbox send", settings.SESSION | settings.UNDER_POLICIES) as connection,
        progress_bar("sent", size) as bar,
    ):
        rows = CsvSource(lines, topic, key_column, columns, fields).rows()
        while batch := list(islice(rows, HELD_ROWS)):
            sent += run(connection, sending_many(call.schema, batch))
            bar.show(sent, 0 if size is None else binary.tell())
    if call.json:
        document({"sent": sent, "topic": topic})
    else:
        say(f"{sent:,} messages sent to {topic}.")


def _opened(file: Path) -> BinaryIO:
    return sys.stdin.buffer if file == STDIN else file.open("rb")


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn `InvalidMessage` into wrong usage: the whole message was typed."""
    try:
        yield
    except InvalidMessage as error:
        raise click.UsageError(coded(str(error), error)) from None


def parsed(text: str) -> object:
    """Return the value of a message that was typed as JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"The value is not JSON: {error.msg} at character {error.pos + 1}.") from None
    except (ValueError, RecursionError):
        raise click.UsageError("The value is not valid JSON: it contains NaN, or is nested too deep.") from None


def _refuse(_constant: str) -> NoReturn:
    raise ValueError


@outbox.command()
@click.argument("message_id", metavar="ID", type=click.UUID)
@click.option("--free-once", is_flag=True, help="Let the text of its --once be used again.")
@answering
@pass_call
def cancel(call: Call, message_id: UUID, free_once: bool, actor: str, why: str | None) -> None:
    """Delete a message that is not yet delivered, or is scheduled, by the id that its send returned.

    Once a dispatcher has delivered it, it is too late: then this exits with 1, and says where the message is. Other
    messages of its key are delivered as if it had never been sent.

    \b
    Examples:
      mailroom outbox cancel 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11 --why "sent by mistake"
      mailroom outbox cancel 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11 --free-once
    """
    with call.connection("outbox cancel") as connection:
        keys = run(connection, cancelling_by_hand(call.schema, message_id, actor, why, free_once=free_once))
        places = [] if keys else trace(connection, message_id, schema=call.schema)
    if not keys:
        where = ", ".join(dict.fromkeys(map(_place, places))) or "nowhere: it was reaped, it expired, or was never sent"
        raise MailroomError(f"Message {message_id} is not cancelled: it is {where}.", code="MR-too-late-to-cancel")
    if call.json:
        document({"id": message_id, "key": keys[0], "cancelled": True, "free_once": free_once})
    else:
        say(f"Message {message_id} of key {keys[0]} is cancelled.")


def _place(place: Location) -> str:
    match place.where:
        case "inbox" | "parked":
            return f"in inbox {place.inbox}"
        case "transit":
            return f"on its way to {place.link}"
        case "dead_letter":
            return "a dead letter"
        case "outbox":
            return "being delivered to many inboxes"
        case "outbox_executable":
            return "an executable, which cannot be cancelled"
        case "reaped":
            return f"reaped from inbox {place.inbox}"
        case "log":
            return f"in log {place.inbox}"
        case "scheduled":
            return "scheduled"
