"""The node that a Spark job uses: each process of the cluster connects by itself, and no option holds a password."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar
from uuid import UUID

import psycopg
from psycopg import conninfo

from mailroom import schema
from mailroom.errors import ConfigurationError
from mailroom.session import settings
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.pooler import PooledConnection
from mailroom.sql.runner import run
from mailroom.values.names import DEFAULT_SCHEMA, schema_name, shown
from outbox.bulk import table_in
from spark_jobs.seen import Seen, demand_the_same, seeing

# Statements take as long as there is data, and a stream's session idles until something comes, whatever limits the role
# or the database has. But no session waits for locks for ever.
JOB_SESSION = settings.SESSION | {
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "60s",
    "idle_in_transaction_session_timeout": "10min",
}
# Set after the connect: servers before PostgreSQL 17 would refuse a session that begins with it.
TRANSACTION_TIMEOUT = ("transaction_timeout", "0")
# Statements of users run with the search_path of their role, and their tables may have policies; ours are written for
# any.
AS_THE_ROLE = {name: value for name, value in JOB_SESSION.items() if name not in ("search_path", "row_security")}


@dataclass(frozen=True, slots=True)
class Node:
    """A schema in a database. This is sent to executors, without a password: each process finds its own.

    Staging tables stand in the schema `staging` of that database; None: in the node's. `seen` is what the driver saw
    of it: then each process that connects makes sure that it sees the same.
    """

    schema: str = DEFAULT_SCHEMA
    dsn: str | None = None
    variable: str = settings.DSN_VARIABLE
    staging: str | None = None
    seen: Seen | None = None

    OPTIONS: ClassVar[tuple[str, ...]] = ("dsn", "dsnVariable", "schema")

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Node":
        """Read the options of a data source: `schema`, `stagingSchema`, and `dsn` or `dsnVariable` for the database.

        `dsn` is a connection string without a password, such as `service=orders`; `dsnVariable` names an environment
        variable of driver and executors that holds one (MAILROOM_DSN if neither is given, then libpq's own
        environment). Raises `ConfigurationError` for a `dsn` with a password: Spark shows options in plans and logs.
        """
        dsn, variable, staging = options.get("dsn"), options.get("dsnVariable"), options.get("stagingSchema")
        if dsn is not None and variable is not None:
            raise ConfigurationError(
                "The options dsn and dsnVariable name two databases: give one of them.", code="MR-two-databases-named"
            )
        return cls(
            schema_name(options.get("schema", DEFAULT_SCHEMA)),
            None if dsn is None else without_password(dsn),
            variable or settings.DSN_VARIABLE,
            None if staging is None else schema_name(staging),
        )

    def table(self, token: UUID) -> str:
        """Return the name of a staging table, as SQL has it."""
        return table_in(self.staging or self.schema, token)

    def connection_string(self) -> str:
        """Return the connection string for this process. Raises `ConfigurationError` when nothing names a database."""
        if self.dsn is not None:
            return self.dsn
        if self.variable == settings.DSN_VARIABLE:
            return settings.dsn()
        text = os.environ.get(self.variable)
        if not text:
            raise ConfigurationError(
                f"The environment variable {self.variable} is not set here. Set it for the driver and for the "
                f"executors (spark.executorEnv.{self.variable}; Spark hides its value only if the name holds SECRET or "
                "PASSWORD).",
                code="MR-spark-variable-not-set",
            )
        return settings.dsn(text)

    def connect(
        self, role: str, *, autocommit: bool = False, session: Mapping[str, str] = JOB_SESSION
    ) -> psycopg.Connection:
        """Open a session for `role`, shown as application_name.

        Raises `ConnectionFailed`, and `ConfigurationError` if it does not see what the driver has seen.
        """
        connection = settings.connect(self.connection_string(), f"spark {role}", session, autocommit=True)
        if connection.info.server_version >= 170_000:
            if isinstance(connection, PooledConnection):
                connection.settings = {**session, **dict([TRANSACTION_TIMEOUT])}
            else:
                connection.execute("SELECT set_config(%s, %s, false)", TRANSACTION_TIMEOUT)
        if self.seen is not None:
            with contextlib.ExitStack() as unless_the_same:
                unless_the_same.callback(connection.close)
                demand_the_same(connection, self.schema, self.seen)
                unless_the_same.pop_all()
        connection.autocommit = autocommit
        return connection

    def pinned(self, connection: psycopg.Connection | None = None) -> "Node":
        """Return the node for tasks: a process that connects to it elsewhere has to see what this one sees now.

        Looked up over `connection`, or one of its own. Raises as `check` does.
        """
        if connection is None:
            with self.connect("check", autocommit=True) as own:
                return self.pinned(own)
        seen, _ = run(connection, seeing(self.schema))
        return replace(self, seen=seen)

    def check(self) -> "Node":
        """Return the node `pinned`, if it exists and fits.

        Raises `ConfigurationError`, `ConnectionFailed` or `SchemaError`.
        """
        with self.connect("check", autocommit=True) as connection:
            schema.check(connection, schema=self.schema)
            if self.staging is not None and not run(connection, _may_stage(self.staging)):
                raise ConfigurationError(
                    f"The role cannot stage in the schema {self.staging}. Run, after CREATE SCHEMA where there is "
                    f"none: mailroom grant spark-writer ROLE --staging-schema {self.staging}",
                    code="MR-spark-staging-rights",
                )
            return self.pinned(connection)


MAY_STAGE = Sql(
    "SELECT has_schema_privilege(oid, 'USAGE') AND has_schema_privilege(oid, 'CREATE') "
    "FROM pg_catalog.pg_namespace WHERE nspname = %(name)s::text",
    columns=("boolean",),
)


def _may_stage(name: str) -> Operation[bool]:
    return bool((yield MAY_STAGE.at()(name=name)) == [(True,)])


def without_password(dsn: str) -> str:
    """Return the connection string if it holds no password, else raise `ConfigurationError`."""
    text = settings.dsn(dsn)
    if settings.secrets() & conninfo.conninfo_to_dict(text).keys():
        raise ConfigurationError(
            "The option dsn holds a password, or other credentials, which Spark would show in plans and logs. Leave it "
            "out and let PGPASSWORD, a passfile or a service file of libpq have it, or name an environment variable "
            "that holds the whole connection string: option dsnVariable.",
            code="MR-password-shown",
        )
    return text


def demand_known(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise `ConfigurationError` for an option that is none of `known`: a misspelt one would silently do nothing."""
    names = tuple(known)
    lowered = {name.lower() for name in names}
    for name in options:
        if name.lower() not in lowered:
            raise ConfigurationError(
                f"There is no option {shown(name)}; there are {', '.join(names)}.", code="MR-spark-option"
            )
