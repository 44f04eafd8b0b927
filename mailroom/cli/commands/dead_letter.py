"""`mailroom dead-letter`."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.messages import content_json, content_lines
from mailroom.cli.output import as_json, document, note, print_listing, say, say_whole, shown, working
from mailroom.cli.parameters import INBOX, LIMIT, TEXT, OneOf, WholeNumber
from mailroom.errors import MailroomError
from mailroom.node.dead_letter import DeadLetters, Stage

F = TypeVar("F", bound=Callable[..., Any])


def narrowed(command: F) -> F:
    """Add the options that select dead letters by inbox, stage and a text of their reason."""
    for option in (
        click.option("--inbox", metavar="NAME", type=INBOX, help="Only those that this inbox skipped."),
        click.option("--stage", type=OneOf(get_args(Stage)), help="Only those that failed at this stage."),
        click.option("--matching", metavar="TEXT", type=TEXT, help="Only those whose reason contains TEXT."),
    ):
        command = option(command)
    return command


def targeted(command: F) -> F:
    """Add the ids and options that select dead letters to change; the command needs at least one."""
    for option in (
        click.option("--limit", type=LIMIT, help="How many at most, oldest first. [all]"),
        click.option("--all", "every", is_flag=True, help="All dead letters of the node."),
    ):
        command = option(command)
    return click.argument("ids", metavar="[ID]...", type=WholeNumber(1, 2**63 - 1), nargs=-1)(narrowed(command))


def _target(ids: tuple[int, ...], every: bool, *narrowing: str | None) -> tuple[int, ...] | None:
    if every == bool(ids or any(text is not None for text in narrowing)):
        raise click.UsageError("Say which dead letters: their IDs, --matching, --stage or --inbox, or --all.")
    return ids or None


@click.group("dead-letter", cls=Group)
def dead_letter() -> None:
    """List, show, requeue or discard dead letters.

    A message becomes one if it could not be delivered (stage deliver), or if an inbox skipped it (stage reap): its
    handler raised Skip, or it used up its attempts in an inbox with --on-failure skip. An executable becomes one if it
    could not be applied (stage execute). One from another node becomes one if no inbox gets it (stage receive), or if
    it came too late for a total order (stage order). One of a bridge becomes one if it could not be published (stage
    publish), or if no inbox gets it or its record is not a message (stage take in).

    \b
    What to do:
      mailroom dead-letter list
      mailroom dead-letter show 17
      mailroom dead-letter requeue 17          # once the cause is fixed
      mailroom dead-letter discard 17
    """


@dead_letter.command("list")
@narrowed
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many at most.")
@pass_call
def list_(call: Call, matching: str | None, stage: Stage | None, inbox: str | None, limit: int) -> None:
    """List dead letters, oldest first.

    \b
    Examples:
      mailroom dead-letter list
      mailroom dead-letter list --inbox audit_log --matching ValueError
      mailroom dead-letter list --json | jq -r '.[].message_id'
    """
    with working("reading dead letters"), call.looking("dead-letter list") as connection:
        found = DeadLetters(schema=call.schema).find(
            connection, matching=matching, stage=stage, inbox=inbox, limit=limit
        )
    print_listing(
        found,
        ("id", "failed", "stage", "inbox", "topic", "key", "reason"),
        lambda each: (str(each.id), each.failed_at, each.stage, each.inbox, each.topic, each.key, each.reason),
        none=f"There are no dead letters{_narrowed((), matching, stage, inbox)}.",
        json=call.json,
        numbers=("id",),
    )


@dead_letter.command()
@click.argument("id", type=WholeNumber(1, 2**63 - 1))
@pass_call
def show(call: Call, id: int) -> None:
    """Show one dead letter with its headers and value, or with the parts of an executable.

    \b
    Examples:
      mailroom dead-letter show 17
      mailroom dead-letter show 17 --json | jq .value
    """
    with call.looking("dead-letter show") as connection:
        found = DeadLetters(schema=call.schema).get(connection, id)
    if found is None:
        raise _none(_narrowed((id,)))
    letter, content = found
    if call.json:
        document(as_json(letter) | content_json(content))
        return
    could_not = "could not be executed" if letter.stage == "execute" else "could not be delivered"
    where = could_not if letter.inbox is None else f"was skipped by inbox {letter.inbox}"
    say(f"Dead letter {letter.id} {where} at {shown(letter.failed_at)}: {letter.reason}")
    if letter.attempts is not None:
        say(f"It was tried {counted(letter.attempts, 'time')}, with clock {letter.clock}.")
    say(f"{letter.topic}  key {letter.key}  {shown(letter.sent_at)}  {letter.message_id}")
    say_whole("\n".join(content_lines(content)))


@dead_letter.command()
@targeted
@acting
@pass_call
def requeue(
    call: Call, ids: tuple[int, ...], matching: str | None, stage: Stage | None, inbox: str | None,
    every: bool, limit: int | None, dry_run: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Send dead letters again, ordered by the time of the requeue.

    A message that could not be delivered goes back to the outbox and is routed again; an executable, to the outbox of
    executables. A message that an inbox skipped goes into that inbox only, after the other messages of its key. All
    keep their message ids.

    \b
    Examples:
      mailroom dead-letter requeue 17 18 19
      mailroom dead-letter requeue --matching "no inbox gets this topic" --dry-run
      mailroom dead-letter requeue --inbox audit_log --limit 10 --why "disk was full"
    """
    target = _target(ids, every, matching, stage, inbox)
    with working("requeueing dead letters"), call.connection("dead-letter requeue") as connection:
        number = DeadLetters(schema=call.schema).requeue(
            connection, target, actor=actor, matching=matching, stage=stage, inbox=inbox, limit=limit, why=why,
            dry_run=dry_run,
        )  # fmt: skip
    _tell(call, "requeued", ids, number, _narrowed(ids, matching, stage, inbox), limit, dry_run=dry_run)


@dead_letter.command()
@targeted
@acting
@pass_call
def discard(
    call: Call, ids: tuple[int, ...], matching: str | None, stage: Stage | None, inbox: str | None,
    every: bool, limit: int | None, dry_run: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Delete dead letters for good.

    \b
    Examples:
      mailroom dead-letter discard 17
      mailroom dead-letter discard --matching "no inbox gets this topic" --dry-run
    """
    target = _target(ids, every, matching, stage, inbox)
    with working("discarding dead letters"), call.connection("dead-letter discard") as connection:
        number = DeadLetters(schema=call.schema).discard(
            connection, target, actor=actor, matching=matching, stage=stage, inbox=inbox, limit=limit, why=why,
            dry_run=dry_run,
        )  # fmt: skip
    _tell(call, "discarded", ids, number, _narrowed(ids, matching, stage, inbox), limit, dry_run=dry_run)


def _narrowed(
    ids: tuple[int, ...], matching: str | None = None, stage: str | None = None, inbox: str | None = None
) -> str:
    """Return the choice in words, such as " that inbox audit_log skipped"; empty for all."""
    words = [
        f"of number {', '.join(map(str, ids))}" if ids else "",
        "" if stage is None else f"of stage {stage}",
        "" if inbox is None else f"that inbox {inbox} skipped",
        "" if matching is None else f"whose reason contains {matching!r}",
    ]
    return "".join(f" {each}" for each in words if each)


def _tell(
    call: Call, done: str, ids: tuple[int, ...], number: int, narrowed: str, limit: int | None, *, dry_run: bool
) -> None:
    if narrowed and not number:
        raise _none(narrowed)
    wanted = len(set(ids)) if limit is None else min(limit, len(set(ids)))
    if number < wanted:
        note(f"Only {number:,} of the {wanted:,} dead letters are there. See: mailroom dead-letter list")
    if call.json:
        document({"messages": number, "dry_run": dry_run})
    else:
        say(f"{counted(number, 'dead letter')} {'would be ' if dry_run else ''}{done}.")


def _none(narrowed: str) -> MailroomError:
    return MailroomError(f"There is no dead letter{narrowed}. See: mailroom dead-letter list", code="MR-no-dead-letter")
