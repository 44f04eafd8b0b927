"""Where this database runs: what tells a node apart from a copy of it, and one start of the server from another."""

from mailroom.links.identity import Place
from mailroom.sql.operation import Operation, Sql

# The timeline is the first part of the name of a WAL file; no other function gives the one that is written now:
# pg_control_checkpoint() has that of the last checkpoint, which may be older than a promotion.
PLACE = Sql(
    """
SELECT c.system_identifier, d.oid::bigint,
       ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
       pg_catalog.pg_postmaster_start_time()
FROM pg_catalog.pg_control_system() AS c, pg_catalog.pg_database AS d
WHERE d.datname = pg_catalog.current_database()
""",
    columns=("bigint", "bigint", "bigint", "timestamptz"),
)


def reading_place() -> Operation[Place]:
    """Return where the database of this session runs.

    Fails with `psycopg.errors.ObjectNotInPrerequisiteState` (in its driver's form) on a standby, which writes no WAL.
    """
    [row] = yield PLACE.at()()
    return Place(*row)
