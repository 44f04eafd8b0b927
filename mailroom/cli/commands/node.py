"""`mailroom node`."""

import click

from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, say, working
from mailroom.cli.parameters import NODE, WholeNumber
from mailroom.node.identity import advance_clock, new_node_id, node_moved, node_restored, rename_node
from mailroom.order.clock import MAX_ADVANCED


@click.group(cls=Group)
def node() -> None:
    """Say who this node is to the others."""


@node.command()
@click.argument("name", type=NODE)
@acting
@pass_call
def rename(call: Call, name: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Give this node another name.

    At first it has the name of its database. It reads other nodes under its name; existing links keep the old one.
    Repeating the command is harmless.

    \b
    Examples:
      mailroom node rename lyon
      mailroom node rename lyon --why 'named as its site' --dry-run
    """
    with call.connection("node rename") as connection:
        before = rename_node(connection, name, actor=actor, why=why, schema=call.schema)
        if dry_run:
            connection.rollback()
    if call.json:
        document({"schema": call.schema, "before": before, "name": name, "dry_run": dry_run})
    elif before == name:
        say(f"The node is called {name} already.")
    else:
        say(f"The node {'would be' if dry_run else 'is'} called {name}; it was called {before}.")


@node.command("new-id")
@acting
@pass_call
def new_id(call: Call, dry_run: bool, actor: str, why: str | None) -> None:
    """Turn this node, a copy of one that lives on, into another node.

    It gets an id of its own. It reads no other node, and no other node reads it: the links belong to the node that it
    was copied from. Everything else stays, including what waits in inboxes and the outbox.

    \b
    Examples:
      mailroom node new-id --dry-run
      mailroom node new-id --why 'copy for tests'
    """
    with working("giving up links"), call.connection("node new-id") as connection:
        done = new_node_id(connection, actor=actor, why=why, dry_run=dry_run, schema=call.schema)
    if call.json:
        document(
            {
                "schema": call.schema, "before": str(done.before), "id": None if dry_run else str(done.id),
                "links": done.links, "rows": done.rows, "sources": done.origins, "dry_run": dry_run,
            }
        )  # fmt: skip
        return
    given_up = (
        f"{counted(done.links, 'link')} of readers with {counted(done.rows, 'message')} for them, and "
        f"{counted(done.origins, 'source')}"
    )
    if dry_run:
        say(f"The node would get another id than {done.before}, and lose {given_up}.")
    else:
        say(f"The node has the id {done.id} now; it was {done.before}. It lost {given_up}.")


@node.command()
@acting
@pass_call
def moved(call: Call, dry_run: bool, actor: str, why: str | None) -> None:
    """Let readers in again after this node was moved to another database or server.

    Use it only if the node lives nowhere else. A copy of a node that lives on needs an id of its own: mailroom node
    new-id.

    \b
    Examples:
      mailroom node moved
      mailroom node moved --why 'new server'
    """
    with call.connection("node moved") as connection:
        done = node_moved(connection, actor=actor, why=why, dry_run=dry_run, schema=call.schema)
    if call.json:
        document({"schema": call.schema, "moved": done, "dry_run": dry_run})
    elif done:
        say(f"Readers {'would be' if dry_run else 'are'} let in here. Each compares what it has with this node.")
    else:
        say("The node is where it was, or has no links.")


@node.command()
@click.option(
    "--above",
    metavar="INCARNATION",
    type=WholeNumber(min=0),
    default=0,
    help="Take an incarnation beyond this one, which a reader has seen.",
)
@acting
@pass_call
def restored(call: Call, above: int, dry_run: bool, actor: str, why: str | None) -> None:
    """Say that this node was put back to an earlier time, if it cannot know that by itself.

    That is so after a snapshot of a running machine, a dump that was restored into the same database, or changes by
    hand. The node takes a new incarnation; its readers find out which messages only they have, and go on.

    \b
    Examples:
      mailroom node restored --why 'snapshot of last night'
      mailroom node restored --above 3
    """
    with call.connection("node restored") as connection:
        incarnation = node_restored(connection, above=above, actor=actor, why=why, dry_run=dry_run, schema=call.schema)
    if call.json:
        document({"schema": call.schema, "incarnation": incarnation, "dry_run": dry_run})
    else:
        say(f"The node {'would go' if dry_run else 'goes'} on as incarnation {incarnation}.")


@node.command()
@click.argument("clock", type=WholeNumber(min=0, max=MAX_ADVANCED))
@acting
@pass_call
def advance(call: Call, clock: int, dry_run: bool, actor: str, why: str | None) -> None:
    """Raise the clock of this node beyond CLOCK, so that it can follow a node whose clock is there.

    A send, or a reader, may raise the clock of a node by 2^32 at once, and a message of another node up to 2^61 and
    some more. A higher clock is refused until an operator says that it is right. No clock ever goes back: one that is
    beyond CLOCK stays.

    \b
    Examples:
      mailroom node advance 1125899906842624 --dry-run
      mailroom node advance 1125899906842624 --why 'follows lyon'
    """
    with call.connection("node advance") as connection:
        before = advance_clock(connection, clock, actor=actor, why=why, dry_run=dry_run, schema=call.schema)
    if call.json:
        document({"schema": call.schema, "before": before, "clock": max(before, clock), "dry_run": dry_run})
    elif before >= clock:
        say(f"The clock is at {before} already.")
    else:
        say(f"The clock {'would go' if dry_run else 'goes'} on after {clock}; it was at {before}.")
