"""Where this database runs: this distinguishes a node from a copy of it, and one start of the server from another."""

from mailroom.links.handshake.identity import Place
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sqlstate import sqlstate

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
# What every role may read, on a server that hides the rest.
OUTSIDE = Sql(
    """
SELECT 0::bigint, d.oid::bigint, 0::bigint, pg_catalog.pg_postmaster_start_time()
FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database()
""",
    columns=("bigint", "bigint", "bigint", "timestamptz"),
)
HIDDEN = ("42501", "0A000")  # by SQLSTATE: no right, or a function that a managed server does not have
SAVEPOINT = Sql("SAVEPOINT mailroom_place")
RELEASE = Sql("RELEASE SAVEPOINT mailroom_place")
ROLL_BACK = Sql("ROLLBACK TO SAVEPOINT mailroom_place")


def reading_place() -> Operation[Place]:
    """Return where the database of this session runs.

    Fails with `psycopg.errors.ObjectNotInPrerequisiteState` (in its driver's form) on a standby, which writes no WAL.
    """
    [row] = yield PLACE.at()()
    return Place(*row)


def finding_place() -> Operation[Place]:
    """Return it in a transaction, for a node without links, as far as this server shows it.

    A managed server may hide its control file. Then only the time of the server's start is known, and identifier and
    timeline are 0. That is enough, since no history is lost without a start. Links need the rest too, so they use
    `reading_place`.
    """
    yield SAVEPOINT.at()()
    try:
        place = yield from reading_place()
    except Exception as error:
        yield ROLL_BACK.at()()
        if sqlstate(error) not in HIDDEN:
            raise
        [row] = yield OUTSIDE.at()()
        place = Place(*row)
    yield RELEASE.at()()
    return place
