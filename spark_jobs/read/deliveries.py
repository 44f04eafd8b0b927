"""Wait for the delivery under way without its lock, which a role that only reads has no right to: it could hold it."""

from mailroom.errors import ConfigurationError
from mailroom.sql.operation import Operation, Sql

PAUSE_S = 0.05
LOOKS = 1_200

UNDER_WAY = Sql(
    """
SELECT virtualtransaction FROM pg_catalog.pg_locks
WHERE locktype = 'relation' AND relation = '{schema}.dispatch_turn'::regclass::oid AND granted
  AND mode = 'ShareUpdateExclusiveLock'
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
""",
    columns=("text",),
)
PAUSE = Sql("SELECT pg_catalog.pg_sleep({pause_s}) IS NULL", columns=("boolean",), pause_s=str(PAUSE_S))


def awaiting_delivery(schema: str) -> Operation[None]:
    """Wait until the delivery that is under way has ended: then all is visible that it has given clocks to.

    Later ones are not waited for. Raises `ConfigurationError` after a minute.
    """
    under_way = set((yield UNDER_WAY.at(schema=schema)()))
    for _ in range(LOOKS):
        if not under_way:
            return
        yield PAUSE.at()()
        under_way &= set((yield UNDER_WAY.at(schema=schema)()))
    raise ConfigurationError(
        "A delivery, or a change of what is delivered, has been under way for a minute, and may have given out clocks "
        "that are to be read. See what holds it up (mailroom doctor), and start again.",
        code="MR-spark-delivery-lasts",
    )
