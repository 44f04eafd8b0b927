"""Which database, and how every session of ours is set up."""

import contextlib
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import psycopg
from psycopg import conninfo

from mailroom.errors import ConfigurationError, ConnectionFailed

if TYPE_CHECKING:
    from sqlalchemy import Engine

DSN_VARIABLE = "MAILROOM_DSN"

# Any of these says that libpq's own environment names a database on purpose.
LIBPQ_VARIABLES = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGSERVICE", "PGUSER")

SQLALCHEMY_SCHEME = re.compile(r"\A(postgres(?:ql)?)\+\w+://")

# user:password of a URL: whatever stands before its last @. Raw, these characters would end it earlier for libpq, which
# then takes the rest of the password for a host or a port and repeats it in its message.
USER_AND_PASSWORD = re.compile(r"\w+://(.*)@")
ENDS_IT_EARLY = re.compile(r"[@/?]")

# jit: its default turned a delivery of 3 ms into one of 48 ms. The rest keeps a session that hangs or whose peer is
# gone from holding locks or vacuum back; tcp_user_timeout is the one the kernel honours for a paused process.
SESSION = {"jit": "off", "search_path": "pg_catalog, pg_temp", "tcp_user_timeout": "10000"}


def dsn(given: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the connection string to use: `given`, else MAILROOM_DSN, else libpq's own environment.

    An SQLAlchemy URL (`postgresql+psycopg://...`) is taken too. Raises `ConfigurationError` when nothing names a
    database, or when the text is no connection string; its content is not repeated, since it may hold a password.
    """
    text = given or environment.get(DSN_VARIABLE)
    if not text:
        if any(environment.get(variable) for variable in LIBPQ_VARIABLES):
            return ""
        raise ConfigurationError(
            f"No database is named. Give --dsn, or set {DSN_VARIABLE}, or PGHOST and PGDATABASE; "
            "or try it without a server of your own: --embedded."
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
        "(@ as %40, / as %2F, ? as %3F)."
    )


def session_dsn(text: str, role: str, settings: Mapping[str, str] = SESSION) -> str:
    """Return `text` completed for a session that Mailroom opens: its name, timeouts, and the given settings."""
    known = conninfo.conninfo_to_dict(text)
    options = " ".join(f"-c {name}={value}".replace(", ", ",") for name, value in settings.items())
    given = str(known.get("options") or "")
    # Keepalives find a peer that is gone while nothing is sent, tcp_user_timeout one that does not answer what is.
    defaults = {"connect_timeout": "10", "tcp_user_timeout": "10000"}
    defaults |= {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
    return conninfo.make_conninfo(
        text,
        application_name=f"mailroom {role}"[:63],
        options=f"{given} {options}".strip(),
        **{name: value for name, value in defaults.items() if name not in known},
    )


def connect(text: str, role: str, *, autocommit: bool = False) -> psycopg.Connection:
    """Open a session of our own, or raise `ConnectionFailed` with the server's reason and without the password."""
    try:
        return psycopg.connect(session_dsn(text, role), autocommit=autocommit)
    except psycopg.OperationalError as error:
        raise connection_failed(error) from None


def connection_failed(error: psycopg.OperationalError) -> ConnectionFailed:
    """Tell why a connection failed in one line and what to check."""
    reason = " ".join(str(error).split()).rstrip(".?") or type(error).__name__
    return ConnectionFailed(f"Cannot connect: {reason}. Check --dsn or {DSN_VARIABLE}, and that the server runs.")


def engine(given: str | None = None) -> "Engine":
    """Return an SQLAlchemy engine without a pool on the database that `dsn(given)` names."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    text = dsn(given)
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(text, "migrate"),
        poolclass=NullPool,
        hide_parameters=True,
    )
