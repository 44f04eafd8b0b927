"""Django in a process of tests: set up once, and its connection `default` led to a test's own database."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

if not settings.configured:
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, USE_TZ=True)
    django.setup()

from django.db import connection, connections
from django.db.backends.postgresql.base import DatabaseWrapper

NAMES = {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user", "PASSWORD": "password"}


def found_in(dsn: str) -> dict[str, Any]:
    """Return Django's settings of a connection to this database."""
    options = conninfo_to_dict(dsn)
    return {name: options.get(option) or "" for name, option in NAMES.items()}


@contextmanager
def connected(dsn: str) -> Iterator[Any]:
    """Give `django.db.connection`, the proxy of this thread's connection, on a database."""
    connections["default"] = DatabaseWrapper({**connections.settings["default"], **found_in(dsn)}, "default")
    try:
        yield connection
    finally:
        connections["default"].close()
        del connections["default"]
