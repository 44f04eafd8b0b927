"""`mailroom executor`."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict

import click

from dispatcher import daemon
from dispatcher.cli.dispatcher import counted_off, poll_interval
from dispatcher.executor.targets.registration import RegisteredFunction, RegisteredTarget, Registrations
from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.commands.status import tell_leader
from mailroom.cli.group import Group
from mailroom.cli.logs import log_to_stderr
from mailroom.cli.output import document, note, print_listing, say, working
from mailroom.cli.parameters import seconds_above_0
from mailroom.cli.serving import metrics_option, serving
from mailroom.errors import MailroomError
from mailroom.node import status as node_status
from mailroom.session.home import Home


@click.group(cls=Group)
def executor() -> None:
    """Run executables, and register what they may reach.

    \b
    Executables write the node's own store and your registered tables, and call registered functions:
      mailroom executor target add stats public.stats --key name --number hits
      mailroom executor function add reindex public.reindex
    """


@executor.command()
@poll_interval
@metrics_option
@pass_call
def run(call: Call, poll_interval_s: float, address: str | None) -> None:
    """Run the executor alone until SIGTERM or Ctrl-C.

    `mailroom dispatcher run` includes one, so use this for a process, a machine or a role of its own. If several run,
    one leads and the others stand by.

    \b
    Examples:
      mailroom executor run
      mailroom executor run --schema tenant_a --poll-interval-s 5
    """
    dsn = call.dsn()
    log_to_stderr(call.log_format)
    lane = daemon.Executor(dsn, schema=call.schema, poll_interval_s=poll_interval_s)
    with serving(address, [lane], {call.schema: lambda: Home(dsn)}):
        asyncio.run(daemon.run_until_signalled([lane]))


@executor.command()
@pass_call
def execute_all(call: Call) -> None:
    """Execute everything committed so far, then exit. A running executor does no harm.

    \b
    Examples:
      mailroom executor execute-all
      mailroom executor execute-all --json
    """
    if call.log_format == "json":
        log_to_stderr(call.log_format, logging.WARNING)
    with working("counting what waits"), call.connection("executor execute-all", autocommit=True) as connection:
        waiting = node_status.executable_backlog(connection, schema=call.schema)
    with counted_off("executed", waiting) as show:
        totals = daemon.execute_all(call.dsn(), schema=call.schema, progress=show)
    if call.json:
        document(totals)
    else:
        others = {name: count for name, count in asdict(totals).items() if name != "taken" and count}
        say(f"{counted(totals.taken, 'executable')} taken{''.join(f', {n:,} {name}' for name, n in others.items())}.")


@executor.command()
@pass_call
def status(call: Call) -> None:
    """Show which executor leads: host, process, awake or asleep, and its totals.

    Exits with 1 if no process leads.

    \b
    Examples:
      mailroom executor status
      mailroom executor status --json | jq .leads
    """
    with call.looking("executor status") as connection:
        found = node_status.executor_status(connection, schema=call.schema)
    tell_leader(call, found)


# -- Targets ----------------------------------------------------------------------------------------------------------


@executor.group()
def target() -> None:
    """Register the tables that executables may write."""


@target.command("add")
@click.argument("name")
@click.argument("table_name", metavar="SCHEMA.TABLE")
@click.option("--key", metavar="COLUMN", required=True, help="The key: NOT NULL and unique by itself.")
@click.option("--value", metavar="COLUMN", help="What put writes: bytea or text.")
@click.option("--number", metavar="COLUMN", help="What increment changes: an integer of any size.")
@acting
@pass_call
def add_target(
    call: Call, name: str, table_name: str, key: str, value: str | None, number: str | None, dry_run: bool, actor: str,
    why: str | None,
) -> None:  # fmt: skip
    """Let executables write a table, as the target NAME. A registered NAME is changed.

    Names of tables and columns are case-sensitive. The executor's role needs USAGE on the schema, and SELECT, INSERT,
    UPDATE and DELETE on the table.

    \b
    Examples:
      mailroom executor target add stats public.stats --key name --number hits
      mailroom executor target add pages public.pages --key url --value body --why "index"
    """
    with call.connection("executor target add") as connection:
        before = Registrations(schema=call.schema).register_target(
            connection, name, table_name, key=key, value=value, number=number, actor=actor, why=why, dry_run=dry_run
        )
    _tell_added(call, "Target", name, before, dry_run=dry_run)


@target.command("list")
@pass_call
def list_targets(call: Call) -> None:
    """List the tables that executables may write.

    \b
    Examples:
      mailroom executor target list
      mailroom executor target list --json | jq -r '.[].table'
    """
    with call.looking("executor target list") as connection:
        found = Registrations(schema=call.schema).targets(connection)
    print_listing(
        found,
        ("target", "table", "key", "value", "number", "registered"),
        lambda each: (each.name, each.table, each.key, each.value, each.number, each.created_at),
        none="No table is registered: mailroom executor target add NAME SCHEMA.TABLE --key COLUMN --number COLUMN",
        json=call.json,
    )
    _tell_faults(() if call.json else found)


@target.command("remove")
@click.argument("name")
@acting
@pass_call
def remove_target(call: Call, name: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Stop executables from writing the table of a target. The table is not changed.

    Waiting executables for it become dead letters, which can be requeued.

    \b
    Examples:
      mailroom executor target remove stats
      mailroom executor target remove stats --dry-run
    """
    with call.connection("executor target remove") as connection:
        removed = Registrations(schema=call.schema).remove_target(
            connection, name, actor=actor, why=why, dry_run=dry_run
        )
    _tell_removed(call, "target", name, removed, dry_run=dry_run)


# -- Functions --------------------------------------------------------------------------------------------------------


@executor.group()
def function() -> None:
    """Register the functions that executables may call."""


@function.command("add")
@click.argument("name")
@click.argument("function_name", metavar="SCHEMA.FUNCTION")
@click.option("--timeout-s", type=seconds_above_0, default=10.0, show_default=True, help="How long a call may take.")
@acting
@pass_call
def add_function(
    call: Call, name: str, function_name: str, timeout_s: float, dry_run: bool, actor: str, why: str | None
) -> None:
    """Let executables call a function, as NAME. A registered NAME is changed.

    It takes one jsonb and does not return a set. It runs with the rights of the executor's role, which needs EXECUTE on
    it. Other executables wait for it. Names are case-sensitive.

    \b
    Examples:
      mailroom executor function add reindex public.reindex
      mailroom executor function add reindex public.reindex --timeout-s 60 --why "large documents"
    """
    with call.connection("executor function add") as connection:
        before = Registrations(schema=call.schema).register_function(
            connection, name, function_name, timeout_s=timeout_s, actor=actor, why=why, dry_run=dry_run
        )
    _tell_added(call, "Function", name, before, dry_run=dry_run)


@function.command("list")
@pass_call
def list_functions(call: Call) -> None:
    """List the functions that executables may call.

    \b
    Examples:
      mailroom executor function list
      mailroom executor function list --json | jq -r '.[].function'
    """
    with call.looking("executor function list") as connection:
        found = Registrations(schema=call.schema).functions(connection)
    print_listing(
        found,
        ("name", "function", "timeout", "registered"),
        lambda each: (each.name, each.function, f"{each.timeout_s:g} s", each.created_at),
        none="No function is registered: mailroom executor function add NAME SCHEMA.FUNCTION",
        json=call.json,
        numbers=("timeout",),
    )
    _tell_faults(() if call.json else found)


@function.command("remove")
@click.argument("name")
@acting
@pass_call
def remove_function(call: Call, name: str, dry_run: bool, actor: str, why: str | None) -> None:
    """Stop executables from calling a function. The function is not changed.

    Waiting executables for it become dead letters, which can be requeued.

    \b
    Examples:
      mailroom executor function remove reindex
      mailroom executor function remove reindex --dry-run
    """
    with call.connection("executor function remove") as connection:
        removed = Registrations(schema=call.schema).remove_function(
            connection, name, actor=actor, why=why, dry_run=dry_run
        )
    _tell_removed(call, "function", name, removed, dry_run=dry_run)


def _tell_added(
    call: Call, what: str, name: str, before: RegisteredTarget | RegisteredFunction | None, *, dry_run: bool
) -> None:
    if call.json:
        document({"name": name, "before": before, "dry_run": dry_run})
    else:
        instead = "" if before is None else f"; before: {before}"
        say(f"{what} {name} {'would be' if dry_run else 'is'} registered{instead}.")


def _tell_faults(found: Sequence[RegisteredTarget | RegisteredFunction]) -> None:
    for each in found:
        if each.fault is not None:
            note(f"{each.name} could not be registered as it is now. {each.fault}")


def _tell_removed(
    call: Call, what: str, name: str, removed: RegisteredTarget | RegisteredFunction | None, *, dry_run: bool
) -> None:
    if removed is None:
        raise MailroomError(
            f"There is no such {what} {name}. See: mailroom executor {what} list", code="MR-not-registered"
        )
    if call.json:
        document({"name": name, "before": removed, "dry_run": dry_run})
    else:
        say(f"{what.capitalize()} {removed} {'would be' if dry_run else 'is'} removed.")
