"""Total order: how far a total inbox may be given out, and what happens when origins join and leave.

A total inbox gives out its messages by (sent_clock, origin), so every node that gets the same messages has them in the
same order. A message may be given out once nothing that belongs before it can come any more: up to the bound, the
lowest clock that its origins have shown. An origin has shown a clock if everything that it stamped up to it was
received. The node's own messages do not matter for the bound: receiving keeps the node's clock above all that was
shown, and its own stamps are above its clock. Without origins the bound is the clock.

A delivery or reception appends the bound to `stable`, in its own transaction. The bound only rises. So an origin that
joins later shows at least as much before it sends anything, and what comes too late never gets into the inbox.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mailroom.errors import NotSubscribed
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.traits import chosen, reading_traits
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql, filled

PARTITION_KEY = locks.key("partition")
# Of the rows of `touched`, each of which has an inbox's `partition`.
RINGING = locks.ringing(locks.channel("partition"), PARTITION_KEY)

# Of a row of `inbox_registry`, which is `r` in the second: whether the inbox is given out up to a bound.
IS_BOUNDED = chosen(is_bounded=True)
R_IS_BOUNDED = chosen("r", is_bounded=True)

# For the statements that deliver and receive: whether `raising_stable` is needed. Through an index of total inboxes.
HAS_BOUNDS = filled("EXISTS (SELECT FROM {schema}.inbox_registry WHERE {is_bounded})", is_bounded=IS_BOUNDED)

# The reason of a dead letter that would have come after a later message.
LATE = "too late for the order of this inbox: later messages were given out already"

# The total inboxes, and how far each may be given out.
BOUNDS = filled(
    """total AS MATERIALIZED (
    SELECT r.name AS inbox, coalesce((
        SELECT s.clock FROM {schema}.stable AS s WHERE s.inbox = r.name ORDER BY s.clock DESC LIMIT 1), 0) AS stable
    FROM {schema}.inbox_registry AS r WHERE {is_bounded})""",
    is_bounded=R_IS_BOUNDED,
)

RECEIVED = """coalesce((
        SELECT r.sent_clock FROM {schema}.receipt AS r WHERE r.origin = o.number ORDER BY r.last DESC LIMIT 1), 0)"""

# The origins of each total inbox. `since` counts for the inbox, and not for the origin: another inbox may still wait
# for older messages of the same origin.
# D-links-8: Total order counts what is shown per inbox.
ORIGINS = filled(
    """origins AS MATERIALIZED (
    SELECT t.inbox, t.stable, o.number, o.name, o.state, o.shown AS started, min(s.since) AS since,
           max(s.since) AS joined, {received} AS received
    FROM total AS t JOIN {schema}.subscription AS s ON s.inbox = t.inbox
         JOIN {schema}.origin AS o ON s.origin IN (o.name, '*')
    WHERE o.state <> 'excluded' GROUP BY t.inbox, t.stable, o.number),
shown AS MATERIALIZED (SELECT *, greatest(started, since, received) AS clock FROM origins)""",
    received=RECEIVED,
)

# Whether a subscription `s` to an origin `o` may ask it for messages. That of a total inbox must wait until the origin
# has shown a clock as high as that of the join: what it sends from then on is wanted, and comes in time.
HAS_JOINED = filled(
    """(greatest(s.since, o.shown) <= {received} OR NOT EXISTS (
    SELECT FROM {schema}.inbox_registry AS t WHERE t.name = s.inbox AND {is_bounded}))""",
    received=RECEIVED,
    is_bounded=chosen("t", is_bounded=True),
)

# Inboxes without origins are raised only if they got something: else each delivery would write a row for each of them.
# A node that has lost history stamps again what other nodes may have, and there it has another place. So none rises
# until an operator says that the order goes on. None rises either while messages wait to be fanned out, since those
# have their clocks already; afterwards all rise (`dispatcher.delivery.fan_out`).
RAISE = Sql(
    """
WITH {bounds},
{origins},
bound AS MATERIALIZED (
    SELECT t.inbox, t.stable, CASE WHEN bool_or(s.number IS NOT NULL) THEN min(s.clock)
                                   WHEN %(touched)s::text[] IS NULL OR t.inbox = ANY (%(touched)s::text[])
                                   THEN (SELECT last_value FROM {schema}.clock) END AS clock
    FROM total AS t LEFT JOIN shown AS s ON s.inbox = t.inbox
    WHERE (SELECT incarnation <= resumed FROM {schema}.node) AND NOT EXISTS (SELECT FROM {schema}.fan_out)
    GROUP BY t.inbox, t.stable),
raised AS (
    INSERT INTO {schema}.stable (inbox, clock) SELECT inbox, clock FROM bound WHERE clock > stable RETURNING inbox),
touched AS MATERIALIZED (SELECT to_regclass('{schema}.inbox_' || inbox) AS partition FROM raised)
SELECT (SELECT count(*) FROM raised), (SELECT {ringing} FROM touched)
""",
    columns=("bigint", "bigint"),
    bounds=BOUNDS,
    origins=ORIGINS,
    ringing=RINGING,
)


def raising_stable(schema: str, touched: list[str] | None = None) -> Operation[int]:
    """Allow total inboxes to be given out up to their bounds; wake their workers, and return how many inboxes rose.

    Run it in the transaction that delivered or received, under the dispatch lock and after the clock was set, in a
    statement of its own, which sees the new receipt. `touched` are the inboxes that got something; None for all.
    """
    [(raised, _)] = yield RAISE.at(schema=schema)(touched=touched)
    return int(raised)


# -- Joining and leaving ----------------------------------------------------------------------------------------------

# A crash may have set the clock back, until a dispatcher starts.
CLOCK = Sql(
    """
SELECT greatest(c.last_value, (SELECT s.clock FROM {schema}.stable AS s WHERE s.inbox = '{inbox}'
                               ORDER BY s.clock DESC LIMIT 1))
FROM {schema}.clock AS c
""",
    columns=("bigint",),
)


BRIDGE = Sql(
    """
SELECT o.name FROM {schema}.bridge_in AS b JOIN {schema}.origin AS o ON o.number = b.origin
WHERE %(origin)s::text IN (o.name, '*') ORDER BY o.name LIMIT 1
""",
    columns=("text",),
)


def joining(schema: str, inbox: str, origin: str) -> Operation[int]:
    """Return the clock after which an inbox that now subscribes to another node wants its messages.

    That is 0 for an inbox by key. For a total inbox it is the node's clock, and nothing is delivered or received until
    the caller's transaction ends: so no row of `stable` passes the clock before the subscription can be seen. Raises
    `NotSubscribed` if `origin` is or includes a bridge to a broker, which shows no clocks.
    """
    if not (yield from reading_traits(schema, inbox)).is_bounded:
        return 0
    yield DISPATCH_LOCK.at(schema=schema)()
    if bridges := (yield BRIDGE.at(schema=schema)(origin=origin)):
        raise NotSubscribed(
            f"Inbox {inbox} is in total order and would wait for ever for the bridge {bridges[0][0]}: a broker shows "
            "no clocks. Name the nodes that are read over links.",
            code="MR-bridge-total-order",
        )
    [(clock,)] = yield CLOCK.at(schema=schema, inbox=inbox)()
    return int(clock)


def leaving(schema: str, inbox: str) -> Operation[None]:
    """Let a total inbox that has unsubscribed go on without the nodes that it no longer waits for."""
    if (yield from reading_traits(schema, inbox)).is_bounded:
        yield DISPATCH_LOCK.at(schema=schema)()
        yield from raising_stable(schema)


# Without receipts no inbox waits for messages of this origin yet, so its start may be set for all inboxes at once.
START = Sql(
    """
UPDATE {schema}.origin AS o SET shown = (SELECT last_value FROM {schema}.clock)
WHERE o.name = %(name)s::text AND NOT EXISTS (SELECT FROM {schema}.receipt AS r WHERE r.origin = o.number) AND EXISTS (
    SELECT FROM {schema}.subscription AS s JOIN {schema}.inbox_registry AS r ON r.name = s.inbox
    WHERE {is_bounded} AND s.origin IN (o.name, '*'))
""",
    is_bounded=R_IS_BOUNDED,
)
GUARDED = Sql("SELECT {has_bounds}", columns=("boolean",), has_bounds=HAS_BOUNDS)


def having_bounds(schema: str) -> Operation[bool]:
    """Return whether the node has inboxes in total order."""
    [(has_bounds,)] = yield GUARDED.at(schema=schema)()
    return bool(has_bounds)


def guarding_order(schema: str) -> Operation[None]:
    """Lock out deliveries until the transaction ends, if the node has total inboxes: before an origin is added."""
    [(has_bounds,)] = yield GUARDED.at(schema=schema)()
    if has_bounds:
        yield DISPATCH_LOCK.at(schema=schema)()


def starting_origin(schema: str, name: str) -> Operation[None]:
    """Let total inboxes that subscribe to a newly added origin want its messages from now on."""
    yield START.at(schema=schema)(name=name)


RESUME = Sql(
    "UPDATE {schema}.node SET resumed = incarnation WHERE resumed < incarnation RETURNING incarnation",
    columns=("bigint",),
)


def resuming_order(schema: str) -> Operation[bool]:
    """Let the total inboxes of a node with a new incarnation go on; return whether they were stopped.

    What the node lost and stamps again has its old place at other nodes, and a new one here.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    resumed = yield RESUME.at(schema=schema)()
    if resumed:
        yield from raising_stable(schema)
    return bool(resumed)


# -- What a total inbox waits for -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """How far a total inbox may be given out (`stable`), and how many of its messages are held back above that.

    `waits_for` is the node that has shown the lowest clock, `shown`, and that they are held back for; None if none are.
    If `is_stopped`, this node has lost history, and they are held back until `mailroom link resume`.
    """

    inbox: str
    stable: int
    held_back: int
    waits_for: str | None
    shown: int | None
    is_stopped: bool


LOWEST = Sql(
    """
WITH {bounds},
{origins}
SELECT t.inbox, t.stable, s.name, s.clock, (SELECT incarnation > resumed FROM {schema}.node)
FROM total AS t LEFT JOIN LATERAL (
    SELECT name, clock FROM shown WHERE shown.inbox = t.inbox ORDER BY clock, number LIMIT 1) AS s ON true
ORDER BY t.inbox
""",
    columns=("text", "bigint", "text", "bigint", "boolean"),
    bounds=BOUNDS,
    origins=ORIGINS,
)
HELD = Sql(
    "SELECT count(*) FROM {schema}.inbox WHERE inbox = '{inbox}' AND {by_sent} > %(stable)s::bigint",
    columns=("bigint",),
    by_sent="(sent_clock + 0)",
)


def waiting(schema: str, but: Collection[str] = ()) -> Operation[list[Waiting]]:
    """Return the state of each total inbox, by name, `but` of some that are not read."""
    found = []
    for inbox, stable, name, shown, is_stopped in (yield LOWEST.at(schema=schema)()):
        if inbox in but:
            continue
        [(held,)] = yield HELD.at(schema=schema, inbox=inbox)(stable=stable)
        found.append(Waiting(inbox, stable, held, name if held else None, shown if held else None, is_stopped))
    return found
