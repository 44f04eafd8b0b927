"""Which database to use, and how sessions of our own are opened and set up, directly or through a pooler."""

import asyncio
import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo, pq

from mailroom.errors import ConfigurationError, ConnectionFailed
from mailroom.session.connect_times import USUAL_S, ConnectTimes
from mailroom.session.service_file import service_entry
from mailroom.sql.pooler import AsyncPooledConnection, PooledConnection, refuses_options
from mailroom.sql.sight import ADVICE
from mailroom.sql.sqlstate import Meaning, is_of_row_security, meaning_of_code, primary_message
from mailroom.values.names import APPLICATION

if TYPE_CHECKING:
    from sqlalchemy import Engine

DSN_VARIABLE = "MAILROOM_DSN"

# If one of these is set, libpq's environment names a database on purpose.
LIBPQ_VARIABLES = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGSERVICE", "PGUSER")

# Our defaults do not override these settings of libpq's environment.
ENVIRONMENT = {"connect_timeout": "PGCONNECT_TIMEOUT", "target_session_attrs": "PGTARGETSESSIONATTRS"}

SQLALCHEMY_SCHEME = re.compile(r"\A(postgres(?:ql)?)\+\w+://")

# user:password of a URL is everything before its last @. Unescaped, these characters end it earlier for libpq, which
# then takes the rest of the password for a host or port and repeats it in its error.
USER_AND_PASSWORD = re.compile(r"\w+://(.*)@")
ENDS_IT_EARLY = re.compile(r"[@/?]")

# jit: its default turned a delivery of 3 ms into 48 ms. search_path: no other role's function can be called by mistake.
# TimeZone: west of UTC, Python cannot represent the first hours of the year 1.
# row_security: a statement whose rows a policy would choose fails, instead of working on some of them.
# default_transaction_isolation: our statements are written for READ COMMITTED, and at any other level get 40001.
# array_nulls: psycopg sends an array of nothing but NULLs as text, in which they would be words.
SESSION = {"jit": "off", "search_path": "pg_catalog,pg_temp", "TimeZone": "UTC", "row_security": "off"}
SESSION |= {"array_nulls": "on", "default_transaction_isolation": "read committed"}
READ_COMMITTED = psycopg.IsolationLevel.READ_COMMITTED  # a pooled transaction has begun when it gets its settings
# For sessions that only write messages, which policies may judge, and for those in which code of users runs.
UNDER_POLICIES = {"row_security": "on"}
# For sessions that only look. Not one of the settings: a new session that could not write would be taken for one of a
# standby. Not through a pooler, whose next client would have it too.
READ_ONLY = "SET default_transaction_read_only = on"
# For sessions that run only our own statements. A statement that takes this long hangs and is better retried. They send
# the statements of a transaction back to back, so a session that idles inside one is paused or cut off and must give up
# its locks: a standby has to take over within 15 s, of which the lease takes 4.
UNATTENDED = SESSION | {
    "statement_timeout": "60s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "5s",
}
# How the server detects a dead peer: keepalives find one that vanished, tcp_user_timeout one that no longer reads, such
# as a paused process that listens (its kernel still answers keepalives).
PEER = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
PEER |= {"tcp_user_timeout": "10000"}
# The same for the client. All our sessions write, so with several hosts they need the primary.
CLIENT = {"connect_timeout": str(USUAL_S), "tcp_user_timeout": "10000", "target_session_attrs": "read-write"}
CLIENT |= {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
CONNECT_TIMES = ConnectTimes()
# The first statement of a session tells whether it is the server's own: a pooler reports a made-up process id.
# It also frees a large block. The C library of Linux gives memory back to the system whenever more than 128 kB are free
# at the end of the heap, and so takes it back and has it cleared for each statement with a large plan: a third of the
# server's time for a delivery of one message. Once a larger block was freed it keeps twice its size: mallopt(3).
# D-statements-14: Sessions keep their memory.
FIRST = "SELECT pg_backend_pid() WHERE octet_length(repeat('x', 1000000)) > 0"


def dsn(given: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the connection string to use: `given`, else MAILROOM_DSN, else libpq's own environment.

    A SQLAlchemy URL (`postgresql+psycopg://...`) is accepted too. Raises `ConfigurationError` if nothing names a
    database, or if the text is not a connection string. The error does not repeat the text, which may hold a password.
    """
    text = given or environment.get(DSN_VARIABLE)
    if not text:
        if any(environment.get(variable) for variable in LIBPQ_VARIABLES):
            return ""
        raise ConfigurationError(
            f"No database is named. Give --dsn, or set {DSN_VARIABLE}, or PGHOST and PGDATABASE; "
            f"or try it without a server of your own: export {DSN_VARIABLE}=$(mailroom embedded dsn)",
            code="MR-no-database-named",
        )
    if not isinstance(text, str):
        raise ConfigurationError(
            f"A connection string is text, not {type(text).__name__}.", code="MR-connection-string-invalid"
        )
    text = SQLALCHEMY_SCHEME.sub(r"\1://", text)
    login = USER_AND_PASSWORD.match(text)
    if login is None or not ENDS_IT_EARLY.search(login[1]):
        with contextlib.suppress(psycopg.ProgrammingError):  # its message repeats parts of the text
            conninfo.conninfo_to_dict(text)
            return text
    raise ConfigurationError(
        "The connection string cannot be read. It looks like postgresql://user@host:5432/database or "
        "host=... dbname=...; in the first form, special characters of a password are percent-encoded "
        "(@ as %40, / as %2F, ? as %3F).",
        code="MR-connection-string-invalid",
    )


def place(text: str) -> str:
    """Return host, port and database of a connection string for display, without its password."""
    known = {option.keyword.decode(): (option.val or b"").decode() for option in pq.Conninfo.get_defaults()}
    known |= {name: str(value) for name, value in conninfo.conninfo_to_dict(text).items()}
    host = known["host"] or known["hostaddr"] or "localhost"
    return f"{host}:{known['port']}/{known['dbname'] or known['user']}"


# libpq knows which of its options are secret, and an older one does not know those of newer ones. It marks keys made of
# a password as no more than debug options.
MARKED_SECRET = b"*"
NEWER_SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}


def secrets() -> set[str]:
    """Return the options of a connection string that hold a secret: a password, or what stands for one."""
    marked = (option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == MARKED_SECRET)
    return NEWER_SECRETS | set(marked)


def session_dsn(text: str, role: str, settings: Mapping[str, str] = SESSION, *, pooled: bool = False) -> str:
    """Return `text` completed for a session that Mailroom opens: application name, timeouts and the given settings.

    Its own options stay, and our other defaults do not override what it sets, even through an entry of a service file.
    Through a pooler the settings are left out: see `mailroom.sql.pooler`.
    """
    given = conninfo.conninfo_to_dict(text)
    known = service_entry(str(given.get("service") or "")) | given
    options = [str(known.get("options") or "")]
    if not pooled:
        each = {name: value.replace(" ", r"\ ") for name, value in {**settings, **PEER}.items()}
        options += [f"-c {name}={value}" for name, value in each.items()]
    client = CLIENT | {"connect_timeout": str(CONNECT_TIMES.allowed_s(text))}
    kept = {name for name in client if name in known or os.environ.get(ENVIRONMENT.get(name, ""))}
    return conninfo.make_conninfo(
        text,
        application_name=f"{APPLICATION}{role}"[:63],
        options=" ".join(options).strip() or None,
        client_encoding="UTF8",  # no other encoding can represent every key
        **{name: value for name, value in client.items() if name not in kept},
    )


def of_this_process(role: str) -> str:
    """Return the role of a session by which others find this process, with its release, id and host (`worker list`)."""
    release = sys.modules["mailroom"].__version__  # not imported: it names all that is public, and so is above this
    return f"{role} {release} {os.getpid()}@{platform.node()}"


def connect(
    text: str, role: str, settings: Mapping[str, str] = SESSION, *, autocommit: bool = False
) -> psycopg.Connection:
    """Open a session of our own, or raise `ConnectionFailed` with the server's reason and without the password."""
    try:
        with CONNECT_TIMES.measured(text):
            return _direct(text, role, settings, autocommit) or _pooled(text, role, settings, autocommit)
    except psycopg.OperationalError as error:
        raise connection_failed(error) from None


def _direct(text: str, role: str, settings: Mapping[str, str], autocommit: bool) -> psycopg.Connection | None:
    """Connect without a pooler; return None if there is one."""
    try:
        connection = psycopg.connect(session_dsn(text, role, settings), autocommit=True)
    except psycopg.OperationalError as error:
        if refuses_options(error):
            return None
        raise
    with contextlib.ExitStack() as unless_direct:
        unless_direct.callback(connection.close)
        if connection.execute(FIRST).fetchone() == (connection.info.backend_pid,):
            unless_direct.pop_all()
            connection.autocommit = autocommit
            return connection
    return None


def _pooled(text: str, role: str, settings: Mapping[str, str], autocommit: bool) -> psycopg.Connection:
    conninfo = session_dsn(text, role, pooled=True)
    connection = PooledConnection.connect(conninfo, autocommit=autocommit, prepare_threshold=None)
    connection.settings = settings
    connection.isolation_level = READ_COMMITTED
    return connection


async def connect_async(text: str, role: str, settings: Mapping[str, str] = SESSION) -> psycopg.AsyncConnection:
    """Open an autocommit session of our own, or raise `ConnectionFailed` as `connect` does."""
    try:
        with CONNECT_TIMES.measured(text):
            return await _direct_async(text, role, settings) or await _pooled_async(text, role, settings)
    except psycopg.OperationalError as error:
        raise connection_failed(error) from None
    except asyncio.CancelledError as error:
        # The traceback holds the half-made connection: code that keeps the cancellation would keep it open.
        raise error.with_traceback(None) from None


async def _direct_async(text: str, role: str, settings: Mapping[str, str]) -> psycopg.AsyncConnection | None:
    try:
        connection = await psycopg.AsyncConnection.connect(session_dsn(text, role, settings), autocommit=True)
    except psycopg.OperationalError as error:
        if refuses_options(error):
            return None
        raise
    async with contextlib.AsyncExitStack() as unless_direct:
        unless_direct.push_async_callback(connection.close)
        if await (await connection.execute(FIRST)).fetchone() == (connection.info.backend_pid,):
            unless_direct.pop_all()
            return connection
    return None


async def _pooled_async(text: str, role: str, settings: Mapping[str, str]) -> psycopg.AsyncConnection:
    conninfo = session_dsn(text, role, pooled=True)
    connection = await AsyncPooledConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    connection.settings = settings
    await connection.set_isolation_level(READ_COMMITTED)
    return connection


def refusal(error: BaseException) -> str | None:
    """Return what the server refused because of row security, for lack of resources, or because of an error of its own.

    With its hint, or what to do; None for others. The server's text is repeated: texts of these kinds contain nothing
    of a message.
    """
    if is_of_row_security(error):
        return f"The server refused: {primary_message(error)}. {ADVICE}"
    if not isinstance(error, psycopg.Error) or meaning_of_code(error.sqlstate or "") is not Meaning.SERVER:
        return None
    hint = f" {error.diag.message_hint}" if error.diag.message_hint else ""
    return f"The server refused: {error.diag.message_primary} ({error.sqlstate}).{hint}"


def connection_failed(error: psycopg.OperationalError) -> ConnectionFailed:
    """Return an error that says in one line why the connection failed and what to check.

    One that the server raised in a session that goes on, such as for want of memory, says that instead.
    """
    if (refused := refusal(error)) is not None:
        return ConnectionFailed(refused, code="MR-row-security" if is_of_row_security(error) else "MR-server-refused")
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    reason = "; ".join(filter(None, lines)).rstrip(".") or type(error).__name__
    if "session is read-only" in reason:
        check = "It is a standby or read-only: name the primary. To read only, add target_session_attrs=any."
    else:
        check = f"Check --dsn or {DSN_VARIABLE}, and that the server runs."
    return ConnectionFailed(f"Cannot connect: {reason}{'' if reason.endswith('?') else '.'} {check}")


def engine(given: str | None = None) -> "Engine":
    """Return a SQLAlchemy engine without a pool on the database that `dsn(given)` names."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    text = dsn(given)
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(text, "migrate"),
        poolclass=NullPool,
        hide_parameters=True,
    )
