"""`mailroom doctor`: what is wrong with a node now, and the command that helps."""

from dataclasses import fields
from typing import Any

import click
import psycopg

from mailroom.cli.call import Call, pass_call
from mailroom.cli.failures import tell
from mailroom.cli.output import document, facts, say
from mailroom.doctor.examining import POOLED, examine
from mailroom.doctor.finding import Finding, Limits
from mailroom.doctor.kinds import KINDS
from mailroom.errors import MailroomError
from mailroom.session import settings
from mailroom.sql.pooler import is_pooled

FOUND, NOT_LOOKED = 1, 2


OPTIONS: list[click.Parameter] = [
    click.Option(
        [f"--{each.name.replace('_', '-')}"],
        type=each.type,
        default=each.default,
        show_default=True,
        help=f"Limit: {each.metadata['means']}.",
    )
    for each in fields(Limits)
]


@click.command(params=OPTIONS)
@pass_call
def doctor(call: Call, /, **limits: Any) -> None:
    """Look for what is wrong with a node now.

    It looks at transactions that keep VACUUM from its work, locks, VACUUM itself, indexes, partitions and triggers,
    sequences and the clock, leaders and workers, the server's settings, rights, parked keys and dead letters. It reads
    the server's catalogs and a few rows, writes nothing, and waits for no lock for longer than 0.1 s.

    Each finding has an id, such as M001, the evidence, and a command that helps: one for a shell, or SQL, which ends
    in a semicolon. Read what it means before you run it: mailroom explain M001.

    Exit codes: 0 nothing was found, 1 something was found, 2 it could not look at all. If some checks may not look,
    that is a finding too (M000).

    \b
    Examples:
      mailroom doctor
      mailroom doctor --snapshot-s 60 --json | jq -r '.[].id'
    """
    try:
        findings = _examined(call, Limits(**limits))
    except (MailroomError, psycopg.Error) as error:
        tell(error, call)
        click.get_current_context().exit(NOT_LOOKED)
    if call.json:
        document(findings)
    else:
        _show(findings)
    click.get_current_context().exit(FOUND if findings else 0)


def _examined(call: Call, limits: Limits) -> list[Finding]:
    # Not the connection of other commands: that one refuses the schema of another release, and hidden rows.
    with settings.connect(call.dsn(), "doctor") as connection:
        findings = examine(connection, schema=call.schema, limits=limits)
        connection.rollback()
        if is_pooled(connection):
            line = "start-up options are refused, or the process id is not the server's"
            findings.append(
                Finding(POOLED, KINDS[POOLED].what, (line,), "mailroom doctor --dsn postgresql://SERVER:5432/DATABASE")
            )
    return sorted(findings, key=lambda each: each.id)


def _show(findings: list[Finding]) -> None:
    if not findings:
        say("Nothing found.")
    for nth, each in enumerate(findings):
        if nth:
            say("")
        facts([(each.id, each.what), *(("", line) for line in each.evidence), ("run:", each.command)])
    if findings:
        say("")
        say(f"What it means: mailroom explain {findings[0].id}")
