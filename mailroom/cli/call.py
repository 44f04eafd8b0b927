"""One call of `mailroom`: the values of the options that every command shares."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import click
import psycopg
from psycopg import conninfo

from mailroom import schema as node
from mailroom.cli.logs import LogFormat
from mailroom.embedded import embedded_server
from mailroom.errors import ConfigurationError
from mailroom.session import settings
from mailroom.sql.locked import LOCK_TIMEOUT, reading_locked
from mailroom.sql.runner import run
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

# For commands that look: they wait for no lock for long, and say who has it.
LOOKING = settings.SESSION | {"lock_timeout": LOCK_TIMEOUT}


@dataclass
class Call:
    """The node that the shared options name (a database and a schema), and the form of its output and its log."""

    given_dsn: str | None = None
    given_schema: str | None = None
    embedded: bool = False
    json: bool = False
    log_format: LogFormat | None = None
    _dsn: str | None = None
    _context: click.Context | None = None

    @property
    def schema(self) -> str:
        """The schema, checked."""
        return schema_name(self.given_schema or DEFAULT_SCHEMA)

    @property
    def names_database(self) -> bool:
        """Whether the call itself says which database, rather than leaving it to the environment."""
        return self.embedded or self.given_dsn is not None

    @property
    def has_database(self) -> bool:
        """Whether the call or its environment says which database."""
        variables = (settings.DSN_VARIABLE, *settings.LIBPQ_VARIABLES)
        return self.names_database or any(os.environ.get(variable) for variable in variables)

    def dsn(self, *, embedded_by_default: bool = False) -> str:
        """Return the connection string; raises `ConfigurationError` if nothing names a database.

        With `--embedded` the user's embedded server is started, and used until the command ends. With
        `embedded_by_default` a command, such as the demo, uses that server also if nothing names a database.
        """
        if self.embedded and self.given_dsn is not None:
            raise ConfigurationError(
                "--dsn and --embedded name two databases: give one of them.", code="MR-two-databases-named"
            )
        self._context = click.get_current_context(silent=True)
        if self._dsn is None:
            embedded = self.embedded or (embedded_by_default and not self.has_database)
            self._dsn = self._started() if embedded else settings.dsn(self.given_dsn)
        return self._dsn

    @property
    def user(self) -> str | None:
        """The database user of the call; None before it has a connection string."""
        if self._dsn is None:
            return None
        # If the connection string names no user, libpq takes it from its environment, or else from the account.
        default = next(option.val for option in psycopg.pq.Conninfo.get_defaults() if option.keyword == b"user")
        user = conninfo.conninfo_to_dict(self._dsn).get("user") or (default or b"").decode()
        return str(user) or None

    @property
    def command(self) -> str:
        """The words of the command that asked for the connection string, without `mailroom`; empty before it does."""
        return "" if self._context is None else self._context.command_path.partition(" ")[2]

    @property
    def inbox(self) -> str | None:
        """The inbox that the command was given, if it was given one."""
        given = {} if self._context is None else self._context.params
        found = given.get("inbox") or (given.get("name") if self.command.startswith("inbox ") else None)
        return found if isinstance(found, str) else None

    @contextmanager
    def connection(
        self, role: str, session: Mapping[str, str] = settings.SESSION, *, autocommit: bool = False
    ) -> Iterator[psycopg.Connection]:
        """Connect to the node and check its schema; commits at the end, rolls back on an error.

        If a lock kept it waiting for too long, its error has a note who has one that keeps readers out.
        """
        try:
            with settings.connect(self.dsn(), role, session, autocommit=autocommit) as connection:
                node.check(connection, schema=self.schema)
                yield connection
        except psycopg.errors.LockNotAvailable as error:
            with settings.connect(self.dsn(), role, session) as connection:
                for each in run(connection, reading_locked(self.schema)):
                    error.add_note(f"{each}.")
            raise

    def looking(self, role: str, *, autocommit: bool = False) -> AbstractContextManager[psycopg.Connection]:
        """Return a `connection` for a command that only looks: it waits for no lock for long."""
        return self.connection(role, LOOKING, autocommit=autocommit)

    def _started(self) -> str:
        return click.get_current_context().find_root().with_resource(embedded_server()).dsn()


pass_call = click.make_pass_decorator(Call, ensure=True)
