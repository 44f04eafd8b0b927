"""`empty`: take what tests have left out of a test node, for tests that commit and so cannot be rolled back."""

from mailroom.errors import ConfigurationError
from mailroom.figures.leaders import reading_leaders
from mailroom.schema import checking
from mailroom.sql.methods import on_connections
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

# Messages and executables, wherever they stand, and what is noted of them. In the order in which others lock them.
EMPTIED = (
    "outbox", "scheduled", "fan_out_way", "fan_out", "slot", "inbox", "log", "log_tick", "key_state", "breaker",
    "worker", "parked", "attempt", "dead_letter", "reaped", "outbox_executable", "executable_cursor", "store",
    "accounting", "bridge_done", "outbox_jdbc_id", "commit_token", "stat_minute", "audit",
)  # fmt: skip

EMPTY = Sql("DELETE FROM {schema}.{table}")
# What waits for a broker counts as published, as after `publish`.
PUBLISHED = Sql(
    """
UPDATE {schema}.link AS l SET acked = greatest(l.acked, (
    SELECT t.seq FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY t.seq DESC LIMIT 1))
WHERE l.number IN (SELECT b.link FROM {schema}.bridge_out AS b)
"""
)
# Breakers are closed, and nothing is paused.
CLOSED = Sql("UPDATE {schema}.limits SET opened_at = NULL, opened_why = NULL, try_at = NULL, tries = 0")
RESUMED = Sql(
    "UPDATE {schema}.inbox_registry SET paused_at = NULL, paused_by = NULL, expired = 0, lost = 0, lost_to = 0, "
    "lost_since = NULL, lost_at = NULL WHERE paused_at IS NOT NULL OR expired > 0 OR lost > 0"
)


def _emptying(*, schema: str = DEFAULT_SCHEMA) -> Operation[None]:
    """Delete all messages, executables, values of the store, attempts, dead letters, and the audit of a test node.

    In the caller's transaction. Inboxes stay with their subscriptions and settings, and so do links, bridges, periodic
    messages, and what Spark has noted; what waits for a broker counts as published. Paused inboxes go on, and breakers
    are closed. The clock goes on as well: nothing gets a clock that was given out before.

    For tests that commit, such as those of Django's `TransactionTestCase`; see `mailroom.testing.django`. Raises
    `ConfigurationError` while a dispatcher or an executor leads, which is not a sign of a test, and `SchemaError`
    unless the schema fits.
    """
    return emptying(schema_name(schema))


def emptying(schema: str) -> Operation[None]:
    """`empty` as an operation."""
    yield IN_TRANSACTION
    yield from checking(schema)
    leaders = yield from reading_leaders(schema)
    if leading := [each for each in leaders if each.leads and each.state != "stopped"]:
        [leader, *_] = leading
        raise ConfigurationError(
            f"The node {schema!r} is not emptied: {leader.role} on {leader.host} pid {leader.pid} leads. "
            "Stop it first, if this is the database of tests.",
            code="MR-test-node-in-use",
        )
    for table in EMPTIED:
        yield EMPTY.at(schema=schema, table=table)()
    yield PUBLISHED.at(schema=schema)()
    yield CLOSED.at(schema=schema)()
    yield RESUMED.at(schema=schema)()


empty, empty_async = on_connections("empty", _emptying)
