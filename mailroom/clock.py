"""Lamport's logical clock: its rules as pure functions, which the deliver statement keeps in SQL, and who may move it.

The rules are those of L. Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", CACM 21(7),
1978 (IR1 and IR2), in the form of dapcomp's scalar time with d = 1: rule 1, before a send or an internal event
C := C + 1; rule 2, on receiving a message C := max(C, sent_clock), then rule 1, then deliver. Nothing is ever
dropped as stale: a message from a slow node gets a clock like any other.

A clock is a PostgreSQL bigint, from 0 (nothing stamped yet) to `MAX_CLOCK`. Only who holds the node's dispatch lock
moves that of the node, and never past a ceiling that is durable.
"""

from collections.abc import Iterable
from itertools import accumulate

from mailroom import locks
from mailroom.errors import MailroomError
from mailroom.sql.operation import Operation, Sql

MAX_CLOCK = 2**63 - 1
WARN_CLOCK = 2**62


class ClockOverflow(MailroomError):
    """A clock beyond `MAX_CLOCK` would be needed. Nothing was stamped."""


def tick(clock: int) -> int:
    """Rule 1: return the clock of the next send or internal event of a node that stands at `clock`."""
    return _fitting(clock + 1)


def receive(clock: int, sent_clock: int) -> int:
    """Rule 2: return the clock at which a node that stands at `clock` receives a message stamped `sent_clock`.

    It is later than both, so whatever led to the message comes before whatever follows from it.
    """
    return _fitting(max(clock, sent_clock) + 1)


def receive_all(clock: int, sent_clocks: Iterable[int]) -> list[int]:
    """Return the clocks at which messages are received one after another, in the order given.

    The i-th of them (from 1) equals i + max(clock, max over j <= i of (sent_clock[j] - j + 1)): a window maximum,
    which is how SQL numbers a whole batch at once.
    """
    return list(accumulate(sent_clocks, receive, initial=clock))[1:]


def stamp(clock: int, count: int, after_clock: int = 0) -> range:
    """Return the clocks of `count` messages sent one after another by a node that stands at `clock`.

    All are later than `after_clock`, the largest clock that any message of the batch must follow. The node then
    stands at the last of them; with no messages the range is empty and the clock stays where it is.
    """
    before = max(clock, after_clock)
    return range(before + 1, _fitting(before + count) + 1)


def _fitting(clock: int) -> int:
    # Wrapping to 0, as other implementations do, would order every later message before all earlier ones.
    if clock > MAX_CLOCK:
        raise ClockOverflow(
            f"The clock would pass {MAX_CLOCK}, the last one there is. No node counts that far: look for the sender "
            "or node that passed on a clock beyond all others, and start over in a new schema."
        )
    return clock


# -- The clock of a node ----------------------------------------------------------------------------------------------

CEILING_STEP = 1_000_000

OUTBOX_KEY = locks.key("'{schema}.outbox'::regclass")

# One deliverer at a time: clocks rise in commit order, and a statement that begins after this one sees everything that
# the previous deliverer did.
LOCK = Sql(
    "SELECT pg_advisory_xact_lock({dispatch_lock}, {outbox_key}) IS NULL",
    columns=("boolean",),
    dispatch_lock=locks.DISPATCH,
    outbox_key=OUTBOX_KEY,
)

CEILING = Sql(
    """
UPDATE {schema}.node SET clock_ceiling = greatest(clock_ceiling, %(ceiling)s::bigint) RETURNING clock_ceiling
""",
    columns=("bigint",),
)
DURABLE = Sql("SELECT set_config('synchronous_commit', 'on', true)", columns=("text",))


def raising_ceiling(schema: str, at_least: int) -> Operation[None]:
    """Raise the clock's ceiling, durable once the transaction commits. No clock above it is ever given out.

    Raises `ClockOverflow` where there are no clocks left.
    """
    if at_least > MAX_CLOCK - CEILING_STEP:
        raise ClockOverflow(f"The clock would pass {MAX_CLOCK}; nothing more can be delivered on this node.")
    yield LOCK.at(schema=schema)()
    yield DURABLE.at()()
    yield CEILING.at(schema=schema)(ceiling=at_least + CEILING_STEP)
