"""`mailroom outbox`."""

import csv
import io
import json
import sys
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NoReturn

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, progress_bar, say
from mailroom.names import topic_name
from mailroom.transaction import run
from outbox.csv_source import CsvSource
from outbox.outbox import Outbox, sending_many

ROWS = 10_000  # held in memory at a time
STDIN = Path("-")


@click.group()
def outbox() -> None:
    """Send messages from a shell."""


@outbox.command()
@click.argument("topic")
@click.option("--json", "text", metavar="VALUE", help="The value of one message, as JSON. Prints the message's id.")
@click.option("--key", metavar="K", help="Its key; messages of one key are reaped in the order sent. Else unordered.")
@click.option(
    "--csv",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="A CSV file, one message a row; - is stdin.",
)
@click.option("--key-column", metavar="C", help="The column with the key; a row in which it is empty is unordered.")
@click.option("--columns", metavar="A,B,...", help="The columns that make up the value. [all]")
@pass_call
def send(
    call: Call,
    topic: str,
    text: str | None,
    key: str | None,
    file: Path | None,
    key_column: str | None,
    columns: str | None,
) -> None:
    """Send one message, or each row of a CSV file, to a topic.

    A CSV file is UTF-8 with a heading; the value of a row is a map of column name to text. It is read as a stream and
    sent in one transaction: all of it or, if a row is wrong, nothing. To get JSON printed here, put that --json first:
    mailroom --json outbox send ...

    \b
    Examples:
      mailroom outbox send order.paid --key order-42 --json '{"state": "paid"}'
      mailroom outbox send flights --csv flights.csv --key-column tailnum --columns flight,origin,dest
      zcat flights.csv.gz | mailroom outbox send flights --csv - --key-column tailnum
    """
    topic_name(topic)
    if (text is None) == (file is None):
        raise click.UsageError("Give --json VALUE or --csv FILE.")
    if text is not None:
        if key_column is not None or columns is not None:
            raise click.UsageError("--key-column and --columns go with --csv.")
        _send_one(call, topic, _parsed(text), key)
    elif file is not None:
        if key is not None:
            raise click.UsageError("--key goes with --json; with --csv the key is in a column: --key-column.")
        _send_csv(call, topic, file, key_column, next(csv.reader([columns or ""]), []))


def _send_one(call: Call, topic: str, value: object, key: str | None) -> None:
    with call.connection("outbox send") as connection:
        message_id = Outbox(call.schema).send(connection, topic, value, key=key)
    if call.json:
        document({"id": message_id, "topic": topic, "key": key})
    else:
        say(str(message_id))


def _send_csv(call: Call, topic: str, file: Path, key_column: str | None, columns: list[str]) -> None:
    size = file.stat().st_size if file != STDIN and file.is_file() else None
    sent = 0
    with (
        _opened(file) as binary,
        # What is not UTF-8 comes as surrogates, by which the row it stands in is found.
        io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines,
        call.connection("outbox send") as connection,
        progress_bar("sent", size) as bar,
    ):
        rows = CsvSource(lines, topic, key_column, columns).rows()
        while batch := list(islice(rows, ROWS)):
            sent += run(connection, sending_many(call.schema, batch))
            bar.show(sent, 0 if size is None else binary.tell())
    if call.json:
        document({"sent": sent, "topic": topic})
    else:
        say(f"{sent:,} messages sent to {topic}.")


def _opened(file: Path) -> BinaryIO:
    return sys.stdin.buffer if file == STDIN else file.open("rb")


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"The value of --json is not JSON: {error.msg} at character {error.pos + 1}.") from None
    except (ValueError, RecursionError):
        raise click.UsageError(
            "The value of --json is not JSON that can be read: it has NaN, or is too deep."
        ) from None


def _refuse(_constant: str) -> NoReturn:
    raise ValueError
