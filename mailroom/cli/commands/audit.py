"""`mailroom audit`."""

import click

from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import print_listing
from mailroom.cli.parameters import INBOX, KEY, LIMIT
from mailroom.figures.audit import Audited, reading_audit
from mailroom.sql.runner import run


@click.command()
@click.option("--inbox", metavar="INBOX", type=INBOX, help="Only what was done to this inbox.")
@click.option("--key", metavar="K", type=KEY, help="Only what was done to this key, or to what has this name.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many acts at most.")
@pass_call
def audit(call: Call, inbox: str | None, key: str | None, limit: int) -> None:
    """Show who changed what by hand, and why, the newest first.

    Each act has the words of its command, whether it came from there, from Python or from the dashboard: replays,
    discards, pauses, settings, links, grants, migrations. They are kept for 400 days. An inbox that was dropped since
    is found, too.

    \b
    Examples:
      mailroom audit
      mailroom audit --inbox shipping --key order-42
      mailroom audit --limit 1000 --json | jq '.[] | select(.actor == "ann@desk")'
    """
    with call.looking("audit") as connection:
        found = run(connection, reading_audit(call.schema, limit=limit, inbox=inbox, key=key))
    print_listing(
        found, ("at", "who", "did", "inbox", "key", "messages", "changed", "why"), _cells,
        none="Nothing was done by hand.", json=call.json, numbers=("messages",),
    )  # fmt: skip


def _cells(each: Audited) -> tuple[object, ...]:
    return each.at, each.actor, each.action, each.inbox, each.key, each.messages, each.change, each.reason
