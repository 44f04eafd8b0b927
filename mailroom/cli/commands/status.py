"""`mailroom status`, and the line about the dispatcher."""

from collections.abc import Callable
from operator import attrgetter

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import as_json, document, duration, facts, say, size, table, working
from mailroom.figures.node import WhichNode
from mailroom.links.states import SourceState
from mailroom.node import status as node_status
from mailroom.node.status import ClockSetBack, DispatcherStatus, InboxStatus, LinkStatus, LogStatus, Status


@click.command()
@pass_call
def status(call: Call) -> None:
    """Show the status of a node.

    First: which node this is, on which server, which dispatcher and executor lead, what waits for them, and the clock.

    Then for each inbox: how many messages are on the way to it (committed, not yet delivered) and in its backlog
    (delivered, not yet reaped), each with the age of the oldest. The first age is the dispatcher's part of the lag, the
    second the consumers'. The lag itself is the age of the oldest message of both since it was sent.

    Further columns are shown if they count anything. Waiting keys have failed and wait for their next attempt; parked
    keys are held, with their messages, until an operator acts (mailroom parked list). Expired messages waited for
    longer than their inbox allows and were removed (mailroom inbox set --expire-s). Held messages are in an inbox of
    total order and may not be reaped yet: the node they are held back for may still send earlier ones. A paused inbox
    gives no messages until it is resumed, and so does a paused key (mailroom inbox resume). While the breaker of an
    inbox is open, its workers try one message from time to time.

    If a table is locked and cannot be read, the first line names the session; an inbox among them is left out.
    If a session of Mailroom waits for a lock, one line says which lock, and who holds it. If a sequence is behind its
    rows, since the node was moved without it, one line says which. If the clock of the server was set back within the
    last hour, one line says by how much.

    For each log: its segments and its size, and how much of that is older than the log keeps and stays, since inboxes
    have not read it (mailroom log status).

    Last, for each node that reads messages of this one: those on the way to it (committed, not yet stamped) and in its
    backlog (stamped, not yet acknowledged), with the age of the oldest.

    \b
    Examples:
      mailroom status
      mailroom status --json | jq '.inboxes[] | {name, backlog, lag_s}'
    """
    with (
        working("reading the state of the node"),
        call.looking("status", autocommit=True) as connection,
    ):  # many inboxes are many locks
        found = node_status.status(connection, schema=call.schema)
    if call.json:
        document(found)
    else:
        _show(found)


SHOWN_COLUMNS: dict[str, Callable[[InboxStatus], object]] = {
    "inbox": attrgetter("name"),
    "lag": lambda inbox: duration(inbox.lag_s),
    "on the way": attrgetter("on_the_way"),
    "oldest on the way": lambda inbox: duration(inbox.dispatcher_lag_s),
    "backlog": attrgetter("backlog"),
    "oldest in backlog": lambda inbox: duration(inbox.consumer_lag_s),
}
# Shown if an inbox has any: all of them together are wider than a usual terminal.
COUNTS: dict[str, Callable[[InboxStatus], object]] = {
    "waiting keys": attrgetter("waiting_keys"),
    "parked keys": attrgetter("parked_keys"),
    "parked messages": attrgetter("parked_messages"),
    "expired": attrgetter("expired"),
    "held back": attrgetter("held_back"),
    "held back for": lambda inbox: "mailroom link resume" if inbox.is_stopped and inbox.held_back else inbox.waits_for,
    "paused": attrgetter("paused_at"),
    "paused by": attrgetter("paused_by"),
    "paused keys": attrgetter("paused_keys"),
    "breaker open": attrgetter("breaker_opened_at"),
    "breaker says": attrgetter("breaker_why"),
}
TEXTS = ("inbox", "paused", "paused by", "breaker open", "breaker says")

LOG_COLUMNS: dict[str, Callable[[LogStatus], object]] = {
    "log": attrgetter("name"),
    "segments": attrgetter("segments"),
    "size": lambda log: size(log.bytes),
    "held": lambda log: size(log.held_bytes) if log.held_by else None,
    "by": lambda log: ", ".join(log.held_by) or None,
    "since": attrgetter("held_since"),
}
LINK_COLUMNS: dict[str, Callable[[LinkStatus], object]] = {
    "link to": attrgetter("name"),
    "state": lambda link: link.state if link.state in ("open", "cut") else f"{link.state}: mailroom bridge status",
    "lag": lambda link: duration(link.lag_s),
    "on the way": attrgetter("on_the_way"),
    "backlog": attrgetter("backlog"),
}
SOURCE_COLUMNS: dict[str, Callable[[SourceState], object]] = {
    "link from": attrgetter("name"),
    "state": lambda source: source.state if source.state == "open" else f"{source.state}: mailroom link status",
    "since": attrgetter("since"),
    "clock": lambda source: str(source.shown),
    "last received": attrgetter("received_at"),
}


def _show(found: Status) -> None:
    lines = [
        *(("Locked", str(each)) for each in found.locked),
        ("Node", str(WhichNode(found.node, found.schema, found.database, found.server))),
        ("Clock", f"{found.clock:,} (ceiling {found.clock_ceiling:,})"),
        ("Dispatcher", _leader(found.dispatcher)),
        ("Executor", _leader(found.executor)),
        ("Outbox", f"{_waiting(found.outbox_backlog, found.outbox_lag_s)}; {found.scheduled:,} scheduled for later"),
        *(
            [("Large batches", f"{found.bulk_backlog:,} messages still to be moved into the outbox")]
            * bool(found.bulk_backlog)
        ),
        ("Executables", _waiting(found.executable_backlog, found.executable_lag_s)),
        *(("Waits", str(wait)) for wait in found.waits),
        *(
            ("Behind", f"{each.table}.{each.column}: its sequence is behind its rows: mailroom migrate")
            for each in found.behind
        ),
        *([("Set back", _set_back(found.set_back))] if found.set_back else ()),
        ("Dead", f"{found.dead_letters:,} dead letters{': mailroom dead-letter list' if found.dead_letters else ''}"),
    ]
    if not found.inboxes:
        facts([*lines, ("Inboxes", "none: mailroom inbox create NAME --subscribe TOPIC")])
    else:
        facts(lines)
        say("")
        columns = SHOWN_COLUMNS | {heading: of for heading, of in COUNTS.items() if any(map(of, found.inboxes))}
        rows = ([of(inbox) for of in columns.values()] for inbox in found.inboxes)
        table(tuple(columns), rows, numbers=tuple(heading for heading in columns if heading not in TEXTS))
    if found.logs:
        say("")
        rows = ([of(log) for of in LOG_COLUMNS.values()] for log in found.logs)
        table(tuple(LOG_COLUMNS), rows, numbers=("segments", "size", "held"))
    if found.links:
        say("")
        rows = ([of(link) for of in LINK_COLUMNS.values()] for link in found.links)
        table(tuple(LINK_COLUMNS), rows, numbers=tuple(LINK_COLUMNS)[2:])
    if found.sources:
        say("")
        rows = ([of(source) for of in SOURCE_COLUMNS.values()] for source in found.sources)
        table(tuple(SOURCE_COLUMNS), rows, numbers=("clock",))


def _set_back(found: ClockSetBack) -> str:
    return (
        f"the server's clock was set back by about {duration(found.by_s)}, noticed at {found.at}: mailroom explain M052"
    )


def _waiting(number: int, lag_s: float) -> str:
    return f"{number:,} waiting{f', the oldest sent {duration(lag_s)} ago' if number else ''}"


def tell_leader(call: Call, found: DispatcherStatus | None, **others: DispatcherStatus | None) -> None:
    """Print the status of a node's dispatcher or executor, and exit: with 1 if none leads.

    `others` are lanes that run beside it, by name.
    """
    if call.json:
        document(found if found is None else as_json(found) | as_json(others))
    else:
        say(_leader(found))
        for name, other in others.items():
            if other is not None:
                say(f"{name}: {_leader(other)}")
                for origin, state in sorted(other.origins.items()):
                    say(f"  {origin}: {state}")
    click.get_current_context().exit(0 if found is not None and found.leads else 1)


def _leader(found: DispatcherStatus | None) -> str:
    if found is None:
        return "none has run yet: mailroom dispatcher run"
    fails = "" if found.failing is None else f". It {found.failing}: {found.failing.run or 'mailroom doctor'}"
    if not found.leads:
        return (
            f"none leads; {found.host} pid {found.pid} did until {duration(-found.lease_left_s)} ago; start one: "
            f"mailroom dispatcher run{fails}"
        )
    counts = ", ".join(f"{name} {count:,}" for name, count in found.counts.items())
    return (
        f"{found.host} pid {found.pid} leads, {found.state}; lease good for {duration(found.lease_left_s)} "
        f"(epoch {found.epoch}){f'; {counts}' if counts else ''}"
        f"{fails}"
    )
