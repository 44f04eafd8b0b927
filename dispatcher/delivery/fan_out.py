"""Fan out: get messages into more inboxes than one transaction may lock, a few at a time and in order.

Each partition that gets a row stays locked until the end of the transaction, with its indexes, and all databases of
the server share its table of locks: one message to 1,500 inboxes could exhaust that, for all. So a delivery that
would meet more than `PARTITIONS` only stamps its messages, and moves them from the outbox into `fan_out`, once each,
with the ways to their inboxes in `fan_out_way`. Then each transaction takes the ways to the next inboxes and inserts
all that waits for those. Nothing else is delivered or received meanwhile, under the same dispatch lock: so every inbox
gets its messages in order, exactly once, also if another process goes on after a crash.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg

from dispatcher.delivery.sift import sift, sifting
from mailroom.message.columns import MESSAGE
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.total import HAS_BOUNDS, RINGING, raising_stable
from mailroom.schema.partitions import PARTITIONS
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.sql.runner import run_in_transaction
from mailroom.sql.sqlstate import Meaning, meaning

GETS = """sent_clock > CASE kind WHEN 'M' THEN messages_after WHEN 'E' THEN events_after ELSE others_after END"""
CHOSEN = filled(
    """chosen AS MATERIALIZED (
    SELECT DISTINCT inbox FROM {schema}.fan_out_way ORDER BY inbox LIMIT {partitions})""",
    partitions=PARTITIONS,
)
# `refused` are copies that the database refuses, such as those for an inbox that is gone meanwhile.
# D-deliver-2: Messages for many inboxes are fanned out.
STEP = Sql(
    """
WITH {chosen},
gone AS (
    DELETE FROM {schema}.fan_out_way WHERE inbox <= (SELECT max(inbox) FROM chosen) RETURNING *),
refused AS MATERIALIZED (
    SELECT * FROM unnest(%(inboxes)s::text[], %(clocks)s::bigint[], %(reasons)s::text[]) AS r (inbox, clock, reason)),
copy AS MATERIALIZED (
    SELECT g.inbox, f.clock, r.reason
    FROM {schema}.fan_out AS f JOIN gone AS g USING (topic)
         LEFT JOIN refused AS r ON r.inbox = g.inbox AND r.clock = f.clock
    WHERE {gets}),
delivered AS (
    INSERT INTO {schema}.inbox (inbox, clock, sent_clock, origin, {message})
    SELECT copy.inbox, clock, sent_clock, origin, {message} FROM copy JOIN {schema}.fan_out USING (clock)
    WHERE reason IS NULL ORDER BY key, copy.inbox, clock
    RETURNING inbox),
dead AS (
    INSERT INTO {schema}.dead_letter (stage, reason, inbox, clock, origin, sent_clock, {message})
    SELECT 'deliver', reason, copy.inbox, clock, origin, sent_clock, {message}
    FROM copy JOIN {schema}.fan_out USING (clock) WHERE reason IS NOT NULL ORDER BY clock, copy.inbox
    RETURNING 1),
touched AS MATERIALIZED (
    SELECT inbox, to_regclass('{schema}.inbox_' || inbox) AS partition, count(*) AS rows
    FROM delivered GROUP BY inbox)
SELECT (SELECT count(*) FROM chosen) = {partitions}, coalesce(sum(rows), 0)::bigint,
       coalesce(pg_catalog.array_agg(inbox), '{}'::text[]), {ringing}, (SELECT count(*) FROM dead)
FROM touched
""",
    ("boolean", "bigint", "text[]", "bigint", "bigint"),
    chosen=CHOSEN,
    gets=GETS,
    message=MESSAGE,
    ringing=RINGING,
    partitions=PARTITIONS,
)
DONE = Sql(
    """
WITH gone AS (DELETE FROM {schema}.fan_out RETURNING 1)
SELECT count(*), {has_bounds} FROM gone
""",
    ("bigint", "boolean"),
    has_bounds=HAS_BOUNDS,
)


@dataclass(frozen=True, slots=True)
class FannedOut:
    """What one step did: the inboxes that got messages, how many `copies`, and how many were refused (`dead`).

    `woken` counts the inboxes whose sleepers were rung for. `more`: there are other inboxes that wait for theirs.
    """

    more: bool = False
    copies: int = 0
    inboxes: list[str] = field(default_factory=list)
    woken: int = 0
    dead: int = 0

    def plus(self, step: "FannedOut") -> "FannedOut":
        """Return both together."""
        return FannedOut(
            step.more, self.copies + step.copies, self.inboxes + step.inboxes, self.woken + step.woken,
            self.dead + step.dead,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RefusedCopy:
    """A copy that the database refuses, and the reason."""

    inbox: str
    clock: int
    reason: str


def fanning_out(
    schema: str, *, partitions: int | None = None, refused: Sequence[RefusedCopy] = ()
) -> Operation[FannedOut]:
    """Put all that waits into the next inboxes, in a transaction; after the last of them deliveries go on.

    `partitions` is how many inboxes at most, None for what the server has room for. The `refused` copies become dead
    letters.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    [row] = yield STEP.at(schema=schema)(
        partitions=partitions,
        inboxes=[each.inbox for each in refused],
        clocks=[each.clock for each in refused],
        reasons=[each.reason for each in refused],
    )
    step = FannedOut(*row)
    if not step.more:
        [(_, has_bounds)] = yield DONE.at(schema=schema)()
        if has_bounds:
            # It did not rise while something waited that might have been for one of them.
            yield from raising_stable(schema)
    return step


ASK = Sql("SELECT set_config('mailroom.asked', ({partitions})::text, true)", columns=("text",), partitions=PARTITIONS)
TRY = sift(
    """WITH chosen AS MATERIALIZED (
            SELECT DISTINCT inbox FROM {schema}.fan_out_way
            ORDER BY inbox LIMIT current_setting('mailroom.asked')::bigint)
        SELECT w.inbox, f.*
        FROM {schema}.fan_out AS f JOIN {schema}.fan_out_way AS w USING (topic)
        WHERE w.inbox <= (SELECT max(inbox) FROM chosen) AND {gets} ORDER BY f.clock, w.inbox""",
    declared="skipped record;",
    first="\n    SELECT '' AS inbox, 0::bigint AS clock INTO skipped;",
    passing="SELECT copy.inbox, copy.clock INTO skipped;",
    clocks="copy.clock, copy.sent_clock",
    noting="""refused := array_append(refused, json_build_array(
                    skipped.inbox, skipped.clock, of_state, of_constraint, of_table, of_column)::text);""",
    gets=GETS,
)


def finding_refused_copies(schema: str, *, partitions: int | None = None) -> Operation[list[RefusedCopy]]:
    """Return which copies of the next step the database refuses by themselves."""
    yield DISPATCH_LOCK.at(schema=schema)()
    yield ASK.at()(partitions=partitions)
    refused = yield from sifting(TRY.at(schema=schema)())
    return [RefusedCopy(inbox, clock, reason) for [inbox, clock], reason in refused]


async def fan_out(connection: psycopg.AsyncConnection, schema: str, partitions: int | None = None) -> FannedOut:
    """Put all that waits into all of its inboxes, one transaction at a time; return what was done."""
    done = FannedOut(more=True)
    while done.more:
        try:
            step = await run_in_transaction(connection, fanning_out(schema, partitions=partitions))
        except psycopg.Error as error:
            if meaning(error) is not Meaning.DATA:
                raise
            refused = await run_in_transaction(connection, finding_refused_copies(schema, partitions=partitions))
            step = await run_in_transaction(connection, fanning_out(schema, partitions=partitions, refused=refused))
        done = done.plus(step)
    return done
