"""The `mailroom` command: its root, what all sub-commands share, and those that belong to no other package.

A package adds a command by an entry point of the group `mailroom.commands`: any click command. It gets the shared
options from the root and what they chose by `@pass_call`.
"""

from mailroom.cli.call import Call, pass_call
from mailroom.cli.root import main

__all__ = ["Call", "main", "pass_call"]
