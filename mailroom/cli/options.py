"""The options that every command of `mailroom` takes, before the sub-command or after it."""

from typing import get_args

import click
from click.core import ParameterSource

import mailroom
from mailroom.cli.call import Call
from mailroom.cli.help import Context
from mailroom.cli.logs import LogFormat
from mailroom.cli.parameters import OneOf
from mailroom.schema.checks import HEAD
from mailroom.session import settings
from mailroom.values.names import DEFAULT_SCHEMA

LOG_FORMAT_VARIABLE = "MAILROOM_LOG_FORMAT"


def _take(ctx: click.Context, option: click.Parameter, value: object) -> None:
    call = ctx.ensure_object(Call)
    name = option.name or ""
    source = ctx.get_parameter_source(name)
    # An option that is not given here may have been given further left, where it counts more than the environment.
    is_new = source is ParameterSource.ENVIRONMENT and getattr(call, name) is None
    if source is ParameterSource.COMMANDLINE or is_new:
        setattr(call, name, value)


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        from mailroom.links.handshake import wire  # here, since no command needs it to begin

        click.echo(f"mailroom {mailroom.__version__} (schema {HEAD}, wire {wire.VERSION})")
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
    click.Option(
        ["--log-format"],
        type=OneOf(get_args(LogFormat)),
        envvar=LOG_FORMAT_VARIABLE,
        expose_value=False,
        callback=_take,
        show_envvar=True,
        help="The log on stderr: lines of text, or a JSON object a line. [text]",
    ),
    click.Option(["--json"], is_flag=True, expose_value=False, callback=_take, help="Print JSON, for programs."),
    click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_show_version,
        help="Print the versions of Mailroom, its schema and its wire, and exit.",
    ),
)


def share(command: click.Command) -> None:
    """Give shared options and help to a command and its sub-commands, but no option whose name one uses itself."""
    command.context_class = Context
    own = {name for option in command.params for name in option.opts}
    command.params.extend(option for option in SHARED if own.isdisjoint(option.opts))
    if isinstance(command, click.Group):
        for sub_command in command.commands.values():
            share(sub_command)
