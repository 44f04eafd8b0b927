"""`mailroom status`, and the line about the dispatcher."""

import click

from mailroom import status as node_status
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, duration, say, table
from mailroom.status import DispatcherStatus, Status


@click.command()
@pass_call
def status(call: Call) -> None:
    """Show how a node is doing.

    For each inbox: how many messages are on the way to it (committed, and not yet delivered) and in its backlog
    (delivered, and not yet reaped). Its lag is the age of the oldest of them; the dispatcher's part is for how long
    the oldest has been on the way, the consumers' for how long the oldest has been in the backlog. Keys wait after a
    failure, or are parked, with their messages, until somebody acts (mailroom parked list). Above: who dispatches and
    who executes, what waits for them, and where the clock stands.

    \b
    Examples:
      mailroom status
      mailroom status --json | jq '.inboxes[] | {name, backlog, lag_s}'
    """
    with call.connection("status") as connection:
        found = node_status.status(connection, call.schema)
    if call.json:
        document(found)
    else:
        _show(found)


def _show(found: Status) -> None:
    say(f"Node        {found.schema}, clock {found.clock:,} (ceiling {found.clock_ceiling:,})")
    say(f"Dispatcher  {dispatcher_line(found.dispatcher)}")
    say(f"Executor    {dispatcher_line(found.executor)}")
    say(f"Outbox      {_waiting(found.outbox_backlog, found.outbox_lag_s)}; {found.scheduled:,} scheduled for later")
    say(f"Executables {_waiting(found.executable_backlog, found.executable_lag_s)}")
    say(f"Dead        {found.dead_letters:,} dead letters{': mailroom dead-letter list' if found.dead_letters else ''}")
    if not found.inboxes:
        say("Inboxes     none: mailroom inbox create NAME --subscribe TOPIC")
        return
    columns = (
        "inbox",
        "on the way",
        "backlog",
        "lag",
        "dispatcher's",
        "consumers'",
        "waiting keys",
        "parked keys",
        "parked",
    )
    rows = [
        (
            inbox.name,
            inbox.on_the_way,
            inbox.backlog,
            *map(duration, lags),
            inbox.waiting_keys,
            inbox.parked_keys,
            inbox.parked_messages,
        )
        for inbox in found.inboxes
        for lags in [(inbox.lag_s, inbox.dispatcher_lag_s, inbox.consumer_lag_s)]
    ]
    table(columns, rows, numbers=columns[1:])


def _waiting(number: int, lag_s: float) -> str:
    return f"{number:,} waiting{f', the oldest sent {duration(lag_s)} ago' if number else ''}"


def dispatcher_line(found: DispatcherStatus | None) -> str:
    """Return what there is to say of a node's dispatcher, or of its executor: one command runs both."""
    if found is None:
        return "none has run yet: mailroom dispatcher run"
    if not found.leads:
        return (
            f"none leads; {found.host} pid {found.pid} did until {duration(-found.lease_left_s)} ago: "
            "mailroom dispatcher run"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in found.counts.items())
    return (
        f"{found.host} pid {found.pid} leads, {found.state}; lease good for {duration(found.lease_left_s)} "
        f"(epoch {found.epoch}){f'; {counts}' if counts else ''}"
    )
