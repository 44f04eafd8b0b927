"""The demo's two schemas: its node, and its business tables. Both are dropped and made anew by each run."""

from pathlib import Path

import psycopg

from mailroom import create_inbox
from mailroom.errors import ConfigurationError
from mailroom.schema import migrate
from mailroom.session import settings
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

INBOX = "flights"
NODE = "mailroom_demo"

# The comment by which the demo knows its own schemas again. Without it nothing is dropped.
_MARK = "Made by mailroom demo, which drops it when it runs again."


def business(node: str) -> str:
    """Return the name of the schema of the business tables beside the node's."""
    return f"{node}_flights"


def remake(dsn: str, node: str = NODE) -> None:
    """Drop what an earlier run left, then make the node, its inbox and the business tables, in one transaction.

    Raises `ConfigurationError` when one of the schemas was not made by the demo.
    """
    schemas = [schema_name(node), business(node)]
    if node == DEFAULT_SCHEMA:
        raise ConfigurationError(
            f"The demo drops its schema, so it leaves {node!r} alone: choose another --schema.", code="MR-demo-schema"
        )
    with settings.engine(dsn).begin() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)  # noqa: S101 - what settings.engine opens
        driver.execute("SET LOCAL lock_timeout = '10s'")  # somebody may be reading the tables of the last run
        foreign = driver.execute(
            "SELECT nspname FROM pg_namespace "
            "WHERE nspname = ANY(%s) AND obj_description(oid, 'pg_namespace') IS DISTINCT FROM %s",
            [schemas, _MARK],
        ).fetchone()
        if foreign:
            raise ConfigurationError(
                f"Schema {foreign[0]!r} was not made by the demo: choose another --schema.", code="MR-demo-schema"
            )
        for schema in schemas:
            driver.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
            driver.execute(f'CREATE SCHEMA "{schema}"')
            driver.execute(f"COMMENT ON SCHEMA \"{schema}\" IS '{_MARK}'")
        migrate(connection, schema=node)
        create_inbox(connection, INBOX, schema=node)
        make_business_tables(driver, business(node))


def make_business_tables(connection: psycopg.Connection, schema: str) -> None:
    """Make the business tables in a schema that exists, in the caller's transaction."""
    connection.execute("SELECT set_config('search_path', %s, true)", [schema])
    connection.execute(Path(__file__).with_name("tables.sql").read_bytes())
