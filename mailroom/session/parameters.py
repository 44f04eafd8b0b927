"""The parameters of a connection that other code has opened, as a connection string that opens another one like it.

The URL of an engine says little: `creator`, `connect_args`, events and pools that configure decide too. So they are
read from the driver's own connection. How a driver checks a certificate cannot be read back.
"""

import socket
import ssl
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import conninfo

from mailroom.errors import ConfigurationError

# Those that `settings.session_dsn` gives itself, and the service, whose entry the other parameters hold.
OF_OURS = frozenset({"application_name", "fallback_application_name", "client_encoding", "replication", "service"})
# Kept though they have their default: the environment may have another one.
KEPT = frozenset({"host", "port", "user", "dbname", "sslmode"})
SOCKET = ".s.PGSQL."


def parameters(driver: Any, database: str) -> str:
    """Return the connection string of a driver's open connection, password included.

    `database` is for a driver that has forgotten its name. Raises `ConfigurationError` for a driver that is not known,
    and for parameters that cannot be read back.
    """
    info: Any = getattr(driver, "info", None)
    found: dict[str, Any]
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        found = {option.keyword.decode(): (option.val or b"").decode() for option in driver.pgconn.info}
        found = _reached(found, driver.info)
    elif hasattr(info, "dsn_parameters"):
        found = _reached({**info.dsn_parameters, "password": info.password}, info)  # psycopg2
    elif hasattr(driver, "_params") and hasattr(driver, "_addr"):
        found = _of_asyncpg(driver, database)
    elif isinstance(getattr(driver, "_usock", None), socket.socket):
        found = _of_pg8000(driver, database)
    else:
        raise unknown(f"Cannot tell where a {type(driver).__module__}.{type(driver).__qualname__} leads")
    return conninfo.make_conninfo("", **_of_libpq(found))


def unknown(why: str) -> ConfigurationError:
    """Return the error that says what to do if sessions like those of a source cannot be opened."""
    return ConfigurationError(
        f"{why}, so Mailroom's own sessions cannot follow: give listen_dsn, a connection string that leads to the "
        "same database, past any pooler.",
        code="MR-listen-dsn-needed",
    )


def _of_libpq(found: Mapping[str, object]) -> dict[str, Any]:
    """Return what libpq knows and would not do by default: `settings.session_dsn` completes the rest, as always."""
    defaults = {each.keyword.decode(): (each.compiled or b"").decode() for each in psycopg.pq.Conninfo.get_defaults()}
    return {
        name: value
        for name, value in found.items()
        if name in defaults and name not in OF_OURS and value not in (None, "")
        if name in KEPT or value != defaults[name]
    }


def _reached(found: dict[str, Any], info: Any) -> dict[str, Any]:
    """Name the host that was reached, where several were given."""
    if "," not in (found.get("host") or ""):
        return found
    return {**found, "host": info.host, "port": info.port, "hostaddr": None}


def _of_asyncpg(driver: Any, database: str) -> dict[str, object]:
    given = driver._params
    password = given.password() if callable(given.password) else given.password
    if not isinstance(password, str | None):
        if hasattr(password, "close"):
            password.close()  # a coroutine, which would not be awaited
        raise unknown("This source gets its password from a coroutine")
    options = " ".join(f"-c {name}={_escaped(value)}" for name, value in (given.server_settings or {}).items())
    return {
        **_at(driver._addr),
        **_tls(driver._transport.get_extra_info("ssl_object")),
        "user": given.user,
        "password": password,
        "dbname": given.database or given.user or database,
        "options": options,
    }


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace(" ", "\\ ")


def _of_pg8000(driver: Any, database: str) -> dict[str, object]:
    user, password = (each.decode() if isinstance(each, bytes) else each for each in (driver.user, driver.password))
    found: dict[str, object] = {"user": user, "password": password, "dbname": database}
    return found | _at(driver._usock.getpeername()) | _tls(driver._usock)


def _at(address: Any) -> dict[str, object]:
    """Return host and port of an address: a socket's path, or a host and a port."""
    if isinstance(address, str):
        directory, _, port = address.rpartition(f"/{SOCKET}")
        return {"host": directory, "port": port}
    return {"host": address[0], "port": address[1]}


def _tls(tls: Any) -> dict[str, object]:
    context = getattr(tls, "context", None)
    if context is None:
        return {}
    if context.verify_mode is not ssl.CERT_NONE:
        raise unknown("The certificates that this source checks cannot be read back from it")
    return {"sslmode": "require"}
