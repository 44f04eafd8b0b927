"""`mailroom migrate`."""

from typing import Any

import click

from mailroom import schema as node
from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, say, working
from mailroom.cli.parameters import Number
from mailroom.order.sequences import Numbers
from mailroom.schema.migration import LOCK_TIMEOUT_S, migrating, telling
from mailroom.session import settings
from mailroom.sql.runner import driver_of, run

BOTH_ENDS = ("base", "head")


@click.command()
@click.option("--revision", default="head", metavar="R", help="Migrate to this revision; `base` removes the node.")
@click.option("--discard", is_flag=True, help="In a downgrade, delete the messages that are still there.")
@click.option(
    "--lock-timeout",
    "lock_timeout_s",
    type=Number(min=0),
    default=LOCK_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Give up if tables that change are in use for so long.",
)
@answering
@pass_call
def migrate(call: Call, revision: str, discard: bool, lock_timeout_s: float, actor: str, why: str | None) -> None:
    """Create the schema of a node, or bring it up to date.

    It runs in one transaction and changes nothing if the schema is current. Programs may run meanwhile: it locks the
    tables that change in short tries, between which programs go on, and says who uses them. A database can hold
    several nodes, each in a schema of its own. Sequences that are behind their rows, as after copying only the rows,
    are raised beyond them.

    \b
    Examples:
      mailroom migrate
      mailroom migrate --schema tenant_a
      mailroom migrate --revision base --discard      # removes the node and every message in it
    """
    if revision not in (known := [*BOTH_ENDS, *node.revisions()]):
        raise click.UsageError(f"There is no revision {revision!r}; there are {', '.join(known)}.")
    before, after, raised = migrate_first(call, revision, discard, lock_timeout_s, actor, why)
    if call.json:
        document({"schema": call.schema, "before": before, "after": after, "raised": raised})
    elif before == after:
        say(f"Schema {call.schema} is at revision {after or 'base'}: nothing to do.")


def migrate_first(
    call: Call,
    revision: str = "head",
    discard: bool = False,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    actor: str | None = None,
    why: str | None = None,
) -> tuple[str | None, str | None, list[Numbers]]:
    """Migrate, and tell a person what that changed; also for a command that has it as its first step.

    Returns the revision before and after, and the sequences that were raised.
    """
    with working("migrating"), settings.engine(call.dsn()).begin() as connection:
        driver: Any = driver_of(connection)
        driver.add_notice_handler(telling(note))
        before = node.current_revision(connection, schema=call.schema)
        raised = run(connection, migrating(call.schema, revision, discard, lock_timeout_s, actor, why))
        after = node.current_revision(connection, schema=call.schema)
    if not call.json:
        if before != after:
            say(f"Schema {call.schema} went from revision {before or 'base'} to {after or 'base'}.")
        for each in raised:
            say(f"{each.table}.{each.column} was behind its rows, as after a move, and goes on after {each.value:,}.")
    return before, after, raised
