"""The root of the command: collects its sub-commands from entry points and ends every call in one way."""

import io
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, packages_distributions
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from mailroom.cli.call import Call
from mailroom.cli.failures import Interrupted, tell
from mailroom.cli.group import Group
from mailroom.cli.options import share
from mailroom.errors import ConfigurationError, MailroomError
from mailroom.packages.installed import declared, is_hidden, load, sole

GROUP = "mailroom.commands"
# Commands that are distributions of their own, and the extra that brings each.
EXTRAS = {"bench": "bench"}
# The first sentences of our commands' own texts, so that listing them imports none of them: that took a second.
ABOUT = {
    "archive": "Find what was reaped from an inbox that keeps it, and replay it.",
    "asyncapi": "Print an AsyncAPI 3.0 document of typed topics and of this node's bridges, as JSON.",
    "audit": "Show who changed what by hand, and why, the newest first.",
    "bench": "Measure Mailroom on this machine and compare it with the limits of the machine.",
    "bridge": "Publish messages to other brokers, and take in messages from them.",
    "completion": "Print a script that lets a shell complete commands and options.",
    "dashboard": "Show a node in a browser, and act on it there.",
    "dead-letter": "List, show, requeue or discard dead letters.",
    "demo": "Send real flights through Mailroom, kill parts of it midway, and check that nothing went wrong.",
    "dispatcher": "Deliver committed messages into inboxes.",
    "doctor": "Look for what is wrong with a node now.",
    "embedded": "Keep a PostgreSQL of your own running, to try things out without a server.",
    "executor": "Run executables, and register what they may reach.",
    "explain": "Print what an error's CODE, or a finding of the doctor, means and what to do.",
    "grant": "Give a database role what it needs for a purpose, or for several, and nothing else.",
    "health": "Ask a process of this machine whether it is ready: a dispatcher, an executor or workers with --metrics.",
    "inbox": "Create inboxes and subscribe them, show their messages, and reap from a shell.",
    "link": "Read messages of nodes in other databases, and let those nodes read this one's.",
    "log": "Create logs, whose messages are written once and read by many inboxes.",
    "migrate": "Create the schema of a node, or bring it up to date.",
    "node": "Say who this node is to the others.",
    "outbox": "Send messages from a shell, and cancel them.",
    "parked": "Show parked keys; replay or discard their messages.",
    "periodic": "Send messages at the times of a cron expression.",
    "revoke": "Take from a database role what it needs for a purpose.",
    "statistics": "Show what workers and the dispatcher did in the last minutes: counts, and how old messages became.",
    "status": "Show the status of a node.",
    "tail": "Show messages as they are delivered into an inbox, without taking them, until Ctrl-C.",
    "top": "Show a node live: rates, what waits, what is in trouble, who works, and what failed last.",
    "trace": "Tell where a message is, what caused it and what it caused, by its id; or find the messages of a key.",
    "unwatch": "Stop sending messages about a table.",
    "watch": "Send a message for each row of a table that is inserted, updated or deleted.",
    "worker": "Run services that reap an inbox, and list those that run.",
}


class Root(Group):
    """The group whose sub-commands are the entry points of `mailroom.commands`; each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the sub-commands, whether they can be imported or not."""
        return sorted(self._entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a sub-command; if it cannot be imported, return a command that says why."""
        found = self._entry_points().get(cmd_name)
        if found is None:
            return _of_extra(cmd_name, EXTRAS[cmd_name]) if cmd_name in EXTRAS else None
        try:
            sole(declared(GROUP), cmd_name, "MR-command-unavailable")
            command: click.Command = load(found)
        except Exception as error:  # if one package is broken, the others stay usable
            return _missing(cmd_name, _explained(cmd_name, found, error))
        share(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a sub-command, or an option. No sub-command is imported for that."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=ABOUT.get(name)) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sub-commands. Only one of another distribution, or one that is hidden, is imported for that."""
        names = self.list_commands(ctx)
        room = formatter.width - 6 - max(map(len, names), default=0)
        rows = [(name, self._about(ctx, name, room)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _about(self, ctx: click.Context, name: str, room: int) -> str:
        found = self._entry_points()[name]
        if name in ABOUT and not is_hidden(found):
            return click.Command(name, help=ABOUT[name]).get_short_help_str(room)
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(room)

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {found.name: found for found in declared(GROUP)}

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Here and not in `main`, since click would print a line of its own before that.
            raise Interrupted("interrupted") from None

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]  # always exits
        """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
        call = Call()
        try:
            code = super().main(args, prog_name, **{**extra, "standalone_mode": False, "obj": call})
        except Exception as error:
            code = tell(error, call)
        sys.exit(code if isinstance(code, int) else 0)


def _of_extra(name: str, extra: str) -> click.Command:
    text = f"`mailroom {name}` is not installed. Run: pip install 'pg-mailroom[{extra}]'"
    return _missing(name, ConfigurationError(text, code="MR-command-unavailable"))


def _explained(name: str, found: EntryPoint, error: Exception) -> MailroomError:
    if isinstance(error, MailroomError):
        return error
    return MailroomError(
        f"`mailroom {name}` is not available here: {_reason(found, error)}", code="MR-command-unavailable"
    )


def _missing(name: str, error: MailroomError) -> click.Command:
    def fail(**_: object) -> None:
        raise error

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        short_help="(not available here)",
    )


def _reason(found: EntryPoint, error: Exception) -> str:
    distribution = found.dist.name if found.dist else "pg-mailroom"
    package = found.module.partition(".")[0]
    if others := sorted({*packages_distributions().get(package, ())} - {distribution}):
        return (
            f"its package {package} was installed by {', '.join(others)} too ({error}). Uninstall that, and run: "
            f"pip install --force-reinstall --no-deps {distribution}"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"there is no module {error.name!r}. Install what it needs: pip install {distribution}"
    return f"{type(error).__name__}: {error}"


@click.command("mailroom", cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def root() -> None:
    """Transactional messaging inside PostgreSQL.

    Writers commit messages into an outbox, a dispatcher delivers them into inboxes, consumers reap them in order,
    exactly once.

    \b
    Try it:
      export MAILROOM_DSN=postgresql://user@host/database     # a server of yours, or one that is started for you:
      export MAILROOM_DSN=$(mailroom embedded dsn)            # needs pip install 'pg-mailroom[embedded]'
      mailroom migrate
      mailroom inbox create shipping --subscribe order.paid
      mailroom outbox send order.paid --key order-42 --value '{"state": "paid"}'
      mailroom dispatcher deliver-all                         # or leave `mailroom dispatcher run` running
      mailroom inbox reap shipping --key order-42
      mailroom status

    The options below may be given before or after the sub-command. Exit codes: 0 done, 1 failed, 2 wrong usage (the
    command line cannot be right, whatever the database contains).
    """


share(root)


def main() -> None:
    """Run the command `mailroom` with the arguments of this process, and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal may lack some characters of a text for people; JSON is ASCII anyway.
        sys.stdout.reconfigure(errors="backslashreplace")
    root(prog_name="mailroom")
