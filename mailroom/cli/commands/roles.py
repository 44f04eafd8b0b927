"""`mailroom grant` and `mailroom revoke`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mailroom.cli.acting import answering
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, note, say
from mailroom.cli.parameters import INBOX, OneOf
from mailroom.roles.granting import RightsChange
from mailroom.roles.granting import grant as grant_rights
from mailroom.roles.granting import revoke as revoke_rights
from mailroom.roles.matrix import PURPOSES

PURPOSE = OneOf(list(PURPOSES))

F = TypeVar("F", bound=Callable[..., Any])


def about_a_role(command: F) -> F:
    """Add the role, and the options that grant and revoke share."""
    for decorate in (
        answering,
        click.option("--print", "prints", is_flag=True, help="Print the SQL, and run nothing."),
        click.option(
            "--staging-schema",
            metavar="NAME",
            help="Where a spark-writer makes its staging tables. [the node's schema]",
        ),
        click.option("--inbox", "inboxes", metavar="NAME", type=INBOX, multiple=True, help="This inbox; repeatable."),
        click.argument("role"),
    ):
        command = decorate(command)
    return command


@click.command()
@click.argument("purposes", type=PURPOSE, metavar="PURPOSE...", nargs=-1, required=True)
@about_a_role
@pass_call
def grant(
    call: Call, purposes: tuple[str, ...], role: str, inboxes: tuple[str, ...], staging_schema: str | None,
    prints: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Give a database role what it needs for a purpose, or for several, and nothing else.

    Run it as the role that ran `mailroom migrate`, after CREATE ROLE. The PURPOSE is one of these:

    \b
      writer        sends messages and executables
      jdbc-writer   sends through the view outbox_jdbc, and in no other way
      reaper        takes messages out of the inboxes that --inbox names: services, workers
      dispatcher    delivers, executes, reads links and does the housekeeping
      executor      applies executables, and nothing else
      operator      handles parked keys and dead letters; of all inboxes without --inbox
      auditor       reads what tells of messages, and no values of them
      metrics       reads figures only
      link-reader   reads a link of this node, for the dispatcher of another one
      spark-writer  writes with Spark
      spark-reader  streams the inboxes that --inbox names with Spark

    A role may have several purposes: a reaper that sends is a writer too, and a worker with dispatch=True is a
    dispatcher. --inbox counts for those that are of inboxes. A new inbox needs another grant for
    dispatcher and operator: repeating a grant is harmless.

    \b
    Examples:
      mailroom grant writer shop
      mailroom grant writer reaper shop_shipping --inbox shipping --inbox billing
      mailroom grant operator ada --inbox shipping --why "on call"
      mailroom grant dispatcher mailroom_daemon --print          # for the schema's owner
    """
    for purpose, change in _changed(call, grant_rights, purposes, role, inboxes, staging_schema, prints, actor, why):
        article = "an" if purpose[0] in "aeo" else "a"
        say(f"Role {role} has what {article} {_named(purpose, change.inboxes)} needs, in schema {call.schema}.")
        if purpose in ("dispatcher", "executor"):
            note("Tables and functions that executables reach are yours: give the role what they need by GRANT")


@click.command()
@click.argument("purpose", type=PURPOSE, metavar="PURPOSE")
@about_a_role
@pass_call
def revoke(
    call: Call, purpose: str, role: str, inboxes: tuple[str, ...], staging_schema: str | None, prints: bool,
    actor: str, why: str | None,
) -> None:  # fmt: skip
    """Take from a database role what it needs for a purpose.

    What it needs for its other purposes stays: those for which it has all rights. The PURPOSE is one of
    `mailroom grant`. A purpose that is a part of it goes too: a former dispatcher is not an executor.

    \b
    Examples:
      mailroom revoke writer shop
      mailroom revoke reaper shop_shipping --inbox billing --why "moved"
      mailroom revoke operator ada --print
    """
    for _, change in _changed(call, revoke_rights, (purpose,), role, inboxes, staging_schema, prints, actor, why):
        kept = f" It keeps what it needs as {' and '.join(change.kept)}." if change.kept else ""
        say(f"Role {role} is no longer {_named(purpose, change.inboxes)}, in schema {call.schema}.{kept}")


def _changed(
    call: Call, change: Callable[..., RightsChange], purposes: tuple[str, ...], role: str, inboxes: tuple[str, ...],
    staging_schema: str | None, prints: bool, actor: str, why: str | None,
) -> list[tuple[str, RightsChange]]:  # fmt: skip
    """Make the changes, all or none, or print them; return those that are still to be told to a person."""
    for purpose in purposes:
        if PURPOSES[purpose].inboxes == "named" and not inboxes:
            raise click.UsageError(f"Say of which inboxes {role} is a {purpose}: --inbox NAME, repeatable.")
    if inboxes and not any(map(_takes_inboxes, purposes)):
        raise click.UsageError(
            f"--inbox says of which inboxes a reaper, a spark-reader or an operator is, no {' or '.join(purposes)}."
        )
    with call.connection("grant") as connection:
        done = [
            (
                purpose,
                change(
                    connection, purpose, role, inboxes=(inboxes or None) if _takes_inboxes(purpose) else None,
                    staging_schema=None if purpose != "spark-writer" and "spark-writer" in purposes else staging_schema,
                    actor=actor, why=why, dry_run=prints, schema=call.schema,
                ),
            )
            for purpose in dict.fromkeys(purposes)
        ]  # fmt: skip
    for purpose, each in done:
        if call.json:
            document(
                {
                    "purpose": purpose, "role": role, "inboxes": each.inboxes, "kept": each.kept,
                    "statements": each.statements, "dry_run": prints,
                }
            )  # fmt: skip
        elif prints:
            for statement in each.statements:
                click.echo(f"{statement};")
    return [] if call.json or prints else done


def _takes_inboxes(purpose: str) -> bool:
    return PURPOSES[purpose].inboxes in ("named", "named or all")


def _named(purpose: str, inboxes: tuple[str, ...]) -> str:
    if not _takes_inboxes(purpose):
        return purpose
    return f"{purpose} of {', '.join(inboxes) or 'no inbox, since there is none,'}"
