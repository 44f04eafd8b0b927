"""How to reach a source: an entry of libpq's service file, or the environment. Nothing secret is stored or shown."""

import os
import re
from collections.abc import Mapping

from psycopg import conninfo

from mailroom.errors import ConfigurationError
from mailroom.session import settings

PREFIX = "MAILROOM_DSN_"
SERVICE = re.compile(r"[^\[\]\x00-\x1f]{1,200}\Z")


def variable(source: str) -> str:
    """Return the variable of the environment that leads to a source: MAILROOM_DSN_<SOURCE>.

    In upper case, with _ in the place of every character that is neither an ASCII letter nor a digit.
    """
    return PREFIX + re.sub(r"[^A-Z0-9]", "_", source.upper())


def service_name(service: str) -> str:
    """Return `service` if it can be the name of an entry of a service file, else raise `ConfigurationError`.

    A connection string is refused: it may have a password, and this name is stored and shown.
    """
    if not isinstance(service, str) or not SERVICE.match(service) or service != service.strip():
        raise ConfigurationError(
            "A service is the name of an entry in libpq's service file, such as 'head_office'.",
            code="MR-invalid-service",
        )
    if "=" in service or "://" in service:
        raise ConfigurationError(
            "A service is the name of an entry in libpq's service file (PGSERVICEFILE, or ~/.pg_service.conf), not a "
            "connection string: that may have a password, and this name is stored and shown.",
            code="MR-invalid-service",
        )
    return service


def source_dsn(source: str, service: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the connection string to a source: its service's, or else the one of its variable in the environment.

    The service file is read when the connection is made. Raises `ConfigurationError` if nothing leads to the source.
    """
    if service is not None:
        return conninfo.make_conninfo(service=service_name(service))
    name = variable(source)
    if not environment.get(name):
        raise ConfigurationError(
            f"Nothing leads to {source}: set {name} where the dispatcher runs, or name an entry of libpq's service "
            f"file: mailroom link set {source} --service ENTRY",
            code="MR-link-no-way",
        )
    try:
        return settings.dsn(environment[name])
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}", code=error.code) from None
