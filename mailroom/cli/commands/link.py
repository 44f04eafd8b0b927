"""`mailroom link`."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from mailroom.cli.acting import acting, answering, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.commands.link_repair import cut, moved, report, resume
from mailroom.cli.group import Group
from mailroom.cli.output import document, duration, facts, note, say, shown, table, working
from mailroom.cli.parameters import NODE, PATTERN, WholeNumber, checked, seconds
from mailroom.links.links import Links, Side
from mailroom.links.readers import MAX_ROWS
from mailroom.links.service import service_name, variable
from mailroom.links.states import LinkStates, ReaderState, SourceState
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

SERVICE, SCHEMA = map(checked, (lambda text: text and service_name(text), schema_name))
F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group)
def link() -> None:
    """Read messages of nodes in other databases, and let those nodes read this one's.

    The reader pulls: its dispatcher connects to the source's database and brings what its inboxes subscribe to. The
    source writes nothing into other databases. Both sides need a command, and the reader a login there, with what
    `mailroom grant link-reader` gives it.

    \b
    On the source:
      mailroom link allow lyon
    On the reader, which is called lyon there:
      mailroom link add paris --service paris --as lyon
      mailroom inbox create invoices --subscribe order.paid --origin paris
    On either:
      mailroom link status
    """


def reader_options(command: F) -> F:
    """Add the options of a link to a reader, each None or empty unless it is given."""
    for option in (
        click.option(
            "--max-rows",
            metavar="N",
            type=WholeNumber(0, MAX_ROWS),
            help="Cut the link once more than N messages wait for the reader, and give them up; 0 for no limit. "
            "[no limit]",
        ),
        click.option(
            "--keep-s",
            metavar="S",
            type=seconds,
            help="How many seconds to keep what the reader has received, in case its database is put back in time. "
            "[172800: two days]",
        ),
        click.option(
            "--topics",
            metavar="PATTERN",
            type=PATTERN,
            multiple=True,
            help="What the reader may ask for; repeatable. It gets commands and replies of a topic only if that is "
            "allowed by its exact name. [#: all messages and events]",
        ),
    ):
        command = option(command)
    return command


def source_options(command: F) -> F:
    """Add the options of a link to a source, each None unless it is given."""
    for option in (
        click.option("--source-schema", metavar="NAME", type=SCHEMA, help=f"The source's schema. [{DEFAULT_SCHEMA}]"),
        click.option(
            "--as", "reader", metavar="READER", type=NODE, help="This node's name at the source. [its own name]"
        ),
        click.option(
            "--service",
            metavar="ENTRY",
            type=SERVICE,
            help="The entry of libpq's service file that leads to the source. [the variable MAILROOM_DSN_<SOURCE>]",
        ),
    ):
        command = option(command)
    return command


@link.command()
@click.argument("reader", metavar="READER", type=NODE)
@reader_options
@answering
@pass_call
def allow(
    call: Call,
    reader: str,
    topics: tuple[str, ...],
    keep_s: float | None,
    max_rows: int | None,
    actor: str,
    why: str | None,
) -> None:
    """Allow the node READER to read messages of this one.

    READER itself says which of the allowed topics it wants; if it asks for others, it is told. Repeating the command is
    harmless. With other settings than the link has it fails, and mailroom link set changes them.

    Commands and replies of a topic leave this node only if no inbox here gets them, and only for a reader that is
    allowed the topic by its exact name. If there are several, the one that was allowed first gets them.

    \b
    Examples:
      mailroom link allow lyon
      mailroom link allow lyon --topics 'order.#' --topics invoice.print
      mailroom link allow lyon --keep-s 604800 --max-rows 10000000
    """
    with call.connection("link allow") as connection:
        links = Links(schema=call.schema)
        is_new = links.allow(
            connection, reader, topics=topics or None, keep_s=keep_s, max_rows=max_rows, actor=actor, why=why
        )
        readers = links.status(connection).readers
    _tell_whose(readers, reader, topics)
    if call.json:
        document({"reader": reader, "is_new": is_new})
    elif is_new:
        say(f"{reader} may read this node. Now on {reader}: mailroom link add NAME --as {reader}")
    else:
        say(f"{reader} could read this node already.")


def _tell_whose(readers: Iterable[ReaderState], reader: str, topics: tuple[str, ...]) -> None:
    for each in readers:
        if each.name != reader and (others := sorted(set(each.commands).intersection(topics))):
            note(f"Commands and replies of {', '.join(others)} go to {each.name}, which was allowed them first.")


@link.command()
@click.argument("source", metavar="SOURCE", type=NODE)
@source_options
@answering
@pass_call
def add(
    call: Call, source: str, service: str | None, reader: str | None, source_schema: str | None, actor: str,
    why: str | None,
) -> None:  # fmt: skip
    """Read messages of the node SOURCE.

    SOURCE is this node's name for it, in `--origin SOURCE` and in the variable MAILROOM_DSN_<SOURCE> (upper case, with
    _ for all but letters and digits). Passwords belong in the service file, in libpq's passfile, or in that variable
    where the dispatcher runs: none is stored here. Repeating the command is harmless. With other settings than the link
    has it fails, and mailroom link set changes them.

    \b
    Examples:
      mailroom link add paris --service paris --as lyon
      MAILROOM_DSN_PARIS=postgresql://reader@paris.example/shop mailroom dispatcher run
    """
    with call.connection("link add") as connection:
        links = Links(schema=call.schema)
        is_new = links.add(
            connection, source, service=service, reader=reader, source_schema=source_schema, actor=actor, why=why
        )
        [service] = [each.service for each in links.status(connection).sources if each.name == source]
    if call.json:
        document({"source": source, "is_new": is_new})
        return
    way = f"the service {service}" if service else variable(source)
    say(f"The dispatcher reads {source} {'now' if is_new else 'already'}, by {way}.")


@link.command("set")
@click.argument("name", metavar="NODE", type=NODE)
@reader_options
@source_options
@answering
@pass_call
def set_(
    call: Call, name: str, topics: tuple[str, ...], keep_s: float | None, max_rows: int | None, service: str | None,
    reader: str | None, source_schema: str | None, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Change settings of the link to NODE, and print what is different now.

    --topics, --keep-s and --max-rows are settings of a node that reads this one; --service, --as and --source-schema of
    one that this node reads. Settings that are not given stay. --as and --source-schema cannot change once the source
    was reached; an empty --service goes back to the variable.

    \b
    Examples:
      mailroom link set lyon --topics 'order.#' --topics invoice.print
      mailroom link set lyon --max-rows 0 --why "the disk is larger now"
      mailroom link set paris --service paris-replica
    """
    of_reader, of_source = (topics or None, keep_s, max_rows), (service, reader, source_schema)
    if (of_reader == (None,) * 3) is (of_source == (None,) * 3):
        raise click.UsageError(
            "Give --topics, --keep-s or --max-rows for a node that reads this one; or --service, --as or "
            "--source-schema for one that this node reads."
        )
    with call.connection("link set") as connection:
        links = Links(schema=call.schema)
        change = links.set(
            connection, name, topics=topics or None, keep_s=keep_s, max_rows=max_rows, service=service, reader=reader,
            source_schema=source_schema, actor=actor, why=why,
        )  # fmt: skip
        readers = links.status(connection).readers
    _tell_whose(readers, name, topics)
    if call.json:
        document({"node": name, "schema": call.schema, "change": change or None})
    else:
        say(f"Link to {name}: {change or 'nothing to change'}.")


@link.command()
@pass_call
def status(call: Call) -> None:
    """Show the links of this node: which nodes read it, and which ones it reads.

    For a reader: how many messages wait for it, since when, and up to which row of its link it has acknowledged them. A
    link is in doubt if this node may have lost something and the reader has not found its place since.

    For a source: the last row of its link that came, the clock up to which everything of it is here, and when that was.
    If it is not read: since when, why, and what to do. It is unreachable or failing (both are tried again and again),
    or stopped until an operator acts. Then the command exits with 1; a source that was excluded by hand does not count.

    \b
    Examples:
      mailroom link status
      mailroom link status --json | jq '.readers[] | {name, backlog, lag_s}'
      mailroom link status --json | jq -r '.sources[] | select(.state != "open") | .name, .since, .why'
    """
    with working("counting what waits for readers"), call.looking("link status") as connection:
        found = Links(schema=call.schema).status(connection)
    if call.json:
        document(found)
    else:
        show(found)
    click.get_current_context().exit(0 if all(each.flows for each in found.sources) else 1)


def show(found: LinkStates) -> None:
    """Print the links of a node."""
    if found.readers:
        by = ("read by", "state", "backlog", "lag", "acknowledged", "topics", "last seen")
        table(by, map(_reader, found.readers), numbers=("backlog", "lag", "acknowledged"))
    else:
        say("No other node may read this one: mailroom link allow READER")
    say("")
    if found.sources:
        columns = ("reads", "state", "row", "clock", "topics", "last received")
        table(columns, map(_source, found.sources), numbers=("row", "clock"))
    else:
        say("This node reads no other one: mailroom link add SOURCE")
    limits = [(each.name, _limits(each)) for each in found.readers if each.allowed]
    if reasons := limits + [(each.name, why) for each in found.sources for why in _troubles(each)]:
        say("")
        facts(reasons)


def _reader(each: ReaderState) -> tuple[object, ...]:
    state = f"{each.state}, in doubt" if each.in_doubt and each.seen_at is not None else each.state
    return (
        each.name, state, each.backlog, duration(each.lag_s), str(each.acked), "\n".join(each.topics) or "none",
        _ago(each.seen_at),
    )  # fmt: skip


def _limits(each: ReaderState) -> str:
    commands = f"; commands and replies of {', '.join(each.commands)}" if each.commands else ""
    return f"may ask for {', '.join(each.allowed)}{commands}"


def _source(each: SourceState) -> tuple[object, ...]:
    marked = {topic: f"{topic} (not told yet)" for topic in each.pending}
    marked |= {topic: f"{topic} (refused)" for topic in each.refused}
    topics = "\n".join(marked.get(topic, topic) for topic in each.topics) or "none"
    return each.name, each.state, str(each.position), str(each.shown), topics, _ago(each.received_at)


def _troubles(each: SourceState) -> Iterator[str]:
    if each.why is not None:
        since = "" if each.since is None else f" since {_ago(each.since)}"
        yield f"{each.state}{since}: {each.why}"
    if each.refused:
        yield f"does not allow {', '.join(each.refused)}; there: mailroom link set {each.reader} --topics ..."


def _ago(at: datetime | None) -> str:
    if at is None:
        return "never"
    return f"{shown(at)}, {duration(max(0.0, (datetime.now(UTC) - at).total_seconds()))} ago"


@link.command()
@click.argument("node", metavar="NODE", type=NODE)
@click.option("--reader", "side", flag_value="reader", help="NODE as a reader of this node.")
@click.option("--source", "side", flag_value="source", help="NODE as a source of this node.")
@acting
@pass_call
def remove(call: Call, node: str, side: Side | None, dry_run: bool, actor: str, why: str | None) -> None:
    """Remove the link to NODE, on this side; it says how many messages are given up.

    If NODE reads this node and is read by it, --reader or --source says which link is meant. A reader that is allowed
    again begins with what is sent then. A source that is added again needs a new link there, too.

    \b
    Examples:
      mailroom link remove lyon --dry-run
      mailroom link remove lyon --reader --why "the shop in Lyon has closed"
    """
    with working("removing the link"), call.connection("link remove") as connection:
        removed = Links(schema=call.schema).remove(connection, node, side=side, actor=actor, why=why, dry_run=dry_run)
    if call.json:
        document({"name": node, "side": removed.side, "given_up": removed.given_up, "dry_run": dry_run})
        return
    would_be = "would be" if dry_run else "is"
    if removed.side == "reader":
        messages = counted(removed.given_up, "message")
        say(f"The link to {node} {would_be} removed; {messages} that waited for it {would_be} given up.")
    else:
        say(f"{node} {would_be} read no longer. It still stamps for this node: there, mailroom link remove READER")


@link.command()
@click.argument("source", metavar="SOURCE", type=NODE)
@acting
@pass_call
def exclude(call: Call, source: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Read SOURCE no longer, until it is included again.

    Inboxes in total order wait for every source they subscribe to, except excluded ones. Exclude it on every node that
    reads it. These nodes may have received different numbers of its last messages.

    \b
    Examples:
      mailroom link exclude paris --dry-run
      mailroom link exclude paris --why "their power is out until Monday"
    """
    with call.connection("link exclude") as connection:
        changed = Links(schema=call.schema).exclude(connection, source, actor=actor, why=why, dry_run=dry_run)
    if call.json:
        document({"source": source, "excluded": changed, "dry_run": dry_run})
    elif changed:
        say(f"{source} {'would be' if dry_run else 'is'} excluded. To read it again: mailroom link include {source}")
    else:
        say(f"{source} is excluded already.")


@link.command()
@click.argument("source", metavar="SOURCE", type=NODE)
@answering
@pass_call
def include(call: Call, source: str, actor: str, why: str | None) -> None:
    """Read the excluded SOURCE again. It goes on where it was.

    \b
    Example:
      mailroom link include paris
    """
    with call.connection("link include") as connection:
        changed = Links(schema=call.schema).include(connection, source, actor=actor, why=why)
    if call.json:
        document({"source": source, "included": changed})
    else:
        say(f"{source} is read again." if changed else f"{source} was not excluded.")


for command in (cut, resume, report, moved):
    link.add_command(command)
