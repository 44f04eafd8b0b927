"""`mailroom statistics`."""

import click

from mailroom import metrics
from mailroom.cli.call import Call, pass_call
from mailroom.cli.output import document, duration, say, table
from mailroom.cli.parameters import INBOX, WholeNumber
from mailroom.metrics.by_minute import MOST_M, InboxStatistics, MinuteStatistics

COUNTS = ("delivered", "reaped", "batches", "failed", "parked", "skipped")
NUMBERS = (*COUNTS, "handling", "age p50", "age p99")


@click.command()
@click.option("--inbox", metavar="INBOX", type=INBOX, help="Show the minutes of this inbox. [the sum of each inbox]")
@click.option(
    "--since-m", type=WholeNumber(1, MOST_M), default=60, show_default=True, help="Of this many minutes until now."
)
@pass_call
def statistics(call: Call, inbox: str | None, since_m: int) -> None:
    """Show what workers and the dispatcher did in the last minutes: counts, and how old messages became.

    Processes that run with --statistics write it once a minute, and it is kept for 48 hours: at most 2,880 minutes. The
    line (all) has what the dispatcher delivered; the others are inboxes in which something happened. Failed counts
    attempts, of which some parked their key or skipped their message. Handling is how long handlers took together. Half
    of the messages were reaped before the age p50 since they were sent, 99 % before the age p99.

    \b
    Examples:
      mailroom statistics
      mailroom statistics --inbox shipping --since-m 15
      mailroom statistics --since-m 2880 --json | jq '.[] | {inbox, reaped, age_p99_s}'
    """
    with call.looking("statistics") as connection:
        found: list[InboxStatistics] | list[MinuteStatistics]
        if inbox is None:
            found = metrics.statistics(connection, since_m=since_m, schema=call.schema)
        else:
            found = metrics.minute_statistics(connection, inbox, since_m=since_m, schema=call.schema)
    if call.json:
        document([each._asdict() for each in found])
    elif not found:
        say(
            "Nothing was recorded. Processes that run with --statistics (MAILROOM_STATISTICS=1) write what happens: "
            "mailroom worker run, mailroom dispatcher run"
        )
    else:
        of = "inbox" if inbox is None else "minute"
        table((of, *NUMBERS), map(_row, found), numbers=NUMBERS)


def _row(each: InboxStatistics | MinuteStatistics) -> list[object]:
    of = each.minute if isinstance(each, MinuteStatistics) else each.inbox or "(all)"
    return [
        of,
        *(getattr(each, name) for name in COUNTS),
        *(None if s is None else duration(s) for s in (each.handle_s, each.age_p50_s, each.age_p99_s)),
    ]
