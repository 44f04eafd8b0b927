"""Where the node is: the setting `MAILROOM` of a Django project, and the connection string of that database."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from psycopg import conninfo, pq

from mailroom.errors import InvalidName
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

SETTING = "MAILROOM"
NAMES = ("DATABASE", "SCHEMA")


@dataclass(frozen=True)
class NodePlace:
    """An alias of DATABASES, and the schema of the node in that database."""

    database: str
    schema: str

    @property
    def connection(self) -> Any:
        """This thread's connection of Django to it."""
        return connections[self.database]


def place() -> NodePlace:
    """Return where the settings say that the node is. Raises Django's `ImproperlyConfigured`, which says what to do."""
    given = getattr(settings, SETTING, {})
    if not isinstance(given, Mapping) or not set(given) <= set(NAMES):
        raise ImproperlyConfigured(f"The setting {SETTING} is a dict that may have {' and '.join(NAMES)}: {SHAPE}")
    database, schema = given.get("DATABASE", "default"), given.get("SCHEMA", DEFAULT_SCHEMA)
    if database not in connections:
        raise ImproperlyConfigured(
            f"{SETTING}['DATABASE'] is {database!r}, and DATABASES has no such alias, only "
            f"{', '.join(sorted(connections))}."
        )
    try:
        return NodePlace(database, schema_name(schema))
    except InvalidName as error:
        raise ImproperlyConfigured(f"{SETTING}['SCHEMA'] cannot be used. {error}") from None


SHAPE = '{"DATABASE": "default", "SCHEMA": "mailroom"}'


def dsn(place: NodePlace) -> str:
    """Return a connection string to the database, with the options that are libpq's, as Django would connect."""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given = place.connection.get_connection_params()
    return conninfo.make_conninfo(**{name: value for name, value in given.items() if name in known})
