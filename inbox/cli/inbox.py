"""`mailroom inbox` and `mailroom worker`."""

import os
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, Unpack

import click

from inbox.by_key.claim import Share
from inbox.claims import Claims
from inbox.cli.failing import failing, retry
from inbox.cli.settings import check_settings, settings_options
from inbox.cli.workers import list_ as list_workers
from inbox.inbox import Inbox
from inbox.worker.process import serve
from inbox.worker.worker import AsyncWorker, Worker, home_of, limit
from mailroom.cli.acting import answering, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.commands.migrate import migrate_first
from mailroom.cli.failures import drop_output
from mailroom.cli.group import Group
from mailroom.cli.logs import log_to_stderr
from mailroom.cli.messages import print_messages
from mailroom.cli.modules import imported
from mailroom.cli.output import document, duration, note, print_listing, progress_bar, say, working
from mailroom.cli.parameters import (
    INBOX,
    KEY,
    LIMIT,
    ORIGIN,
    PATTERN,
    Number,
    OneOf,
    moment,
    seconds,
)
from mailroom.cli.serving import metrics_option, serving, statistics_option
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.links.links import Links
from mailroom.links.unknown import not_read
from mailroom.logs.readers import NOW, START
from mailroom.message.message import Message
from mailroom.node.status import links_status
from mailroom.order.traits import traits_of
from mailroom.registry.drop import drop_inbox
from mailroom.registry.inboxes import create_inbox, set_inbox
from mailroom.registry.listing import listing
from mailroom.registry.rename import rename_inbox
from mailroom.registry.settings import DEFAULTS, InboxSettings
from mailroom.registry.subscriptions import subscribe as subscribe_inbox
from mailroom.registry.subscriptions import unsubscribe as unsubscribe_inbox
from mailroom.schema.audit import shown_value
from mailroom.session.settings import DSN_VARIABLE
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.runner import run
from mailroom.values.names import ALL, OWN

origin_option = click.option(
    "--origin",
    metavar="NAME",
    type=ORIGIN,
    default=OWN,
    help="Whose messages: those of the node of this name, which this one reads over a link, or * for this node and all "
    "that it reads. [this node]",
)


def wait_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options about the sources that are to know of a subscription."""
    wait = click.option(
        "--wait/--no-wait",
        "waits",
        default=True,
        help="With --origin: wait until the source knows of the subscription; what is sent there from then on comes. "
        "The dispatcher of this node has to run, since it tells the source. [--wait]",
    )
    timeout = click.option(
        "--timeout-s", metavar="S", type=seconds, default=60.0, show_default=True, help="How long --wait waits."
    )
    return wait(timeout(command))


def since(text: str) -> str | datetime:
    """Return where an inbox begins to read a log."""
    return text if text in (NOW, START) else moment(text)


def place(text: str) -> str | int | datetime:
    """Return where an inbox goes on in a log: `start`, a clock or a time."""
    return text if text == START else int(text) if text.isdecimal() else moment(text)


topics_option = click.option(
    "--topics",
    "wanted",
    metavar="PATTERN",
    type=PATTERN,
    multiple=True,
    help="Of the log that it reads, read this topic or pattern only; repeatable. [#, all]",
)


@click.group(cls=Group)
def inbox() -> None:
    """Create inboxes and subscribe them, show their messages, and reap from a shell."""


# Inboxes created per transaction: each takes six of the server's locks until it ends.
AT_ONCE = 100


inbox.add_command(failing)
inbox.add_command(retry)


@inbox.command()
@click.argument("names", metavar="NAME...", type=INBOX, nargs=-1, required=True)
@click.option(
    "--subscribe",
    "topics",
    metavar="TOPIC",
    type=PATTERN,
    multiple=True,
    help="Subscribe to this topic or pattern; repeatable.",
)
@origin_option
@wait_options
@click.option(
    "--order",
    type=OneOf(["key", "total"]),
    help="In which order messages are reaped: each key's by itself, or all in one queue. Only for a new inbox. [key]",
)
@click.option("--log", metavar="LOG", type=INBOX, help="Read this log instead of getting messages of its own.")
@click.option(
    "--since",
    metavar="TIME",
    type=since,
    default=NOW,
    help="With --log: where to begin: now, start (the oldest message that the log has) or a time with its zone, such "
    "as 2026-11-30T08:00+00:00. [now]",
)
@topics_option
@settings_options
@click.option(
    "--migrate",
    "migrates",
    is_flag=True,
    help="First create the schema, or bring it up to date, as `mailroom migrate` does.",
)
@answering
@pass_call
def create(
    call: Call,
    names: tuple[str, ...],
    topics: tuple[str, ...],
    origin: str,
    waits: bool,
    timeout_s: float,
    order: Literal["key", "total"] | None,
    log: str | None,
    since: str | datetime,
    wanted: tuple[str, ...],
    migrates: bool,
    actor: str,
    why: str | None,
    **settings: Unpack[InboxSettings],
) -> None:
    """Create inboxes, with their subscriptions and settings.

    Each gets the topics it subscribes to, and the messages and commands whose topic is its own name. Messages that were
    delivered before it subscribed are not added. Repeating the command is harmless: an inbox that exists gets the
    subscriptions that it lacks. With other settings than it has the command fails, and mailroom inbox set changes
    them. With many inboxes it commits a hundred at a time.

    By default a message that fails is tried 16 times over about 3 hours, long enough for most outages of a service that
    the handler calls. The command prints how long the attempts take with these settings.

    A new inbox is a table of its own: other roles than the owner's reap it after `mailroom grant reaper ROLE --inbox
    NAME`, and a dispatcher or operator that is not the owner needs its grant again.

    --rate, --concurrency and --breaker hold for all workers together, and not for who reaps by hand. Workers keep to
    new ones within about 5 s.

    With --order total all messages form one queue, in the same order on all nodes. One batch at a time is worked on,
    and a message that fails holds up the inbox until it succeeds, is skipped or somebody acts.

    With --log the inbox reads what stands in a log (mailroom log create), beside all others that do, and begins with
    --since. It has no subscriptions of its own, and passes over what is not of its --topics.

    \b
    Examples:
      mailroom inbox create shipping --subscribe order.paid --subscribe order.cancelled
      mailroom inbox create shipping --subscribe order.paid --migrate
      mailroom inbox create shipping --backoff-s 5 --backoff-max-s 600
      mailroom inbox create audit_log --max-attempts 10 --on-failure skip
      mailroom inbox create shop_replies --expire-s 600
      mailroom inbox create shipping --keep-reaped-days 30
      mailroom inbox create shipping --rate 10 --burst 20 --concurrency 4 --breaker 50
      mailroom inbox create shipping --breaker 50 --breaker-by /
      mailroom inbox create invoices --subscribe order.paid --origin lyon
      mailroom inbox create ledger --subscribe 'account.#' --origin '*' --order total
      mailroom inbox create shop_{1..1000} --subscribe price.changed
      mailroom inbox create search --log orders --since start
      mailroom inbox create refunds --log orders --topics 'refund.#' --topics order.cancelled
    """
    if origin != OWN and not topics:
        raise click.UsageError("--origin says whose messages to subscribe to: give --subscribe too.")
    check_settings(settings)
    if migrates:
        migrate_first(call, actor=actor, why=why)
    with call.connection("inbox create") as connection, progress_bar("created", len(names), of="inboxes") as bar:
        for first in range(0, len(names), AT_ONCE):
            create_inbox(
                connection,
                names[first : first + AT_ONCE],
                topics,
                schema=call.schema,
                origin=origin,
                order=order,
                log=log,
                since=since,
                topics=wanted,
                actor=actor,
                why=why,
                **settings,
            )
            connection.commit()
            bar.show(*[min(first + AT_ONCE, len(names))] * 2)
        made = {each["name"]: each for each in run(connection, listing(call.schema, names))}
        unknown, is_told = run(connection, _knowing(call.schema, origin))
    named = [made[name] for name in dict.fromkeys(names)]
    if is_told:
        for each in named:
            _wait(call, each["name"], topics, origin, timeout_s if waits else None)
    if call.json:
        for each in named:
            document({"inbox": each["name"], "schema": call.schema, "subscribed": topics, "origin": origin})
        return
    for each in named:
        say(f"Inbox {each['name']} exists" + (f", subscribed to {', '.join(topics)}{_of(origin)}." if topics else "."))
    told: dict[str, list[str]] = {}
    for each in named:
        told.setdefault(_of_failures(each), []).append(each["name"])
    for sentences, of in told.items():
        say(sentences if len(told) == 1 else f"{', '.join(of)}: {sentences}")
    if unknown:
        note(unknown)


@inbox.command("set")
@click.argument("names", metavar="NAME...", type=INBOX, nargs=-1, required=True)
@settings_options
@topics_option
@answering
@pass_call
def set_(
    call: Call, names: tuple[str, ...], wanted: tuple[str, ...], actor: str, why: str | None,
    **settings: Unpack[InboxSettings],
) -> None:  # fmt: skip
    """Change settings of inboxes, and print what is different now.

    Settings that are not given stay. Workers keep to new limits within about 5 s, and to other settings with their next
    batch. An inbox that there is not is an error, and then nothing is changed.

    --topics are those that an inbox of a log reads from now on, in place of those that it had.

    \b
    Examples:
      mailroom inbox set shipping --rate 10 --why "the carrier asked for it"
      mailroom inbox set shipping --rate 0
      mailroom inbox set shipping billing --max-attempts 20
      mailroom inbox set shipping --keep-reaped-days 30 --json
      mailroom inbox set refunds --topics 'refund.#'
    """
    if all(value is None for value in settings.values()) and not wanted:
        raise click.UsageError("Give a setting to change. See: mailroom inbox list")
    check_settings(settings)
    with call.connection("inbox set") as connection:
        changes = {
            name: set_inbox(connection, name, schema=call.schema, topics=wanted, actor=actor, why=why, **settings)
            for name in sorted({*names})
        }
    for name, change in changes.items():
        if call.json:
            document({"inbox": name, "schema": call.schema, "change": change or None})
        else:
            say(f"Inbox {name}: {change or 'nothing to change'}.")


@inbox.command()
@click.argument("name", type=INBOX)
@click.argument("topics", metavar="TOPIC...", type=PATTERN, nargs=-1, required=True)
@origin_option
@wait_options
@answering
@pass_call
def subscribe(
    call: Call, name: str, topics: tuple[str, ...], origin: str, waits: bool, timeout_s: float, actor: str,
    why: str | None,
) -> None:  # fmt: skip
    """Subscribe an inbox to topics and patterns. Repeating the command is harmless.

    Dots divide a topic into words. In a pattern * stands for one word, and # as the last word for any number of words:
    order.* fits order.paid, order.# also fits order and order.paid.twice, # fits all. A pattern gets messages and
    events; commands and replies go by exact subscriptions and by the inbox's own name only. An inbox gets a message
    once, however many of its subscriptions fit. Quote a pattern, or the shell takes it for file names.

    \b
    Examples:
      mailroom inbox subscribe shipping order.paid order.cancelled
      mailroom inbox subscribe audit_log 'order.#' '*.failed'
      mailroom inbox subscribe audit_log 'order.#' --origin lyon
    """
    with call.connection("inbox subscribe") as connection:
        new = subscribe_inbox(connection, name, topics, schema=call.schema, origin=origin, actor=actor, why=why)
        unknown, is_told = run(connection, _knowing(call.schema, origin))
    if is_told:
        _wait(call, name, topics, origin, timeout_s if waits else None)
    if call.json:
        document({"inbox": name, "schema": call.schema, "subscribed": new, "origin": origin})
        return
    if new:
        say(f"Inbox {name} has subscribed to {', '.join(new)}{_of(origin)}.")
    if before := sorted(set(topics).difference(new)):
        note(f"It had subscribed before to {', '.join(before)}{_of(origin)}.")
    if unknown:
        note(unknown)


@inbox.command()
@click.argument("name", type=INBOX)
@click.argument("topics", metavar="TOPIC...", type=PATTERN, nargs=-1, required=True)
@origin_option
@answering
@pass_call
def unsubscribe(call: Call, name: str, topics: tuple[str, ...], origin: str, actor: str, why: str | None) -> None:
    """End subscriptions of an inbox, each as it was given. What was delivered stays. Repeating the command is harmless.

    \b
    Examples:
      mailroom inbox unsubscribe shipping order.cancelled
      mailroom inbox unsubscribe audit_log 'order.#'
    """
    with call.connection("inbox unsubscribe") as connection:
        ended = unsubscribe_inbox(connection, name, topics, schema=call.schema, origin=origin, actor=actor, why=why)
    if call.json:
        document({"inbox": name, "schema": call.schema, "unsubscribed": ended, "origin": origin})
        return
    if ended:
        say(f"Inbox {name} no longer subscribes to {', '.join(ended)}{_of(origin)}.")
    if unknown := sorted(set(topics).difference(ended)):
        note(f"It does not subscribe to {', '.join(unknown)}{_of(origin)}; mailroom inbox list shows to what.")


@inbox.command()
@click.argument("name", type=INBOX)
@click.option("--discard", is_flag=True, help="Delete its messages for good, parked ones too.")
@answering
@pass_call
def drop(call: Call, name: str, discard: bool, actor: str, why: str | None) -> None:
    """Drop an inbox with its subscriptions and all records about it, except its dead letters.

    It is refused while messages wait in the inbox or are parked. Stop its workers first; those that still run end with
    an error. A dispatcher may keep running.

    \b
    Examples:
      mailroom inbox drop shipping
      mailroom inbox drop audit_log --discard --why "nobody reads it"
    """
    with working("dropping the inbox"), call.connection("inbox drop") as connection:
        number = drop_inbox(connection, name, schema=call.schema, discard=discard, actor=actor, why=why)
    if call.json:
        document({"inbox": name, "schema": call.schema, "messages": number})
    else:
        of_it = f", with {counted(number, 'message')}" if number else ""
        say(f"Inbox {name} is dropped{of_it}.")


@inbox.command()
@click.argument("name", type=INBOX)
@click.option(
    "--to",
    metavar="TIME",
    type=place,
    required=True,
    help="Where to go on: start (the oldest message that the log has), a time with a zone, such as "
    "2026-11-30T08:00+00:00, or the clock of a message.",
)
@answering
@pass_call
def rewind(call: Call, name: str, to: str | int | datetime, actor: str, why: str | None) -> None:
    """Have an inbox that reads a log read it again from a time on.

    Its messages come once more, with the same ids, in order by key. What failed since then is tried anew; a parked key
    stays parked and holds its messages. An inbox that has not read so far yet stays where it is. It waits for batches
    in hand; workers keep running.

    \b
    Examples:
      mailroom inbox rewind search --to start --why "the index is built anew"
      mailroom inbox rewind billing --to 2026-11-30T08:00+00:00
    """
    with working("setting the inbox back"), call.connection("inbox rewind") as connection:
        found = Inbox(name, schema=call.schema).rewind(connection, to, actor=actor, why=why)
    if call.json:
        fields = {"clock": found.clock, "oldest": found.opened_at, "is_short": found.is_short}
        document({"inbox": name, "schema": call.schema, **fields})
        return
    say(f"Inbox {name} goes on after clock {found.clock}.")
    if found.is_short:
        note(f"The log has nothing from before {found.opened_at:%Y-%m-%d %H:%M:%S %z}: what is older is gone.")


@inbox.command()
@click.argument("name", type=INBOX)
@click.argument("new", type=INBOX)
@answering
@pass_call
def rename(call: Call, name: str, new: str, actor: str, why: str | None) -> None:
    """Give an inbox another name. It keeps its messages, subscriptions and settings.

    What is still sent to the old name comes too: the inbox subscribes to it. Stop its workers first; those that still
    run end with an error. A dispatcher may keep running.

    \b
    Examples:
      mailroom inbox rename shipping dispatch
      mailroom inbox unsubscribe dispatch shipping
    """
    with working("renaming the inbox"), call.connection("inbox rename") as connection:
        number = rename_inbox(connection, name, new, schema=call.schema, actor=actor, why=why)
    if call.json:
        document({"inbox": new, "before": name, "schema": call.schema, "messages": number})
        return
    of_it = f", with {counted(number, 'message')}" if number else ""
    say(f"Inbox {name} is {new} now{of_it}.")
    note(f"It has subscribed to {name}, so what is sent there comes: mailroom inbox unsubscribe {new} {name}")


@inbox.command()
@click.argument("name", type=INBOX)
@click.option("--key", metavar="K", type=KEY, help="Only this key; the others go on.")
@click.option(
    "--wait",
    "waits",
    is_flag=True,
    help="Return once no worker has messages in hand that were taken before the pause.",
)
@click.option("--timeout-s", metavar="S", type=seconds, default=60.0, show_default=True, help="How long --wait waits.")
@answering
@pass_call
def pause(call: Call, name: str, key: str | None, waits: bool, timeout_s: float, actor: str, why: str | None) -> None:
    """Pause an inbox, or one key of it: its messages wait until it is resumed.

    Deliveries go on, and the messages wait in order. Workers need not be stopped: they finish the messages in hand, and
    then wait. A pause outlasts restarts. Repeating the command changes nothing.

    \b
    Examples:
      mailroom inbox pause shipping --why "the carrier is down"
      mailroom inbox pause shipping --wait --timeout-s 300
      mailroom inbox pause shipping --key order-42
      mailroom inbox resume shipping
    """
    of = Inbox(name, schema=call.schema)
    with call.connection("inbox pause") as connection:
        is_new = of.pause(connection, key, actor=actor, why=why)
    if waits:
        with working("waiting for batches"), call.connection("inbox pause wait", autocommit=True) as connection:
            of.wait_for_batches(connection, timeout_s)
    _tell_paused(call, name, key, is_new, "is paused", "was paused before")
    if not call.json:
        note(f"To go on: mailroom inbox resume {name}" + ("" if key is None else f" --key {shlex.quote(key)}"))


@inbox.command()
@click.argument("name", type=INBOX)
@click.option("--key", metavar="K", type=KEY, help="Only this key, which was paused by itself.")
@answering
@pass_call
def resume(call: Call, name: str, key: str | None, actor: str, why: str | None) -> None:
    """End the pause of an inbox, or of one key of it. Workers go on at once.

    An open breaker is closed too. Keys that were paused by themselves stay paused: see mailroom inbox paused.

    \b
    Examples:
      mailroom inbox resume shipping
      mailroom inbox resume shipping --key order-42
    """
    with call.connection("inbox resume") as connection:
        was_paused = Inbox(name, schema=call.schema).resume(connection, key, actor=actor, why=why)
    _tell_paused(call, name, key, was_paused, "goes on", "is not paused")


def _tell_paused(call: Call, name: str, key: str | None, changed: bool, then: str, otherwise: str) -> None:
    if call.json:
        document({"inbox": name, "schema": call.schema, "key": key, "changed": changed})
    else:
        say(f"{f'Inbox {name}' if key is None else f'Key {key} of inbox {name}'} {then if changed else otherwise}.")


@inbox.command()
@click.argument("name", type=INBOX)
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many keys at most.")
@pass_call
def paused(call: Call, name: str, limit: int) -> None:
    """List the paused keys of an inbox, the longest paused first. `mailroom status` shows paused inboxes.

    \b
    Examples:
      mailroom inbox paused shipping
      mailroom inbox paused shipping --json | jq -r '.[].key'
    """
    with working("counting messages of paused keys"), call.looking("inbox paused") as connection:
        found = Inbox(name, schema=call.schema).paused_keys(connection, limit)
    print_listing(
        found,
        ("key", "messages", "paused", "by", "parked too"),
        lambda each: (each.key, each.messages, each.paused_at, each.paused_by, each.is_parked),
        none=f"Inbox {name} has no paused keys.",
        json=call.json,
        numbers=("messages",),
    )


def _of_failures(inbox: dict[str, Any]) -> str:
    """Return sentences about what follows when a message of this inbox fails."""
    traits = traits_of(inbox["order"])
    then = {
        ("park", True): "then its key is parked",
        ("skip", True): "then it is moved to dead_letter",
        ("park", False): "then the inbox is parked",
        ("skip", False): "then it alone is moved to dead_letter, and the others go on",
    }[inbox["on_failure"], traits.parks_one]
    order = f"Its order is {traits.name}: one queue, and a message that fails holds up all others. "
    often, spread = counted(inbox["max_attempts"], "time"), duration(inbox["attempts_spread_s"])
    return f"{order * (not traits.parks_one)}A message that fails is tried {often} over about {spread}; {then}."


def _of(origin: str) -> str:
    return "" if origin == OWN else " of every node" if origin == ALL else f" of {origin}"


def _wait(call: Call, name: str, topics: tuple[str, ...], origin: str, timeout_s: float | None) -> None:
    """Wait until the sources have the subscriptions that were just committed; None for not at all."""
    if origin == OWN or not topics:
        return
    if timeout_s is None:
        note("What is sent there comes from when the dispatcher of this node has told it: mailroom link status")
        return
    with call.connection("inbox wait") as connection:
        lease = links_status(connection, schema=call.schema)
        if lease is None or not lease.leads:
            note("No dispatcher of this node runs, which has to tell the source: mailroom dispatcher run")
        with working("waiting for the source"):
            Links(schema=call.schema).wait(connection, name, origin=origin, topics=topics, timeout_s=timeout_s)


KNOWN = Sql(
    """
SELECT EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number) FROM {schema}.origin AS o
WHERE o.name = %(name)s::text
""",
    columns=("boolean",),
)


def _knowing(schema: str, origin: str) -> Operation[tuple[str | None, bool]]:
    """Return what to say if no messages of `origin` can come yet, and whether it is told what inboxes subscribe to."""
    if origin in (OWN, ALL):
        return None, True
    rows = yield KNOWN.at(schema=schema)(name=origin)
    # A broker is told nothing: a bridge reads its topics, whether or not an inbox subscribes.
    return (None, not rows[0][0]) if rows else ((yield from not_read(schema, origin)), False)


@inbox.command("list")
@pass_call
def list_(call: Call) -> None:
    """List the inboxes with their subscriptions and settings. `mailroom status` shows what is in them.

    \b
    Examples:
      mailroom inbox list
      mailroom inbox list --json | jq -r '.[].name'
    """
    with call.looking("inbox list") as connection:
        found = run(connection, listing(call.schema))
    print_listing(
        found,
        ("inbox", "subscribed to", "order", "settings", "attempts over", "created", "paused"),
        _row,
        none="There is no inbox yet: mailroom inbox create NAME --subscribe TOPIC",
        json=call.json,
    )


def _row(inbox: dict[str, Any]) -> tuple[object, ...]:
    """Return what the list shows of an inbox; of its settings those that are not as in a new one."""
    others = [f"{topic}{_of(origin)}" for origin, topics in inbox["topics_of"].items() for topic in topics]
    settings = [f"{name} {shown_value(inbox[name])}" for name, default in DEFAULTS.items() if inbox[name] != default]
    order = f"log {inbox['log']}" if inbox["log"] else inbox["order"]
    return (
        inbox["name"], "\n".join(inbox["topics"] + others) or None, order, "\n".join(settings) or None,
        duration(inbox["attempts_spread_s"]), inbox["created_at"], inbox["paused_at"],
    )  # fmt: skip


@inbox.command()
@click.argument("name", type=INBOX)
@click.option("--key", metavar="K", type=KEY, help="Only this key's messages.")
@click.option("--limit", type=LIMIT, default=10, show_default=True, help="How many at most.")
@pass_call
def peek(call: Call, name: str, key: str | None, limit: int) -> None:
    """Show the oldest messages of an inbox without taking them.

    A worker may be handling them at this moment. With --json each line is one object.

    \b
    Examples:
      mailroom inbox peek shipping
      mailroom inbox peek shipping --key order-42 --limit 100 --json
    """
    with call.looking("inbox peek") as connection:
        print_messages(Inbox(name, schema=call.schema).peek(connection, key, limit), json=call.json)


@inbox.command()
@click.argument("name", type=INBOX)
@click.option(
    "--key", metavar="K", type=KEY, help="Take this key's messages, oldest first; waits while the key is locked."
)
@click.option(
    "--any", "any_key", is_flag=True, help="Take messages of any keys that are not locked, the longest waiting first."
)
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many at most.")
@pass_call
def reap(call: Call, name: str, key: str | None, any_key: bool, limit: int) -> None:
    """Take messages out of an inbox: print them, flush, then commit.

    If the output cannot be written, the messages stay in the inbox, so a broken pipe loses nothing. If the commit
    fails, messages that were printed already come again. With --json each line is one object. Values that JSON cannot
    represent are printed as text, bytes as base64, and a value that cannot be decoded as `raw` (base64) with a `note`.

    \b
    Examples:
      mailroom inbox reap shipping --key order-42 --limit 10
      mailroom inbox reap shipping --any --limit 1000 --json > batch.jsonl
    """
    if any_key == (key is not None):
        raise click.UsageError("Give --key K or --any.")
    with call.connection("inbox reap") as connection:
        with working("taking messages"):  # it may wait for the key
            if key is None:
                messages = run(connection, _reaping(call.schema, name, limit))
            else:
                messages = Inbox(name, schema=call.schema).reap(connection, key, limit)
        _hand_over(messages, as_json=call.json)
    if not messages:
        note("Nothing to reap.")


def _reaping(schema: str, name: str, limit: int) -> Operation[list[Message]]:
    return (yield from Claims(schema, name).claiming(Share(limit, limit, limit))).messages


def _hand_over(messages: list[Message], *, as_json: bool) -> None:
    """Print the messages; raise `MailroomError`, before anything is committed, if they could not all be written."""
    if sys.stdout is None:
        raise MailroomError(
            "Nothing was reaped: stdout is closed, so there is nowhere to print to.", code="MR-output-failed"
        )
    try:
        print_messages(messages, json=as_json)
    except OSError as error:
        drop_output()
        raise MailroomError(
            f"Nothing was reaped: the output could not be written ({error.strerror}).", code="MR-output-failed"
        ) from None


@click.group(cls=Group)
def worker() -> None:
    """Run services that reap an inbox, and list those that run."""


worker.add_command(list_workers)


@worker.command("run")
@click.argument("targets", metavar="MODULE:WORKER...", nargs=-1, required=True)
@click.option(
    "--timeout-s",
    type=Number(min=0, min_open=True),
    help="Seconds that a handler may take with a message, for workers that set none; after that "
    "the message has failed.",
)
@metrics_option
@statistics_option
@pass_call
def run_worker(
    call: Call, targets: tuple[str, ...], timeout_s: float | None, address: str | None, statistics: bool
) -> None:
    """Run workers until SIGTERM or Ctrl-C; then they finish their batches. A second Ctrl-C ends them at once.

    MODULE is imported from the current directory or from the installed packages. WORKER is an `inbox.Worker` or
    `inbox.AsyncWorker` in it. Several workers run side by side in one process; if one fails, the others finish their
    batches and the command ends with its error. A worker names its own database and schema; --dsn and --embedded set
    MAILROOM_DSN for modules that read it.

    \b
    Examples:
      mailroom worker run shipping:worker
      mailroom worker run shipping:worker billing:worker
      mailroom worker run shipping:worker --timeout-s 30
      mailroom worker run services.shipping:workers.orders --dsn postgresql://localhost/shop
    \b
    shipping.py:
      from inbox import Worker
      import mailroom
      def handler(message, conn):
          conn.execute("UPDATE orders SET state = %s WHERE id = %s", [message.value["state"], message.key])
      worker = Worker(mailroom.dsn(), "shipping", handler)
    """
    if call.given_schema is not None:
        raise click.UsageError("A worker names its schema itself: Worker(..., schema=...). Leave --schema out.")
    if call.names_database:
        os.environ[DSN_VARIABLE] = call.dsn()
    workers: list[Worker | AsyncWorker] = []
    for target in targets:
        found = _loaded(target)
        if found in workers:
            raise click.UsageError(
                f"{target} is given twice, but a worker can run only once. For more at once give it parallel=..."
            )
        limit(found, timeout_s)
        workers.append(found)
    log_to_stderr(call.log_format)
    if call.log_format != "json":
        note("Running until SIGTERM or Ctrl-C; then the workers finish their batches.")
    homes = {worker.schema: home_of(worker) for worker in workers}
    with serving(address, workers, homes, statistics=statistics):
        serve(workers)


def _loaded(target: str) -> Worker | AsyncWorker:
    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise click.UsageError(f"{target!r} is not MODULE:WORKER, such as shipping:worker.")
    found: object = imported(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(
                f"{module_name} has no {path!r}: give MODULE:WORKER with a name that exists in the module.",
                code="MR-worker-not-found",
            )
        found = getattr(found, name)
    if not isinstance(found, Worker | AsyncWorker):
        raise ConfigurationError(
            f"{target} is a {type(found).__name__}: give an inbox.Worker or inbox.AsyncWorker, "
            "such as worker = Worker(dsn, 'shipping', handler).",
            code="MR-not-a-worker",
        )
    return found
