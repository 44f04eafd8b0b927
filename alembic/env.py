"""Runs the migrations of one node (one schema); several nodes live side by side in one database.

Programs call `mailroom.schema.migrate(connection)`. By hand: `alembic -x schema=NAME -x dsn=... upgrade head`;
without `-x dsn` the database is found as every command finds it (MAILROOM_DSN or libpq's own environment), and
`-x lock_timeout=SECONDS` is how long it tries to lock what it changes. With `--sql` it prints what it would run, and
asks no database.
"""

from alembic import context
from mailroom import schema
from mailroom.session import settings

arguments = context.get_x_argument(as_dictionary=True)
attributes = context.config.attributes
node_schema = attributes.get("schema") or arguments.get("schema") or schema.DEFAULT_SCHEMA
attributes.setdefault("discard", arguments.get("discard") == "yes")
if "lock_timeout" in arguments:
    attributes.setdefault("lock_timeout_s", float(arguments["lock_timeout"]))

if context.is_offline_mode():
    schema.run_migrations(context, None, node_schema)
else:
    with settings.engine(arguments.get("dsn")).begin() as connection:
        schema.run_migrations(context, connection, node_schema)
