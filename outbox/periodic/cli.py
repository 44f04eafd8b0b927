"""`mailroom periodic`."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar, get_args

import click

from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, note, print_listing, say
from mailroom.cli.parameters import KEY, LIMIT, TOPIC, OneOf, checked, seconds
from mailroom.message.periodic import Missed, PeriodicMessage
from mailroom.values.names import periodic_name
from outbox.cli import KINDS, header, parsed, wrong_usage
from outbox.periodic.periodic import Periodic, PeriodicState

NAME = checked(periodic_name)
F = TypeVar("F", bound=Callable[..., Any])
WORDS = {code: word for word, code in KINDS.items()}


@click.group(cls=Group)
def periodic() -> None:
    """Send messages at the times of a cron expression.

    The dispatcher sends them: exactly one message for each time, however many dispatchers run. Times are those of a
    time zone, with its summer time.

    \b
    What to do:
      mailroom periodic add nightly-report "30 2 * * *" report.due --time-zone Europe/Paris
      mailroom periodic next nightly-report
      mailroom periodic list
    """


DEFINITION = (
    click.argument("name", type=NAME),
    click.argument("cron"),
    click.argument("topic", type=TOPIC),
    click.option("--value", metavar="JSON", default="null", show_default=True, help="The value of each message."),
    click.option("--key", metavar="K", type=KEY, help="Their key. [each has one of its own]"),
    click.option("--header", "headers", metavar="NAME=VALUE", type=header, multiple=True, help="A header; repeatable."),
    click.option("--kind", type=OneOf(list(KINDS)), default="message", show_default=True, help="Who must get them."),
    click.option("--time-zone", metavar="ZONE", default="UTC", show_default=True, help="The time zone of the times."),
    click.option(
        "--missed",
        type=OneOf(get_args(Missed)),
        default="once",
        show_default=True,
        help="What is sent for times that passed while no dispatcher ran: nothing, one message for the last of them, "
        "or each.",
    ),
    click.option(
        "--jitter-s",
        metavar="S",
        type=seconds,
        default=0,
        show_default=True,
        help="Delay each send by up to S seconds.",
    ),
)


def defining(command: F) -> F:
    """Add the arguments and options that define a periodic message."""
    for option in reversed(DEFINITION):
        command = option(command)
    return command


@periodic.command()
@defining
@answering
@pass_call
def add(call: Call, /, actor: str, why: str | None, **fields: Any) -> None:
    """Send a message to TOPIC at the times of CRON, under a NAME.

    CRON has five fields: minute, hour, day of the month, month, day of the week. Or it is @hourly, @daily, @weekly,
    @monthly or @yearly. Repeating the command is harmless. If there is one of that name with another definition, the
    command fails: mailroom periodic set changes it.

    Each message has the headers `periodic`, which is NAME, and `due`, its time in UTC.

    \b
    Examples:
      mailroom periodic add nightly-report "30 2 * * *" report.due --time-zone Europe/Paris
      mailroom periodic add sweep "*/5 * * * *" cache.sweep --missed skip --key sweep
      mailroom periodic add invoices @monthly invoices.make --kind command --value '{"all": true}' --jitter-s 600
    """
    message = _defined(**fields)
    with call.connection("periodic add") as connection:
        of = Periodic(schema=call.schema)
        done = of.add(connection, message, actor=actor, why=why)
        [due] = of.next_times(connection, message.name, 1)
    if call.json:
        document({"name": message.name, "done": done, "next": due})
    else:
        say(f"{message.name} is {done}. {_next(message, due)}.")


@periodic.command("set")
@defining
@answering
@pass_call
def set_(call: Call, /, actor: str, why: str | None, **fields: Any) -> None:
    """Give the periodic message NAME this definition, in place of the one that it has.

    If cron and time zone stay, so does its next time. A paused one stays paused.

    \b
    Examples:
      mailroom periodic set nightly-report "30 3 * * *" report.due --time-zone Europe/Paris
    """
    message = _defined(**fields)
    with call.connection("periodic set") as connection:
        of = Periodic(schema=call.schema)
        change = of.set(connection, message, actor=actor, why=why)
        [due] = of.next_times(connection, message.name, 1)
    if call.json:
        document({"name": message.name, "change": change or None, "next": due})
    else:
        say(f"{message.name}: {change or 'nothing to change'}. {_next(message, due)}.")


def _next(message: PeriodicMessage, due: datetime) -> str:
    return f"Its next time is {due.isoformat(' ', 'minutes')} {message.time_zone}"


def _defined(
    name: str, cron: str, topic: str, value: str, headers: tuple[tuple[str, str], ...], kind: str, **fields: Any
) -> PeriodicMessage:
    if len(dict(headers)) < len(headers):
        raise click.UsageError("A header is given twice; a message has at most one of each name.")
    with wrong_usage():
        return PeriodicMessage(
            name, cron, topic, parsed(value), headers=dict(headers), kind=KINDS[kind], **fields  # type: ignore[arg-type]
        )  # fmt: skip


@periodic.command("list")
@pass_call
def list_(call: Call) -> None:
    """List periodic messages, when the next message of each is sent, and why the last try failed, if it did.

    \b
    Examples:
      mailroom periodic list
      mailroom periodic list --json | jq -r '.[] | select(.last_error) | .name'
    """
    with call.looking("periodic list") as connection:
        found = Periodic(schema=call.schema).list(connection)
    print_listing(
        found,
        ("name", "cron", "time zone", "topic", "kind", "missed", "next", "last", "state"),
        _row,
        none="There are no periodic messages. Add one: mailroom periodic add NAME CRON TOPIC",
        json=call.json,
    )


def _row(each: PeriodicState) -> tuple[object, ...]:
    state = "paused" if each.paused else "failing: " + each.last_error if each.last_error else "on"
    next_at = None if each.paused else each.next_at
    return (
        each.name, each.cron, each.time_zone, each.topic, WORDS[each.kind], each.missed, next_at, each.last_at, state
    )  # fmt: skip


@periodic.command("next")
@click.argument("name", type=NAME)
@click.option("--limit", type=LIMIT, default=10, show_default=True, help="How many times.")
@pass_call
def next_(call: Call, name: str, limit: int) -> None:
    """Show the next times of a periodic message, in its time zone; nothing is sent.

    Its jitter delays a message further. A paused one is shown as if it were not.

    \b
    Examples:
      mailroom periodic next nightly-report
      mailroom periodic next nightly-report --limit 365 --json
    """
    with call.looking("periodic next") as connection:
        times = Periodic(schema=call.schema).next_times(connection, name, limit)
    if call.json:
        document(times)
    else:
        for each in times:
            say(f"{each.isoformat(' ', 'minutes')}  {each.tzinfo}")


@periodic.command()
@click.argument("name", type=NAME)
@answering
@pass_call
def pause(call: Call, name: str, actor: str, why: str | None) -> None:
    """Send no more messages of NAME until it is resumed.

    \b
    Examples:
      mailroom periodic pause nightly-report --why "the report is being rebuilt"
    """
    with call.connection("periodic pause") as connection:
        changed = Periodic(schema=call.schema).pause(connection, name, actor=actor, why=why)
    _tell(call, name, changed, "paused", f"To go on: mailroom periodic resume {name}")


@periodic.command()
@click.argument("name", type=NAME)
@answering
@pass_call
def resume(call: Call, name: str, actor: str, why: str | None) -> None:
    """Send messages of NAME again, from its next time on.

    Nothing is sent for times that passed while it was paused.

    \b
    Examples:
      mailroom periodic resume nightly-report
    """
    with call.connection("periodic resume") as connection:
        changed = Periodic(schema=call.schema).resume(connection, name, actor=actor, why=why)
    _tell(call, name, changed, "on", f"Its next times: mailroom periodic next {name}")


@periodic.command()
@click.argument("name", type=NAME)
@answering
@pass_call
def remove(call: Call, name: str, actor: str, why: str | None) -> None:
    """End NAME. What was sent stays sent.

    A program that declares it adds it again at its next start.

    \b
    Examples:
      mailroom periodic remove nightly-report --why "nobody reads it"
    """
    with call.connection("periodic remove") as connection:
        Periodic(schema=call.schema).remove(connection, name, actor=actor, why=why)
    _tell(call, name, True, "removed", "")


def _tell(call: Call, name: str, changed: bool, done: str, then: str) -> None:
    if call.json:
        document({"name": name, "changed": changed})
        return
    say(f"{name} is {done}." if changed else f"{name} was {done} before; nothing is changed.")
    if changed and then:
        note(then)
