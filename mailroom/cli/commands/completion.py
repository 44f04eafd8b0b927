"""`mailroom completion`."""

import click
from click.shell_completion import get_completion_class

from mailroom.cli.parameters import OneOf

PROGRAM, VARIABLE = "mailroom", "_MAILROOM_COMPLETE"


@click.command()
@click.argument("shell", type=OneOf(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that lets a shell complete commands and options. It asks no database.

    bash needs version 4.4 or later.

    \b
    Examples, for where your shell starts:
      eval "$(mailroom completion bash)"              # in ~/.bashrc
      eval "$(mailroom completion zsh)"               # in ~/.zshrc, after compinit
      mailroom completion fish | source               # in ~/.config/fish/config.fish
    """
    found = get_completion_class(shell)
    assert found is not None  # noqa: S101  # click has all three
    # Not `source`, which for bash runs the first bash of the PATH, to warn of an old one.
    made = found(ctx.find_root().command, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())
