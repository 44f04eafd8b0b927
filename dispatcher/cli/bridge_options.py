"""The options of the settings of bridges, for the commands that make one and the one that changes it."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from dispatcher.cli.brokers import called
from mailroom.bridges.arrival import Decoding
from mailroom.bridges.broker import Start
from mailroom.bridges.record import Encoding, Format
from mailroom.bridges.settings import MAX_ORIGINS, OnFailure
from mailroom.cli.parameters import PATTERN, OneOf, WholeNumber, seconds
from mailroom.links.readers import MAX_ROWS
from mailroom.values.names import MAX_COUNT

F = TypeVar("F", bound=Callable[..., Any])


def _topics(text: str) -> list[str]:
    return [topic.strip() for topic in text.split(",") if topic.strip()]


def out_options(command: F) -> F:
    """Add the options of a bridge out, each None unless it is given."""
    for option in (
        click.option(
            "--max-rows",
            metavar="N",
            type=WholeNumber(0, MAX_ROWS),
            help="Cut the bridge once more than N messages wait for it, and give them up; 0 for no limit. [no limit]",
        ),
        click.option(
            "--keep-s",
            metavar="S",
            type=seconds,
            help="Keep what was published for so long. [0: delete it at once]",
        ),
        click.option(
            "--tombstones/--no-tombstones",
            default=None,
            help="Publish messages of event type D without a value. [--no-tombstones]",
        ),
        click.option("--encode", type=OneOf(get_args(Encoding)), help="Of values. [json]"),
        click.option("--format", type=OneOf(get_args(Format)), help="Of the headers. [cloudevents]"),
        click.option(
            "--subscribe",
            "topics",
            metavar="PATTERN",
            type=PATTERN,
            multiple=True,
            help="A topic or pattern to publish; repeat it for several. [all messages and events]",
        ),
        click.option(
            "--topic",
            metavar="TEMPLATE",
            help="The topic at the broker, or the subject; {topic} stands for the message's. [{topic}, or "
            "outbox.event.{topic} for debezium]",
        ),
    ):
        command = option(command)
    return command


def in_options(*, is_new: bool) -> Callable[[F], F]:
    """Give a command the options of a bridge into the node, each None unless it is given."""

    def decorate(command: F) -> F:
        for option in (
            click.option(
                "--max-origins",
                type=WholeNumber(1, MAX_COUNT),
                metavar="N",
                help="How many links of nodes it may know that publish there. A record of one more is not a message. "
                f"[{MAX_ORIGINS}]",
            ),
            click.option(
                "--start",
                type=OneOf(get_args(Start)),
                help="Where to begin: with the first record there, or with what comes from now on. [earliest]",
            ),
            click.option("--decode", type=OneOf(get_args(Decoding)), help="What values are. [auto]"),
            click.option(
                "--key",
                metavar="WHERE",
                help="Where the key is: record, header:NAME, or path:FIELD.FIELD in a value. [record]",
            ),
            click.option(
                "--as-topic",
                metavar="TEMPLATE",
                help="The topic of the messages; {topic} stands for the broker's. [what the record says, else the "
                "broker's]",
            ),
            click.option(
                "--from",
                "sources",
                metavar="TOPIC[,...]",
                type=_topics,
                required=is_new,
                help=f"The topics at the broker{called()}.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def on_failure_option(text: str) -> Callable[[F], F]:
    """Give a command --on-failure, which has another default each way."""
    return click.option("--on-failure", type=OneOf(get_args(OnFailure)), help=text)
