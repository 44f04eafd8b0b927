"""`mailroom inbox failing` and `mailroom inbox retry`."""

import click

from inbox.failing import FailingKeys
from mailroom.cli.acting import acting, counted
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, print_listing, say, working
from mailroom.cli.parameters import INBOX, KEY, LIMIT, TEXT
from mailroom.errors import MailroomError
from mailroom.figures.failing_keys import FailingError, FailingKey, reading_errors, reading_failing
from mailroom.schema import finding
from mailroom.sql.runner import run

WHOLE = "(the whole inbox)"


@click.command()
@click.argument("name", metavar="[NAME]", type=INBOX, required=False)
@click.option("--by-error", is_flag=True, help="Count keys by their error instead of listing them.")
@click.option("--error", metavar="TEXT", type=TEXT, help="Only keys that fail with this error; see --by-error.")
@click.option("--matching", metavar="TEXT", type=TEXT, help="Only keys whose reason contains TEXT.")
@click.option("--limit", type=LIMIT, default=100, show_default=True, help="How many keys or errors at most.")
@pass_call
def failing(call: Call, name: str | None, by_error: bool, error: str | None, matching: str | None, limit: int) -> None:
    """List the failing keys of an inbox or of all: those that are tried again. `mailroom parked list` has the others.

    The key that is tried next is first. `since` is when its message first failed. With --by-error keys are counted by
    their error, the most first: that is the class of what was raised, as the reason has it before its first colon.
    `waiting` are those that `mailroom inbox retry` would have tried at once. Of each inbox 100,000 keys are looked
    through for that.

    \b
    Examples:
      mailroom inbox failing
      mailroom inbox failing --by-error
      mailroom inbox failing shipping --error ConnectionError --limit 1000
      mailroom inbox failing shipping --json | jq -r '.[].key'
    """
    if by_error and error is not None:
        raise click.UsageError("--by-error lists all errors: leave --error out.")
    with working("reading failing keys"), call.looking("inbox failing") as connection:
        if name is not None:
            run(connection, finding(call.schema, name))
        if by_error:
            errors = run(connection, reading_errors(call.schema, name, matching=matching, limit=limit))
        else:
            keys = run(connection, reading_failing(call.schema, name, matching=matching, error=error, limit=limit))
    of = "No inbox has a failing key" if name is None else f"Inbox {name} has no failing key"
    none = f"{of}{'' if matching is None and error is None else ' that is chosen by this'}."
    first = 0 if name is None else 1  # the column with the inbox is left out where there is one only
    if by_error:
        print_listing(
            errors, ("inbox", "error", "keys", "waiting", "attempts", "next try", "such as")[first:],
            lambda each: _error_cells(each)[first:], none=none, json=call.json, numbers=("keys", "waiting", "attempts"),
        )  # fmt: skip
        return
    print_listing(
        keys, ("inbox", "key", "attempts", "since", "next try", "reason")[first:], lambda each: _cells(each)[first:],
        none=none, json=call.json, numbers=("attempts",),
    )  # fmt: skip


def _cells(each: FailingKey) -> tuple[object, ...]:
    return each.inbox, each.key or WHOLE, each.attempts, each.since, each.retry_at, each.reason


def _error_cells(each: FailingError) -> tuple[object, ...]:
    return each.inbox, each.error, each.keys, each.waiting, each.attempts, each.retry_at, each.reason


@click.command()
@click.argument("name", type=INBOX)
@click.option("--key", "keys", metavar="K", type=KEY, multiple=True, help="This key; may be repeated.")
@click.option("--error", metavar="TEXT", type=TEXT, help="The keys that fail with this error.")
@click.option("--matching", metavar="TEXT", type=TEXT, help="The keys whose reason contains TEXT.")
@click.option("--all", "every", is_flag=True, help="All failing keys of the inbox.")
@click.option("--limit", type=LIMIT, help="How many keys at most, those that are tried next first. [all of them]")
@acting
@pass_call
def retry(
    call: Call, name: str, keys: tuple[str, ...], error: str | None, matching: str | None, every: bool,
    limit: int | None, dry_run: bool, actor: str, why: str | None,
) -> None:  # fmt: skip
    """Have failing keys tried at once, instead of after their backoff.

    Attempts count on, so fix the cause first: a key whose last attempt fails is parked. Keys that are due already,
    parked or paused are left as they are, and so are those that wait for the breaker of their prefix (mailroom inbox
    resume). While the inbox is paused, or its breaker open, nothing is tried.

    \b
    Examples:
      mailroom inbox retry shipping --key order-42
      mailroom inbox retry shipping --error ConnectionError --limit 10   # try ten of them,
      mailroom inbox retry shipping --error ConnectionError              # then the others
      mailroom inbox retry shipping --all --dry-run
    """
    if every == bool(keys or error is not None or matching is not None):
        raise click.UsageError("Say which keys: --key K, --error TEXT, --matching TEXT, or --all.")
    with working("having keys tried"), call.connection("inbox retry") as connection:
        found = FailingKeys(name, schema=call.schema).retry(
            connection, keys or None, actor=actor, matching=matching, error=error, limit=limit, why=why,
            dry_run=dry_run,
        )  # fmt: skip
    if not found and not every:
        raise MailroomError(
            f"Inbox {name} has no failing key among these that waits for its next attempt. See: mailroom inbox failing "
            f"{name}",
            code="MR-not-failing",
        )
    if call.json:
        document({"inbox": name, "keys": found, "dry_run": dry_run})
        return
    say(f"{counted(len(found), 'key')} {'would be' if dry_run else 'will be'} tried at once.")
