"""The options of commands that change something by hand: who acts, why, and whether to act at all."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import click

from mailroom.cli.parameters import checked
from mailroom.schema.audit import check_actor, person

ACTOR = checked(lambda text: check_actor(text, None))
WHY = checked(lambda text: check_actor("somebody", text))
F = TypeVar("F", bound=Callable[..., Any])

# The commands say themselves that nothing was chosen. Without any handler Python would print the warning, too.
logging.getLogger("mailroom.choice").addHandler(logging.NullHandler())


def answering(command: F) -> F:
    """Add --actor and --why to a command that changes something and gives up nothing."""
    for option in (
        click.option("--why", metavar="TEXT", type=WHY, help="Why, for the audit."),
        click.option(
            "--actor", metavar="NAME", type=ACTOR, default=person, help="Who acts, for the audit. [you, as user@host]"
        ),
    ):
        command = option(command)
    return command


def acting(command: F) -> F:
    """Add --dry-run, --actor and --why to a command that changes something."""
    return click.option("--dry-run", is_flag=True, help="Change nothing; show what would be done.")(answering(command))


def counted(number: int, what: str) -> str:
    """Return a number with its noun: 1 message, 2,000 messages."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
