"""`mailroom archive`."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import click

from inbox.archive import Archive, Reaped
from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.messages import message_json
from mailroom.cli.output import as_json, document, note, print_listing, say, working
from mailroom.cli.parameters import INBOX, KEY, LIMIT, TOPIC
from mailroom.errors import MailroomError

F = TypeVar("F", bound=Callable[..., Any])


def moment(text: str) -> datetime:
    """Parse a time: ISO 8601 with a zone."""
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        given = None
    if given is None or given.tzinfo is None:
        raise click.BadParameter(f"{text!r} is not a time: give one with its zone, such as 2030-01-31T09:00:00+01:00.")
    return given


def choosing(command: F) -> F:
    """Add the options that choose reaped messages."""
    for option in (
        click.option("--until", metavar="TIME", type=moment, help="Only what was reaped before this time."),
        click.option("--since", metavar="TIME", type=moment, help="Only what was reaped at this time or later."),
        click.option("--topic", type=TOPIC, help="Only messages of this topic."),
        click.option("--key", metavar="K", type=KEY, help="Only messages of this key."),
        click.option("--id", "ids", metavar="ID", type=click.UUID, multiple=True, help="This message; repeatable."),
    ):
        command = option(command)
    return command


@click.group(cls=Group)
def archive() -> None:
    """Find what was reaped from an inbox that keeps it, and replay it.

    An inbox keeps what is reaped if it is told to: then each message that a transaction reaps is written into the
    archive by that transaction, and dropped after that many days. So is what is discarded from a parked key.

    \b
    What to do:
      mailroom inbox set shipping --keep-reaped-days 30
      mailroom archive list shipping --key order-42
      mailroom archive replay shipping --key order-42 --dry-run
    """


@archive.command("list")
@click.argument("inbox", type=INBOX)
@choosing
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many at most, reaped first.")
@pass_call
def list_(
    call: Call, inbox: str, ids: tuple[UUID, ...], key: str | None, topic: str | None, since: datetime | None,
    until: datetime | None, limit: int,
) -> None:  # fmt: skip
    """List what was reaped from an inbox and is kept, in the order of reaping. With --json it has headers and values.

    Values are left out for a role that may not read them, such as an auditor's; then one line on stderr says so.

    \b
    Examples:
      mailroom archive list shipping --key order-42
      mailroom archive list shipping --since 2030-01-31T09:00:00+01:00 --limit 1000 --json | jq -r '.[].id'
    """
    with working("reading the archive"), call.looking("archive list") as connection:
        of = Archive(inbox, schema=call.schema)
        values = call.json and of.may_see_values(connection)
        found = of.find(
            connection, ids or None, key=key, topic=topic, since=since, until=until, limit=limit, values=values
        )
    if call.json and not values:
        note("Values are left out: this role may not read them. An operator may: mailroom grant operator ROLE")
    print_listing(
        found,
        ("reaped", "clock", "topic", "key", "sent", "id", "discarded"),
        _cells,
        none=f"Nothing that was reaped from inbox {inbox} and is kept{_such(ids, key, topic, since, until)}.",
        json=call.json,
        entry=lambda each: (
            message_json(each.message, value=values)
            | {"reaped_at": as_json(each.reaped_at), "discarded": each.discarded}
        ),
        numbers=("clock",),
    )


def _cells(each: Reaped) -> tuple[object, ...]:
    message = each.message
    return each.reaped_at, str(message.clock), message.topic, message.key, message.sent_at, message.id, each.discarded


@archive.command()
@click.argument("inbox", type=INBOX)
@choosing
@click.option("--all", "every", is_flag=True, help="All that the inbox keeps.")
@click.option("--limit", type=LIMIT, help="How many at most, those that were reaped first. [all of them]")
@acting
@pass_call
def replay(
    call: Call, inbox: str, ids: tuple[UUID, ...], key: str | None, topic: str | None, since: datetime | None,
    until: datetime | None, every: bool, limit: int | None, dry_run: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Put what was reaped into the inbox again, as new messages: with ids of their own, and caused by the old ones.

    Only this inbox gets them, after the other messages of their keys, in the order that they had. Commands among them
    are not answered again. Repeating the command replays once more, so try it with --dry-run.

    \b
    Examples:
      mailroom archive replay shipping --id 3f0e8c1c-6d0e-4a7a-9a52-0c8a3c1f7a11
      mailroom archive replay shipping --key order-42 --since 2030-01-31T09:00:00+01:00 --dry-run
      mailroom archive replay shipping --topic order.paid --limit 10 --why "the labels were wrong"
    """
    narrowed = bool(ids or key is not None or topic is not None or since is not None or until is not None)
    if every == narrowed:
        raise click.UsageError("Say which messages: --id, --key, --topic, --since, --until, or --all.")
    with working("replaying what was reaped"), call.connection("archive replay") as connection:
        number = Archive(inbox, schema=call.schema).replay(
            connection, ids or None, key=key, topic=topic, since=since, until=until, limit=limit, actor=actor, why=why,
            dry_run=dry_run,
        )  # fmt: skip
    if not number and narrowed:
        raise MailroomError(
            f"Inbox {inbox} keeps no reaped message{_such(ids, key, topic, since, until)}. "
            f"See: mailroom archive list {inbox}",
            code="MR-not-reaped",
        )
    if call.json:
        document({"inbox": inbox, "messages": number, "dry_run": dry_run})
    else:
        say(f"{counted(number, 'message')} {'would be ' if dry_run else ''}replayed into inbox {inbox}.")


def _such(
    ids: tuple[UUID, ...], key: str | None, topic: str | None, since: datetime | None, until: datetime | None
) -> str:
    parts = [
        f" with id {', '.join(map(str, ids))}" if ids else "",
        "" if key is None else f" with key {key!r}",
        "" if topic is None else f" with topic {topic}",
        "" if since is None else f" since {since.isoformat()}",
        "" if until is None else f" before {until.isoformat()}",
    ]
    return "".join(parts)
