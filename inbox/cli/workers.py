"""`mailroom worker list`."""

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, say, table
from mailroom.node.workers import WorkerSeen, at_work


@click.command("list")
@pass_call
def list_(call: Call) -> None:
    """List who works at a node: workers, also idle ones, and the processes that lead its lanes or stand by.

    Two workers of one process are two lines. A worker is busy with a batch, idle, dead (its last batch is not accounted
    for yet), or unknown, as behind a pooler. Since when it is there, and from which address, is shown to roles that may
    see other sessions (pg_read_all_stats).

    \b
    Examples:
      mailroom worker list
      mailroom worker list --json | jq '.workers[] | select(.state == "idle")'
    """
    with call.looking("worker list") as connection:
        found = at_work(connection, schema=call.schema)
    if call.json:
        document(found)
        return
    if found.workers:
        columns = ("inbox", "state", "host", "pid", "in hand", "last batch", "since", "release", "address", "backend")
        table(columns, map(_cells, found.workers), numbers=("in hand",))
    else:
        say("No worker is there: mailroom worker run MODULE:WORKER")
    say("")
    if found.lanes:
        rows = ((each.role, each.state, each.process, each.since, each.release) for each in found.lanes)
        table(("lane", "state", "process", "since", "release"), rows)
    else:
        say("No dispatcher is there: mailroom dispatcher run")


def _cells(each: WorkerSeen) -> tuple[object, ...]:
    return (
        each.inbox, each.state, each.host, None if each.pid is None else str(each.pid), each.messages,
        each.last_batch_at, each.since, each.release, each.address, None if each.backend is None else str(each.backend),
    )  # fmt: skip
