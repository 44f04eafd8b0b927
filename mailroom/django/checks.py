"""What `manage.py check` says of Mailroom: of the settings, and of the schema where it may ask the database."""

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from mailroom import schema
from mailroom.django.place import place
from mailroom.errors import SchemaError

SETTING = "mailroom.E001"
DATABASE = "mailroom.E002"
NODE = "mailroom.W001"


def check_database(**_: object) -> list[CheckMessage]:
    """Find a setting `MAILROOM` that cannot be used, and a database that is not PostgreSQL by psycopg 3."""
    try:
        connection = place().connection
    except ImproperlyConfigured as error:
        return [Error(str(error), hint="Correct the settings.", id=SETTING)]
    if connection.vendor != "postgresql":
        return [_wrong(connection, f"it is of {connection.settings_dict['ENGINE']}")]
    if connection.Database.__name__ != "psycopg":
        return [_wrong(connection, f"its driver is {connection.Database.__name__}")]
    return []


def _wrong(connection: Any, why: str) -> CheckMessage:
    return Error(
        f"Mailroom cannot use the database {connection.alias!r}: {why}.",
        hint="Let its ENGINE be django.db.backends.postgresql, with psycopg 3 installed, or name another one in "
        'MAILROOM = {"DATABASE": ...}.',
        id=DATABASE,
    )


def check_node(*, databases: Sequence[str] | None = None, **_: object) -> list[CheckMessage]:
    """Find a schema that is missing, or of another release. A warning, since `migrate` is what mends it."""
    if check_database():
        return []
    node = place()
    if node.database not in (databases or ()):
        return []
    try:
        schema.check(node.connection, schema=node.schema)
    except SchemaError as error:
        hint = "Run: manage.py migrate mailroom" + (
            "" if node.database == "default" else f" --database {node.database}"
        )
        return [Warning(str(error).partition(" Run: ")[0], hint=hint, id=NODE)]
    except DatabaseError as error:
        return [Warning(f"The schema of Mailroom could not be looked at: {type(error).__name__}.", id=NODE)]
    return []
