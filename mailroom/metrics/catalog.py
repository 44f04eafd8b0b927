"""The metrics that each look asks of the database, each declared once: of which figure it is the column.

They are cheap enough for each scrape, whatever waits (`mailroom.figures.statistics`).
"""

from typing import get_args

from mailroom.figures.breakers import counting_open
from mailroom.figures.leaders import HeldLease, reading_held
from mailroom.figures.statistics import (
    EXACT,
    counting_dead_letters,
    estimated,
    reading_margins,
    reading_now,
    reading_tables,
)
from mailroom.metrics.family import Family, Samples, of_rows
from mailroom.node.dead_letter import Stage
from mailroom.sql.operation import Operation

INBOX_MESSAGES = Family(
    "inbox_messages",
    "gauge",
    "Delivered messages that were not reaped yet, parked ones left out: an estimate from statistics.",
    ("inbox",),
    column="live",
)
INBOX_DEAD_ROWS = Family(
    "inbox_dead_rows",
    "gauge",
    "Rows of an inbox that were reaped and are not vacuumed: an estimate.",
    ("inbox",),
    column="dead",
)
TABLE_DEAD_ROWS = Family(
    "table_dead_rows", "gauge", "The same of the tables beside the inboxes.", ("table",), column="dead"
)
INBOX_PAUSED = Family(
    "inbox_paused",
    "gauge",
    "Whether an inbox is paused: 1 or 0. Paused keys of an inbox that is not do not count.",
    ("inbox",),
    column="is_paused",
)
INBOX_BREAKER_OPEN = Family(
    "inbox_breaker_open",
    "gauge",
    "How many breakers of an inbox are open: 1 or 0, or how many prefixes of keys.",
    ("inbox",),
    column="number",
)
INBOX_EXPIRED = Family(
    "inbox_expired_total",
    "counter",
    "Messages that waited in an inbox for longer than its `expire_s` allows, and were removed.",
    ("inbox",),
    column="expired",
)
LEASE_HELD = Family("lease_held", "gauge", "Whether a process leads: 1 or 0.", ("role",), column="leads")
LEASE_REMAINING = Family(
    "lease_remaining_seconds",
    "gauge",
    "How long the lease is still valid; negative once it has expired.",
    ("role",),
    column="left_s",
)
OLDEST_SNAPSHOT = Family(
    "oldest_snapshot_seconds",
    "gauge",
    "How long the oldest transaction of this database is open that keeps dead rows from being removed, prepared ones "
    "included. Sessions of other roles count only if this role may see them (pg_read_all_stats).",
    column="snapshot_s",
)
NOTIFY_QUEUE = Family(
    "notify_queue_usage_ratio",
    "gauge",
    "How full the server's queue of notifications is, from 0 to 1.",
    column="notify_queue",
)
SEQUENCE_MARGIN = Family(
    "sequence_margin_ratio",
    "gauge",
    "How much of a sequence's numbers is left, from 1 to 0.",
    ("sequence",),
    column="left",
)
CLOCK = Family("clock", "gauge", "The last logical clock that the node has given out.", column="clock")
CLOCK_CEILING = Family(
    "clock_ceiling", "gauge", "The clock above which none is given out before this is raised.", column="clock_ceiling"
)
PARKED_MESSAGES = Family(
    "parked_messages",
    "gauge",
    f"Messages of parked keys: above {EXACT:,} an estimate from statistics.",
    column="parked",
)
DEAD_LETTERS = Family(
    "dead_letters",
    "gauge",
    f"Dead letters, by where the message failed: above {EXACT:,} in all an estimate from statistics.",
    ("stage",),
    column="number",
)


def reading_catalog(schema: str) -> Operation[dict[Family, Samples]]:
    """Return what the catalogs say of the node `schema`, by its database's clock.

    It takes no lock that others wait for. The node has to exist (`mailroom.schema.check`).
    """
    now = yield from reading_now(schema)
    inboxes, tables = yield from reading_tables(schema)
    breakers = yield from counting_open(schema)
    leases = yield from reading_held(schema)
    live = {each.name: each.live for each in tables}
    letters = yield from counting_dead_letters(schema, get_args(Stage), live["dead_letter"])
    # A node whose dispatcher was never started has no lease of one.
    none = [] if "dispatcher" in {each.role for each in leases} else [HeldLease("dispatcher", False, 0.0)]
    now = now._replace(parked=estimated(now.parked, live["parked"]))
    return {
        **of_rows(inboxes, INBOX_MESSAGES, INBOX_DEAD_ROWS, INBOX_PAUSED, INBOX_EXPIRED),
        **of_rows(breakers, INBOX_BREAKER_OPEN),
        **of_rows(tables, TABLE_DEAD_ROWS),
        **of_rows([*none, *leases], LEASE_HELD),
        **of_rows(leases, LEASE_REMAINING),
        **of_rows([now], OLDEST_SNAPSHOT, NOTIFY_QUEUE, CLOCK, CLOCK_CEILING, PARKED_MESSAGES),
        **of_rows((yield from reading_margins(schema)), SEQUENCE_MARGIN),
        **of_rows(letters, DEAD_LETTERS),
    }
