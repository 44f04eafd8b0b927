"""`mailroom log`: what is written once and read by many inboxes."""

import click

from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, duration, print_listing, say, size, table
from mailroom.cli.parameters import INBOX, ORIGIN, PATTERN, WholeNumber
from mailroom.figures.logs import LogReading, LogState, reading_logs, reading_readers
from mailroom.registry.logs import (
    KEEP_DAYS,
    LANES,
    MOST_DAYS,
    MOST_LANES,
    Log,
    create_log,
    drop_log,
    finding_log,
    listing_logs,
    set_log,
)
from mailroom.registry.subscriptions import subscriptions_text
from mailroom.schema import checking
from mailroom.sql.locked import reading_locked
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from mailroom.values.names import OWN


@click.group(cls=Group)
def log() -> None:
    """Create logs, whose messages are written once and read by many inboxes."""


subscribe_option = click.option(
    "--subscribe", metavar="TOPIC", type=PATTERN, multiple=True, help="Subscribe to this topic or pattern; repeatable."
)
keep_option = click.option(
    "--keep-days", metavar="DAYS", type=WholeNumber(1, MOST_DAYS), help=f"Keep messages for so many days. [{KEEP_DAYS}]"
)
drop_option = click.option(
    "--drop-unread/--keep-unread",
    default=None,
    help="Whether what is older goes though an inbox has not read it. [--keep-unread]",
)
origin_option = click.option(
    "--origin",
    metavar="NAME",
    type=ORIGIN,
    default=OWN,
    help="Whose messages the topics are of: those of the node of this name, which this one reads over a link or a "
    "bridge, or * for this node and all that it reads. [this node]",
)


@log.command()
@click.argument("name", type=INBOX)
@subscribe_option
@origin_option
@keep_option
@click.option(
    "--lanes", metavar="N", type=WholeNumber(1, MOST_LANES), help=f"Into how many lanes keys are divided. [{LANES}]"
)
@drop_option
@answering
@pass_call
def create(
    call: Call, name: str, subscribe: tuple[str, ...], origin: str, keep_days: int | None, lanes: int | None,
    drop_unread: bool | None, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Create a log, which keeps the messages and events of its topics for some days.

    Inboxes read it: mailroom inbox create NAME --log LOG. However many do, a message is written once, and reading
    deletes nothing. Commands and replies never enter a log. A message is kept until its days are over and every inbox
    of the log has passed it, unless the log is told to --drop-unread.

    One worker at a time reads a lane, and a key is always in the same one. So --lanes is how many batches an inbox of
    the log may have in hand, and never changes. Repeating the command is harmless. With other settings than the log has
    it fails, and mailroom log set changes them.

    \b
    Examples:
      mailroom log create orders --subscribe 'order.#'
      mailroom log create orders --subscribe 'order.#' --keep-days 30 --lanes 16
      mailroom log create clicks --subscribe click --keep-days 2 --drop-unread
      mailroom log create orders --subscribe 'order.#' --origin lyon
    """
    with call.connection("log create") as connection:
        create_log(
            connection, name, subscribe, origin=origin, keep_days=keep_days, lanes=lanes, drop_unread=drop_unread,
            schema=call.schema, actor=actor, why=why,
        )  # fmt: skip
    if call.json:
        document({"log": name, "schema": call.schema, "subscribed": subscribe, "origin": origin})
    else:
        say(f"Log {name} exists" + (f", subscribed to {subscriptions_text(subscribe, origin)}." if subscribe else "."))


@log.command("list")
@pass_call
def list_(call: Call) -> None:
    """List the logs, with their subscriptions and the inboxes that read them.

    \b
    Examples:
      mailroom log list
      mailroom log list --json | jq -r '.[].name'
    """
    with call.looking("log list") as connection:
        found = run(connection, listing_logs(call.schema))
    print_listing(
        found,
        ("log", "subscribed to", "read by", "lanes", "keeps", "unread", "segments", "created"),
        _row,
        none="There is no log yet: mailroom log create NAME --subscribe TOPIC",
        json=call.json,
    )


def _row(log: Log) -> tuple[object, ...]:
    readers = [f"{each} ({', '.join(log.wanted[each])})" if each in log.wanted else each for each in log.readers]
    topics = [*log.topics, *(subscriptions_text([each], of) for of, given in log.topics_of.items() for each in given)]
    return (
        log.name, "\n".join(topics) or None, "\n".join(readers) or None, log.lanes, f"{log.keep_days} days",
        "dropped" if log.drop_unread else "kept", log.segments, log.created_at,
    )  # fmt: skip


@log.command()
@click.argument("name", type=INBOX, required=False)
@pass_call
def status(call: Call, name: str | None) -> None:
    """Show the size of logs, and how far each inbox has read: of one log, or of all.

    Unread counts what an inbox has yet to read, of the topics that it wants; where more than 1,000 messages are ahead
    of it, it is an estimate. Oldest is for how long the first message ahead of it has been there. A lane is behind if
    other lanes of the inbox were read so much further; a worker that has much to catch up with reads lane by lane, so
    look again before you search for a cause.

    An inbox holds disk if it has not read what is older than its log keeps: so much, since then. To let it go start a
    worker, drop the inbox, or tell the log to --drop-unread. A log that cannot be read now is left out.

    \b
    Examples:
      mailroom log status
      mailroom log status orders
      mailroom log status --json | jq '.[].readers[] | {inbox, unread, held_bytes}'
    """
    with call.looking("log status", autocommit=True) as connection:
        logs, readers = run(connection, _standing(call.schema, name))
    if call.json:
        document(
            [
                each._asdict() | {"readers": [of._asdict() for of in readers if of.log == each.log]}
                for each in logs
            ]
        )  # fmt: skip
    elif not logs:
        say("There is no log yet: mailroom log create NAME --subscribe TOPIC")
    else:
        heading = ("log", "keeps", "unread", "segments", "since", "messages", "size")
        table(heading, map(_state, logs), numbers=heading[-2:])
        if readers:
            say("")
            heading = ("inbox", "log", "unread", "oldest", "lane behind", "holds", "since")
            table(heading, map(_reader, readers), numbers=("unread",))


def _standing(schema: str, name: str | None) -> Operation[tuple[list[LogState], list[LogReading]]]:
    yield from checking(schema)
    of = None if name is None else (yield from finding_log(schema, name))
    locked = yield from reading_locked(schema)
    logs = [each for each in (yield from reading_logs(schema, locked)) if of is None or each.log == of.name]
    return logs, (yield from reading_readers(schema, locked, only=of.readers if of else None))


def _state(each: LogState) -> tuple[object, ...]:
    kept = "dropped" if each.drop_unread else "kept"
    return each.log, f"{each.keep_days} days", kept, each.segments, each.since, each.messages, size(each.bytes)


def _reader(each: LogReading) -> tuple[object, ...]:
    behind = f"{each.lane}: {duration(each.behind_s)}" if each.behind_s else None
    held = size(each.held_bytes) if each.held_segments else None
    oldest = duration(each.oldest_s) if each.unread else None
    return each.inbox, each.log, each.unread, oldest, behind, held, each.held_since


@log.command("set")
@click.argument("name", type=INBOX)
@keep_option
@drop_option
@subscribe_option
@click.option("--unsubscribe", metavar="TOPIC", type=PATTERN, multiple=True, help="End this subscription; repeatable.")
@origin_option
@answering
@pass_call
def set_(
    call: Call, name: str, keep_days: int | None, drop_unread: bool | None, subscribe: tuple[str, ...],
    unsubscribe: tuple[str, ...], origin: str, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Change settings and subscriptions of a log, and print what is different now.

    Settings that are not given stay. With fewer days the dispatcher drops what is older within minutes. Subscriptions
    count for what is delivered from then on.

    \b
    Examples:
      mailroom log set orders --keep-days 14
      mailroom log set orders --subscribe 'refund.#' --why "the ledger needs them"
      mailroom log set clicks --drop-unread
    """
    if keep_days is None and drop_unread is None and not subscribe and not unsubscribe:
        raise click.UsageError("Give a setting to change. See: mailroom log list")
    with call.connection("log set") as connection:
        change = set_log(
            connection, name, keep_days=keep_days, drop_unread=drop_unread, subscribe=subscribe,
            unsubscribe=unsubscribe, origin=origin, schema=call.schema, actor=actor, why=why,
        )  # fmt: skip
    if call.json:
        document({"log": name, "schema": call.schema, "change": change or None})
    else:
        say(f"Log {name}: {change or 'nothing to change'}.")


@log.command()
@click.argument("name", type=INBOX)
@answering
@pass_call
def drop(call: Call, name: str, actor: str, why: str | None) -> None:
    """Drop a log with all that it holds, for good. It is refused while an inbox reads it.

    \b
    Examples:
      mailroom log drop clicks --why "nobody reads it"
    """
    with call.connection("log drop") as connection:
        drop_log(connection, name, schema=call.schema, actor=actor, why=why)
    if call.json:
        document({"log": name, "schema": call.schema})
    else:
        say(f"Log {name} is dropped.")
