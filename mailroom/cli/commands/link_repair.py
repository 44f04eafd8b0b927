"""`mailroom link`: what an operator does about a link that does not go on by itself."""

import click

from mailroom.cli.acting import acting, answering, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, say, say_whole, working
from mailroom.cli.parameters import LIMIT, NODE, WholeNumber
from mailroom.links.links import Links
from mailroom.links.readers import MAX_ROWS
from mailroom.links.resume import LOST_AT_MOST


@click.command()
@click.argument("reader", metavar="READER", type=NODE)
@acting
@pass_call
def cut(call: Call, reader: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Stamp nothing more for READER, and give up what waits for it; it says how many messages.

    Use it for a reader that is gone and whose messages fill the disk. A cut link cannot go on: to let the reader begin
    again, remove it (mailroom link remove) and allow it again.

    \b
    Examples:
      mailroom link cut lyon --dry-run
      mailroom link cut lyon --why "nobody there for a week"
    """
    with working("cutting the link"), call.connection("link cut") as connection:
        given_up = Links(schema=call.schema).cut(connection, reader, actor=actor, why=why, dry_run=dry_run)
    if call.json:
        document({"reader": reader, "given_up": given_up, "dry_run": dry_run})
    else:
        would_be = "would be" if dry_run else "is"
        say(f"The link to {reader} {would_be} cut; {counted(given_up, 'message')} that waited {would_be} given up.")


@click.command()
@click.argument("source", metavar="[SOURCE]", type=NODE, required=False)
@click.option(
    "--at",
    metavar="ROW",
    type=WholeNumber(0, MAX_ROWS),
    help="Go on after this row of the link, whatever was received. [where it stopped]",
)
@acting
@pass_call
def resume(call: Call, source: str | None, at: int | None, dry_run: bool, actor: str, why: str | None) -> None:
    """Read the stopped SOURCE again (mailroom link status says why it stopped).

    With --at it goes on after a row of the link that you choose, if the nodes do not find one themselves. The command
    says which rows are then never read, and which may come twice.

    If this node itself has lost history, its inboxes of total order stand still until you run this command, with any
    SOURCE or with none. What it lost keeps its old place at other nodes, and what it stamps again gets a later place
    here.

    \b
    Examples:
      mailroom link resume paris
      mailroom link resume paris --at 120400 --dry-run
      mailroom link resume paris --at 120400 --why "restored from the dump of Sunday"
      mailroom link resume
    """
    if source is None:
        _resume_order(call, at, dry_run, actor, why)
        return
    with working("looking for the place to go on"), call.connection("link resume") as connection:
        found = Links(schema=call.schema).resume(connection, source, at=at, actor=actor, why=why, dry_run=dry_run)
    if call.json:
        document(
            {
                "source": source, "was": found.was, "at": found.at, "known": found.known,
                "never_read": _ends(found.skipped), "may_come_twice": _ends(found.unknown), "dry_run": dry_run,
            }
        )  # fmt: skip
        return
    where = "" if found.at is None else f" after row {found.at}"
    say(f"{source} {'would be' if dry_run else 'is'} read again{where}.")
    if found.was is not None:
        say(f"It was stopped: {found.was}")
    if found.known:
        say(f"{counted(found.known, 'message')} that came from later rows: left out if they come again.")
    if ends := _ends(found.skipped):
        say("Rows {:,} to {:,} are never read.".format(*ends))
    if ends := _ends(found.unknown):
        say("Of rows {:,} to {:,} the ids are kept no longer: their messages may come twice.".format(*ends))


def _resume_order(call: Call, at: int | None, dry_run: bool, actor: str, why: str | None) -> None:
    if at is not None or dry_run:
        raise click.UsageError("--at and --dry-run are about a link: say which SOURCE.")
    with call.connection("link resume") as connection:
        resumed = Links(schema=call.schema).resume_order(connection, actor=actor, why=why)
    if call.json:
        document({"resumed": resumed})
        return
    say("The inboxes of total order go on." if resumed else "No inbox of total order stood for lost history.")


def _ends(rows: range) -> tuple[int, int] | None:
    return (rows[0], rows[-1]) if rows else None


@click.command()
@click.argument("source", metavar="SOURCE", type=NODE)
@click.option("--limit", type=LIMIT, default=LOST_AT_MOST, show_default=True, help="How many ids at most.")
@pass_call
def report(call: Call, source: str, limit: int) -> None:
    """List the messages that SOURCE lost when it was put back in time, and its rows that never came.

    The ids are those of messages that came here and that SOURCE has lost. If there are more than --limit, it says how
    many more.

    \b
    Examples:
      mailroom link report paris
      mailroom link report paris --json | jq -r '.lost[]'
    """
    with working("looking for lost messages"), call.looking("link report") as connection:
        found = Links(schema=call.schema).report(connection, source, limit=limit)
    if call.json:
        document(found)
        return
    say(f"{source} is {found.state}{'.' if found.why is None else f': {found.why}'}")
    for first, last in found.skipped:
        say(f"Rows {first:,} to {last:,} never came.")
    if found.earlier:
        say(f"{counted(found.earlier, 'message')} came by an earlier link, and will be left out if they come again.")
    lost = len(found.lost) + found.more_lost
    say(f"{counted(lost, 'message')} that {source} has lost {'are' if lost != 1 else 'is'} here.")
    for each in found.lost:
        say_whole(str(each))
    if found.more_lost:
        say(f"{found.more_lost:,} more {'are' if found.more_lost != 1 else 'is'} not listed: give a larger --limit.")


@click.command()
@click.argument("node", metavar="NODE", type=NODE)
@answering
@pass_call
def moved(call: Call, node: str, actor: str, why: str | None) -> None:
    """Say that NODE, a reader or a source, was moved to another database or server.

    A copy of a database looks the same as one that was moved, so a reader from another place is refused until you say
    that it is the same one. Its new place is recorded at its next hello.

    \b
    Examples:
      mailroom link moved lyon
      mailroom link moved lyon --why "on a new server since Sunday"
    """
    with call.connection("link moved") as connection:
        found = Links(schema=call.schema).moved(connection, node, actor=actor, why=why)
    if call.json:
        document({"name": node, "reader": found.reader, "source": found.source})
    else:
        say(f"Where {node} is now will be noted at its next hello.")
