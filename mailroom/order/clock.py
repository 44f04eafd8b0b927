"""Lamport's logical clock: its rules as pure functions, and the operations that guard the clock of a node.

The rules are those of L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", CACM 21(7),
1978 (IR1 and IR2), in the form of dapcomp's scalar time with d = 1. Rule 1: before a send or an internal event,
C := C + 1. Rule 2: on receiving a message, C := max(C, sent_clock), then rule 1, then deliver. The deliver statement
does the same in SQL. Nothing is dropped as stale: a message from a slow node gets a clock like any other.

A clock is a PostgreSQL bigint, from 0 (nothing stamped yet) to `MAX_CLOCK`. Only the holder of the node's dispatch lock
moves the clock of the node, and never past a ceiling that is durable.
"""

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.sql.operation import Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one
from mailroom.values.numbers import whole

MAX_CLOCK = 2**63 - 1
WARN_CLOCK = 2**62


class ClockOverflow(MailroomError):
    """The next clock would exceed `MAX_CLOCK`. Nothing was stamped."""

    code = "MR-clock-overflow"


def tick(clock: int, step: int = 1) -> int:
    """Rule 1: return the clock of the next send or internal event of a node whose clock is `clock`.

    `step` is dapcomp's d, at least 1. Nodes use 1.
    """
    return fitting(clock + step)


def receive(clock: int, sent_clock: int, step: int = 1) -> int:
    """Rule 2: return the clock at which a node whose clock is `clock` receives a message stamped `sent_clock`.

    It is later than both, so the causes of a message come before its effects.
    """
    return fitting(max(clock, sent_clock) + step)


def fitting(clock: int) -> int:
    """Return `clock` if a node's clock may get that far, else raise `ClockOverflow`."""
    # Other implementations wrap to 0, which would order every later message before all earlier ones.
    if clock > MAX_CLOCK:
        raise ClockOverflow(
            f"The clock would exceed its maximum, {MAX_CLOCK}. No node counts that far by itself: find the sender or "
            "node that passed on so large a clock, and start over in a new schema."
        )
    return clock


# -- The clock of a node ----------------------------------------------------------------------------------------------

CEILING_STEP = 1_000_000

# One deliverer at a time. So clocks rise in commit order, and a statement that begins after this one sees everything
# that the previous deliverer committed. It is a lock on a table, which requires a right: every role that may connect
# could hold an advisory lock.
# D-deliver-1: The dispatch lock is a statement before the delivery.
# D-deliver-4: The clock is a sequence, moved by `setval`.
DISPATCH_LOCK = Sql("SELECT {schema}.take_dispatch_turn() IS NULL", columns=("boolean",))

CEILING = Sql(
    """
UPDATE {schema}.node SET clock_ceiling = greatest(clock_ceiling, %(ceiling)s::bigint) RETURNING clock_ceiling
""",
    columns=("bigint",),
)
DURABLE = Sql("SELECT set_config('synchronous_commit', 'on', true)", columns=("text",))


def raising_ceiling(schema: str, at_least: int) -> Operation[None]:
    """Raise the clock's ceiling to more than `at_least`; durable once the transaction commits.

    No clock above the ceiling is given out. Raises `ClockOverflow` if there are no clocks left.
    """
    ceiling = fitting(at_least + CEILING_STEP)
    yield DISPATCH_LOCK.at(schema=schema)()
    yield DURABLE.at()()
    the_one((yield CEILING.at(schema=schema)(ceiling=ceiling)), NODE_ROW, schema)


RECOVER = Sql(
    """
SELECT setval('{schema}.clock'::regclass, greatest(c.last_value, n.clock_ceiling))
FROM {schema}.clock c, {schema}.node n
""",
    columns=("bigint",),
)


def recovering_clock(schema: str) -> Operation[int]:
    """Set the clock to the largest value that may have been given out: a crash may have set the sequence back."""
    yield DISPATCH_LOCK.at(schema=schema)()
    (clock,) = the_one((yield RECOVER.at(schema=schema)()), NODE_ROW, schema)
    return int(clock)


# How far an operator may let a clock go. Nodes count on from there, and each start goes on by 2^32.
# D-deliver-3: One process stamps, by a Lamport clock.
MAX_ADVANCED = 2**62 + 2**61
REACHED = Sql(
    "SELECT greatest(c.last_value, n.clock_ceiling) FROM {schema}.clock AS c, {schema}.node AS n", columns=("bigint",)
)
ADVANCE = Sql(
    """
WITH advanced AS (
    UPDATE {schema}.node SET advanced = greatest(advanced, %(clock)s::bigint),
           clock_ceiling = greatest(clock_ceiling, %(clock)s::bigint)
    RETURNING true)
SELECT setval('{schema}.clock'::regclass, greatest(c.last_value, %(clock)s::bigint)) FROM {schema}.clock AS c, advanced
""",
    columns=("bigint",),
)


def advancing_clock(schema: str, clock: int, *, dry_run: bool = False) -> Operation[int]:
    """Raise the clock beyond `clock`, and so what may be received; return what the clock had reached before.

    A clock that is already further stays. Durable once the READ COMMITTED transaction commits. With `dry_run` it only
    returns what the clock has reached. Raises `ConfigurationError` for a clock above `MAX_ADVANCED`.
    """
    clock = whole(clock, "clock", 0, MAX_ADVANCED, ConfigurationError)
    yield DISPATCH_LOCK.at(schema=schema)()
    (before,) = the_one((yield REACHED.at(schema=schema)()), NODE_ROW, schema)
    if not dry_run:
        yield DURABLE.at()()
        yield ADVANCE.at(schema=schema)(clock=clock)
    return int(before)
