"""The options that every command of `mailroom` takes, before the sub-command or after it."""

import click
from click.core import ParameterSource

import mailroom
from mailroom.cli.call import Call
from mailroom.names import DEFAULT_SCHEMA
from mailroom.session import settings


def _take(ctx: click.Context, option: click.Parameter, value: object) -> None:
    call = ctx.ensure_object(Call)
    # An option that is not given here may have been given further left.
    if option.name is not None and ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
        setattr(call, option.name, value)


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"mailroom {mailroom.__version__}")
        ctx.exit()


SHARED = (
    click.Option(
        ["--dsn", "given_dsn"],
        metavar="DSN",
        expose_value=False,
        callback=_take,
        help=f"The database: a URL or libpq's key=value form. Else {settings.DSN_VARIABLE}, else PGHOST, PGDATABASE...",
    ),
    click.Option(
        ["--schema", "given_schema"],
        metavar="NAME",
        expose_value=False,
        callback=_take,
        help=f"The node's schema in it; {DEFAULT_SCHEMA} if not given.",
    ),
    click.Option(
        ["--embedded"],
        is_flag=True,
        expose_value=False,
        callback=_take,
        help="Use the embedded PostgreSQL in your data directory; it is started if necessary.",
    ),
    click.Option(["--json"], is_flag=True, expose_value=False, callback=_take, help="Print JSON, for programs."),
    click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_show_version,
        help="Print the version and exit.",
    ),
)


def share(command: click.Command) -> None:
    """Give the shared options to a command and its sub-commands, except where one uses the name for itself."""
    own = {name for option in command.params for name in option.opts}
    command.params.extend(option for option in SHARED if own.isdisjoint(option.opts))
    if isinstance(command, click.Group):
        for sub_command in command.commands.values():
            share(sub_command)
