"""Stamping: only who holds the node's dispatch lock moves its clock, and never past a ceiling that is durable."""

from mailroom import locks
from mailroom.clock import MAX_CLOCK, ClockOverflow
from mailroom.operation import Operation, Sql

CEILING_STEP = 1_000_000

OUTBOX_KEY = locks.key("'{schema}.outbox'::regclass")

# One deliverer at a time: clocks rise in commit order, and a statement that begins after this one sees all that the
# deliverer before it has done.
LOCK = Sql(
    f"SELECT pg_advisory_xact_lock({locks.DISPATCH}, {OUTBOX_KEY}) IS NULL",
    columns=("boolean",),
)

CEILING = Sql(
    """
UPDATE {schema}.node SET clock_ceiling = greatest(clock_ceiling, %(ceiling)s::bigint) RETURNING clock_ceiling
""",
    columns=("bigint",),
)
DURABLE = Sql("SELECT set_config('synchronous_commit', 'on', true)", columns=("text",))


def raising_ceiling(schema: str, at_least: int) -> Operation[None]:
    """Raise the clock's ceiling, durably once the transaction commits: no clock above it is ever given out.

    Raises `ClockOverflow` where there are no clocks left.
    """
    if at_least > MAX_CLOCK - CEILING_STEP:
        raise ClockOverflow(f"The clock would pass {MAX_CLOCK}; nothing more can be delivered on this node.")
    yield LOCK.at(schema=schema)()
    yield DURABLE.at()()
    yield CEILING.at(schema=schema)(ceiling=at_least + CEILING_STEP)
