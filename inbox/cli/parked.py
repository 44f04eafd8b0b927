"""`mailroom parked`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from inbox.by_key.parked_keys import Changed, ParkedKey
from inbox.parked import Attempt, Parked
from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.messages import message_json, print_messages
from mailroom.cli.output import as_json, document, note, print_listing, say, shown, table, working
from mailroom.cli.parameters import INBOX, KEY, LIMIT, TEXT
from mailroom.errors import MailroomError
from mailroom.figures.keys import inboxes_with_parked
from mailroom.sql.locked import locked_inboxes, reading_locked
from mailroom.sql.runner import run

ATTEMPTS_SHOWN = 20
WHOLE = "(the whole inbox)"
F = TypeVar("F", bound=Callable[..., Any])


def targeted(command: F) -> F:
    """Add --key, --matching and --all; a command that changes parked keys requires one of them."""
    for option in (
        click.option("--all", "every", is_flag=True, help="All parked keys of the inbox."),
        click.option(
            "--matching", metavar="TEXT", type=TEXT, help="The keys whose reason contains TEXT; see the list."
        ),
        click.option("--key", "keys", metavar="K", type=KEY, multiple=True, help="This key; may be repeated."),
    ):
        command = option(command)
    return command


def _target(keys: tuple[str, ...], matching: str | None, every: bool) -> tuple[str, ...] | None:
    if every == bool(keys or matching is not None):
        raise click.UsageError("Say which keys: --key K, --matching TEXT (or both), or --all.")
    return keys or None


@click.group(cls=Group)
def parked() -> None:
    """Show parked keys; replay or discard their messages.

    A message that failed too often parks its key: the message and all later ones of the key are held, in order, until
    an operator acts. Other keys continue. No message of a parked key is reaped.

    \b
    What to do:
      mailroom parked list shipping
      mailroom parked show shipping --key order-42
      mailroom parked replay shipping --key order-42              # once the cause is fixed
      mailroom parked discard shipping --key order-42 --per-key 1 # or delete the bad message for good,
      mailroom parked replay shipping --key order-42              # and continue with the next one
    """


@parked.command("list")
@click.argument("inbox", metavar="[INBOX]", type=INBOX, required=False)
@click.option("--matching", metavar="TEXT", type=TEXT, help="Only keys whose reason contains TEXT.")
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many keys at most, of each inbox.")
@pass_call
def list_(call: Call, inbox: str | None, matching: str | None, limit: int) -> None:
    """List the parked keys of an inbox or of all, the longest parked first.

    Their messages are counted, so this may take a while if there are millions of them. Of all inboxes, those whose
    tables somebody has locked are left out, and it says by whom.

    \b
    Examples:
      mailroom parked list
      mailroom parked list shipping
      mailroom parked list shipping --matching "no such street" --limit 1000
      mailroom parked list shipping --json | jq -r '.[].key'
    """
    with working("counting messages of parked keys"), call.looking("parked list") as connection:
        locked = [] if inbox else run(connection, reading_locked(call.schema))
        but = locked_inboxes(locked)
        inboxes = run(connection, inboxes_with_parked(call.schema)) if inbox is None else [inbox]
        found = [
            (name, each)
            for name in inboxes
            if name not in but
            for each in Parked(name, schema=call.schema).keys(connection, matching=matching, limit=limit)
        ]
    for lock in locked:
        note(f"{lock}. What is there is left out.")
    first = 0 if inbox is None else 1  # the column with the inbox is left out where there is one only
    reason = "" if matching is None else f" whose reason contains {matching!r}"
    print_listing(
        found,
        ("inbox", "key", "messages", "first clock", "attempts", "parked", "reason")[first:],
        lambda each: _row(*each)[first:],
        none=("No inbox has a parked key" if inbox is None else f"Inbox {inbox} has no parked keys") + f"{reason}.",
        json=call.json,
        entry=lambda each: {"inbox": each[0]} | as_json(each[1]),
        numbers=("messages", "first clock", "attempts"),
    )


def _row(inbox: str, parked: ParkedKey) -> tuple[object, ...]:
    return (
        inbox, parked.key or WHOLE, parked.messages, str(parked.clock), parked.attempts, parked.parked_at,
        parked.reason,
    )  # fmt: skip


@parked.command()
@click.argument("inbox", type=INBOX)
@click.option("--key", metavar="K", type=KEY, help="The key; leave it out for a total inbox.")
@click.option("--limit", type=LIMIT, default=10, show_default=True, help="How many messages at most.")
@pass_call
def show(call: Call, inbox: str, key: str | None, limit: int) -> None:
    """Show a parked key, its first messages and its failed attempts; or a parked total inbox.

    The messages are not taken. Attempts are listed newest first; they are kept for 14 days.

    \b
    Examples:
      mailroom parked show shipping --key order-42
      mailroom parked show shipping --key order-42 --limit 100 --json | jq '.messages[].value'
      mailroom parked show ledger                               # an inbox of total order is parked as a whole
    """
    with working("counting messages of the key"), call.looking("parked show") as connection:
        of = Parked(inbox, schema=call.schema)
        messages = of.messages(connection, key, limit)
        found = of.keys(connection, key)
        attempts = of.attempts(connection, key, ATTEMPTS_SHOWN)
    if not found:
        raise _not_parked(inbox, key)
    [state] = found
    if call.json:
        document({"parked": state, "attempts": attempts, "messages": [message_json(each) for each in messages]})
        return
    say(f"{_named(inbox, key)} is parked since {shown(state.parked_at)}, with {counted(state.messages, 'message')}.")
    say(f"Reason: {state.reason}")
    table(("at", "clock", "attempt", "outcome", "error", "recorded by"), map(_cells, attempts), numbers=("clock",))
    print_messages(messages, json=False)


def _cells(attempt: Attempt) -> tuple[object, ...]:
    return attempt.at, str(attempt.clock), attempt.attempt, attempt.outcome, attempt.error, attempt.worker


@parked.command()
@click.argument("inbox", type=INBOX)
@targeted
@click.option("--limit", type=LIMIT, help="How many keys at most, the longest parked first. [all of them]")
@acting
@pass_call
def replay(
    call: Call, inbox: str, keys: tuple[str, ...], matching: str | None, every: bool, limit: int | None, dry_run: bool,
    actor: str, why: str | None,
) -> None:  # fmt: skip
    """Put the messages of parked keys back into the inbox, in order; or let a parked total inbox go on (--all).

    Each key continues with the message that failed, and attempts count from 1 again. A key that fails again is parked
    again, so fix the cause first.

    \b
    Examples:
      mailroom parked replay shipping --key order-42
      mailroom parked replay shipping --matching "connection refused" --limit 10   # try ten of them,
      mailroom parked replay shipping --matching "connection refused"              # then the others
      mailroom parked replay shipping --all --dry-run
    """
    target = _target(keys, matching, every)
    with working("replaying parked keys"), call.connection("parked replay") as connection:
        changed = Parked(inbox, schema=call.schema).replay(
            connection, target, actor=actor, matching=matching, limit=limit, why=why, dry_run=dry_run
        )
    _print_change(call, "replayed", inbox, keys, matching, limit, changed, dry_run=dry_run)


@parked.command()
@click.argument("inbox", type=INBOX)
@targeted
@click.option("--per-key", type=LIMIT, help="Only this many messages of each key, oldest first. [all of them]")
@click.option("--limit", type=LIMIT, help="How many keys at most, the longest parked first. [all of them]")
@acting
@pass_call
def discard(
    call: Call, inbox: str, keys: tuple[str, ...], matching: str | None, every: bool, per_key: int | None,
    limit: int | None, dry_run: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Delete messages of parked keys; or the first messages of a parked total inbox (--all --per-key N).

    A key with no messages left is no longer parked. Any other key stays parked until it is replayed. An inbox that
    keeps what is reaped keeps these too (mailroom archive). Those of any other inbox are gone for good: save them first
    (show --json), and try with --dry-run.

    \b
    Examples:
      mailroom parked discard shipping --key order-42 --per-key 1 --why "sent by mistake"
      mailroom parked discard shipping --matching "no such street" --per-key 1 --dry-run
    """
    target = _target(keys, matching, every)
    with working("discarding messages of parked keys"), call.connection("parked discard") as connection:
        changed = Parked(inbox, schema=call.schema).discard(
            connection, target, actor=actor, matching=matching, per_key=per_key, limit=limit, why=why, dry_run=dry_run
        )
    _print_change(call, "discarded", inbox, keys, matching, limit, changed, dry_run=dry_run)


def _print_change(
    call: Call, done: str, inbox: str, keys: tuple[str, ...], matching: str | None, limit: int | None,
    changed: Changed, *, dry_run: bool,
) -> None:  # fmt: skip
    if not changed.keys and (keys or matching is not None):
        raise _none_chosen(inbox, keys, matching)
    wanted = len(set(keys)) if limit is None else min(limit, len(set(keys)))
    if changed.keys < wanted:
        note(f"Only {changed.keys:,} of the {wanted:,} keys are chosen. See: mailroom parked list {inbox}")
    if call.json:
        document({"keys": changed.keys, "messages": changed.messages, "freed": changed.freed, "dry_run": dry_run})
        return
    would_be = "would be " if dry_run else ""
    say(
        f"{counted(changed.messages, 'message')} of {counted(changed.keys, 'parked key')} {would_be}{done}; "
        f"{counted(changed.freed, 'key')} {would_be}no longer parked."
    )


def _named(inbox: str, key: str | None) -> str:
    return f"Inbox {inbox}" if key is None else f"Key {key}"


def _none_chosen(inbox: str, keys: tuple[str, ...], matching: str | None) -> MailroomError:
    if matching is None and len(keys) == 1:
        return _not_parked(inbox, keys[0])
    among = f" among {', '.join(map(repr, keys))}" if keys else ""
    why = "" if matching is None else f" whose reason contains {matching!r}"
    return MailroomError(
        f"Inbox {inbox} has no parked key{among}{why}. See: mailroom parked list {inbox}", code="MR-not-parked"
    )


def _not_parked(inbox: str, key: str | None) -> MailroomError:
    if key is None:
        return MailroomError(f"Inbox {inbox} is not parked. See: mailroom status", code="MR-not-parked")
    return MailroomError(
        f"Key {key!r} is not parked in inbox {inbox}. See: mailroom parked list {inbox}, or, of keys that are tried "
        f"again, mailroom inbox failing {inbox}",
        code="MR-not-parked",
    )
