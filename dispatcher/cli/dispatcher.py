"""`mailroom dispatcher`."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from dispatcher import daemon
from dispatcher.delivery.floor import Scanned
from dispatcher.lanes.lane import POLL_INTERVAL_S
from mailroom.cli.call import Call, pass_call
from mailroom.cli.commands.status import tell_leader
from mailroom.cli.group import Group
from mailroom.cli.logs import log_to_stderr
from mailroom.cli.output import document, progress_bar, say, working
from mailroom.cli.parameters import seconds_above_0
from mailroom.cli.serving import metrics_option, serving, statistics_option
from mailroom.metrics.catalog import reading_catalog
from mailroom.metrics.process import awake
from mailroom.node import status as node_status
from mailroom.session.home import Home

poll_interval = click.option(
    "--poll-interval-s",
    type=seconds_above_0,
    default=POLL_INTERVAL_S,
    show_default=True,
    help="The longest a message or executable waits if every notification is lost.",
)


@contextmanager
def counted_off(what: str, waiting: int) -> Iterator[Callable[[Scanned], None]]:
    """Show progress towards `waiting`; yields the function to call with each batch."""
    done = 0
    with progress_bar(what, waiting) as bar:

        def show(batch: Scanned) -> None:
            nonlocal done
            done += batch.taken
            bar.show(done, done)

        yield show


@click.group(cls=Group)
def dispatcher() -> None:
    """Deliver committed messages into inboxes."""


@dispatcher.command()
@poll_interval
@metrics_option
@statistics_option
@pass_call
def run(call: Call, poll_interval_s: float, address: str | None, statistics: bool) -> None:
    """Run the dispatcher until SIGTERM or Ctrl-C.

    It delivers messages as they are committed, runs the executor too (mailroom executor), and receives what other nodes
    have for this one (mailroom link). A second dispatcher stands by, and takes over when the first is gone.

    \b
    Examples:
      mailroom dispatcher run
      mailroom dispatcher run --schema tenant_a --poll-interval-s 5
    """
    dsn = call.dsn()
    log_to_stderr(call.log_format)
    lanes = daemon.all_lanes(dsn, schema=call.schema, poll_interval_s=poll_interval_s)
    others = [
        families
        for lane in lanes
        if address and isinstance(lane, daemon.Dispatcher)
        for families in (lane._sampled().families, awake(lane))
    ]
    homes = {call.schema: lambda: Home(dsn)}
    with serving(address, lanes, homes, reading_catalog, others, statistics=statistics):
        asyncio.run(daemon.run_until_signalled(lanes))


@dispatcher.command()
@pass_call
def deliver_all(call: Call) -> None:
    """Deliver everything committed so far, then exit. A running dispatcher does no harm.

    It also moves messages of parked keys to `parked`, and finishes large batches that a Spark driver has left.

    \b
    Examples:
      mailroom dispatcher deliver-all
      mailroom dispatcher deliver-all --json
    """
    if call.log_format == "json":
        log_to_stderr(call.log_format, logging.WARNING)
    with working("counting what waits"), call.connection("dispatcher deliver-all", autocommit=True) as connection:
        waiting = node_status.outbox_backlog(connection, schema=call.schema)
    with counted_off("delivered", waiting) as show:
        totals = daemon.deliver_all(call.dsn(), schema=call.schema, progress=show)
    if call.json:
        document(totals)
    else:
        others = {name: count for name, count in asdict(totals).items() if name not in ("taken", "delivered") and count}
        say(
            f"{totals.taken:,} messages taken, {totals.delivered:,} delivered"
            + "".join(f", {count:,} {name}" for name, count in others.items())
            + "."
        )


@dispatcher.command()
@pass_call
def status(call: Call) -> None:
    """Show which dispatcher leads: host, process, awake or asleep, and its totals.

    Then the same for the lane that reads other nodes, and its state with each of them (see mailroom link status).

    Exits with 1 if no process leads.

    \b
    Examples:
      mailroom dispatcher status
      mailroom dispatcher status --json | jq .leads
    """
    with call.looking("dispatcher status") as connection:
        found = node_status.dispatcher_status(connection, schema=call.schema)
        links = node_status.links_status(connection, schema=call.schema)
    tell_leader(call, found, links=links)
