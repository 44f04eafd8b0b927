"""docs/reference/cli.md, made from what the commands say of themselves: `python -m tests.cli_reference` writes it.

In a process of its own: click keeps a command's option for help as whoever asked first has made it, and tests call
commands without those that they belong to. With `--print` it is printed, for the test.
"""

import sys
from collections.abc import Iterator
from typing import Any

import click

from mailroom.cli.options import SHARED
from mailroom.cli.root import root
from tests.support.pages import page_named

PAGE = page_named("cli.md")
WIDTH = 100
INTRODUCTION = """\
# The command line

What each command says with `--help`, without the options that all of them take: those are listed once, with
[`mailroom`](#mailroom). This page is made by `python -m tests.cli_reference`; a test fails when it is out
of date.
"""


def reference() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *_sections(root, None, "mailroom")])


def _sections(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    for option in SHARED:  # it is the same object in all commands
        option.hidden = parent is not None
    text = command.get_help(context)
    assert "(not available here)" not in text, f"{context.command_path}: a command cannot be imported"
    assert parent is None or "--schema NAME" not in text
    yield f"## {context.command_path}\n\n```text\n{text.rstrip()}\n```\n"
    if isinstance(command, click.Group):
        for sub_name in command.list_commands(context):
            sub_command = command.get_command(context, sub_name)
            assert sub_command is not None
            yield from _sections(sub_command, context, sub_name)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(reference())
    else:
        PAGE.write_text(reference())
