"""The options of the settings of an inbox, made of their declarations."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mailroom.cli.parameters import Number, OneOf, WholeNumber
from mailroom.errors import MailroomError, coded
from mailroom.registry.settings import SETTINGS, InboxSettings, Setting, given_settings

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(command: F) -> F:
    """Add an option for each setting, which is None unless it is given."""
    for name, setting in reversed(list(SETTINGS.items())):
        option = f"--{name.replace('_', '-')}"
        command = click.option(option, name, type=_type(setting), metavar=setting.metavar, help=setting.help)(command)
    return command


def _type(setting: Setting) -> click.ParamType[Any] | type[str]:
    if not setting.bounds:
        return str
    if setting.type == "text":
        return OneOf(list(setting.bounds))
    return (WholeNumber if setting.type == "bigint" else Number)(*setting.bounds)


def check_settings(settings: InboxSettings) -> None:
    """Raise `UsageError` for settings that no inbox can have together."""
    try:
        given_settings(settings)
    except MailroomError as error:
        raise click.UsageError(coded(str(error), error)) from None
