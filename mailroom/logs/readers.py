"""Inboxes that read a log: their lanes, and the positions where they begin.

Each has two tables of its own: a row for each lane, to lock, and receipts, which say how far each lane was read. The
newest receipt counts, by epoch and clock.
"""

from dataclasses import dataclass
from datetime import datetime

from mailroom.errors import ConfigurationError
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.sql.operation import Operation, Sql

NOW, START = "now", "start"


def checked_since(since: str | datetime) -> str | datetime:
    """Return where an inbox begins to read: `now`, `start` or a time. Raises `ConfigurationError`."""
    if since in (NOW, START) or (isinstance(since, datetime) and since.tzinfo is not None):
        return since
    raise ConfigurationError(
        "since is where the inbox begins: 'now', 'start' (the oldest message that the log has), or a datetime with a "
        "time zone.",
        code="MR-invalid-argument",
    )


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A place in a log: all messages after `clock`. `opened_at`: since when the log has all that was delivered.

    `is_short`: what was asked for lies before that.
    """

    clock: int
    opened_at: datetime
    is_short: bool


# Ticks are looked through from the segment in which the time lies. The first one at or after the time counts, so that
# nothing is left out where the server's clock was set back.
PLACE = Sql(
    """
WITH old AS MATERIALIZED (
    SELECT first_clock, opened_at FROM {schema}.log_segment
    WHERE log = '{log}' AND emptied_at IS NULL ORDER BY segment LIMIT 1),
segment AS MATERIALIZED (
    SELECT first_clock FROM {schema}.log_segment
    WHERE log = '{log}' AND opened_at <= %(time)s::timestamptz ORDER BY segment DESC LIMIT 1),
first AS MATERIALIZED (
    SELECT clock FROM {schema}.log_tick
    WHERE log = '{log}' AND clock >= coalesce((SELECT first_clock FROM segment), 0) AND at >= %(time)s::timestamptz
    ORDER BY clock LIMIT 1),
wanted AS MATERIALIZED (
    SELECT CASE WHEN %(time)s::timestamptz IS NULL THEN %(clock)s::bigint
                WHEN EXISTS (SELECT FROM first) THEN coalesce((
                    SELECT t.clock FROM {schema}.log_tick AS t
                    WHERE t.log = '{log}' AND t.clock < (SELECT clock FROM first) ORDER BY t.clock DESC LIMIT 1), 0)
                ELSE last_value END AS clock, last_value
    FROM {schema}.clock)
SELECT greatest(old.first_clock - 1, least(w.clock, last_value)), old.opened_at,
       coalesce(%(time)s::timestamptz < old.opened_at, w.clock < old.first_clock - 1)
FROM old, wanted AS w
""",
    into=LogPlace,
)
# The log that an inbox reads, and how many lanes it has.
LOG = Sql(
    """
SELECT l.name, l.lanes::bigint FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log
WHERE r.name = '{inbox}'
""",
    columns=("text", "bigint"),
)
LANES = Sql("SELECT lanes::bigint FROM {schema}.log_registry WHERE name = '{log}'", columns=("bigint",))
TABLES = Sql(
    """
DO $$
DECLARE
    made text;
    owner CONSTANT pg_catalog.name := (SELECT pg_catalog.pg_get_userbyid(relowner) FROM pg_catalog.pg_class
                                       WHERE oid = '{schema}.inbox'::regclass::oid);
BEGIN
    CREATE TABLE {schema}.lanes_{inbox} (LIKE {schema}.log_lane INCLUDING DEFAULTS INCLUDING COMMENTS,
                                         CONSTRAINT lane_of_{inbox} PRIMARY KEY (lane));
    CREATE TABLE {schema}.receipts_{inbox} (LIKE {schema}.log_receipt INCLUDING DEFAULTS INCLUDING COMMENTS,
                                            CONSTRAINT receipt_of_{inbox} PRIMARY KEY (lane, epoch, clock))
    WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
          autovacuum_vacuum_insert_threshold = -1);
    FOREACH made IN ARRAY '{{lanes_{inbox},receipts_{inbox}}}'::text[] LOOP
        IF owner <> current_user THEN
            EXECUTE pg_catalog.format('ALTER TABLE {schema}.%%I OWNER TO %%I', made, owner);
        END IF;
    END LOOP;
    ALTER TABLE {schema}.log_lane ATTACH PARTITION {schema}.lanes_{inbox} FOR VALUES IN ('{inbox}');
    ALTER TABLE {schema}.log_receipt ATTACH PARTITION {schema}.receipts_{inbox} FOR VALUES IN ('{inbox}');
END $$
"""
)
BEGIN = Sql(
    """
WITH anew AS (
    UPDATE {schema}.inbox_registry SET epoch = pg_current_xact_id()::text::bigint WHERE name = '{inbox}'
    RETURNING epoch),
lane AS (
    INSERT INTO {schema}.lanes_{inbox} (inbox, lane)
    SELECT '{inbox}', n::smallint FROM pg_catalog.generate_series(0, %(lanes)s::integer - 1) AS n RETURNING lane)
INSERT INTO {schema}.receipts_{inbox} (inbox, lane, epoch, clock)
SELECT '{inbox}', lane, (SELECT epoch FROM anew), %(clock)s::bigint FROM lane
"""
)
RENAME = Sql(
    """
DO $$
BEGIN
    ALTER TABLE {schema}.log_lane DETACH PARTITION {schema}.lanes_{inbox};
    ALTER TABLE {schema}.log_receipt DETACH PARTITION {schema}.receipts_{inbox};
    UPDATE {schema}.lanes_{inbox} SET inbox = '{new}';
    UPDATE {schema}.receipts_{inbox} SET inbox = '{new}';
    ALTER TABLE {schema}.lanes_{inbox} RENAME TO lanes_{new};
    ALTER TABLE {schema}.receipts_{inbox} RENAME TO receipts_{new};
    ALTER INDEX {schema}.lane_of_{inbox} RENAME TO lane_of_{new};
    ALTER INDEX {schema}.receipt_of_{inbox} RENAME TO receipt_of_{new};
    ALTER TABLE {schema}.log_lane ATTACH PARTITION {schema}.lanes_{new} FOR VALUES IN ('{new}');
    ALTER TABLE {schema}.log_receipt ATTACH PARTITION {schema}.receipts_{new} FOR VALUES IN ('{new}');
END $$
"""
)
REMOVE = Sql("DROP TABLE {schema}.lanes_{inbox}, {schema}.receipts_{inbox}")


def finding_lanes(schema: str, log: str) -> Operation[int]:
    """Return how many lanes a log has. Raises `ConfigurationError` if there is no such log."""
    found = yield LANES.at(schema=schema, log=log)()
    if not found:
        raise ConfigurationError(
            f"There is no log {log!r}. `mailroom log list` shows those that there are, and `mailroom log create` makes "
            "one.",
            code="MR-unknown-log",
        )
    return int(found[0][0])


def placing(schema: str, log: str, at: str | int | datetime) -> Operation[LogPlace]:
    """Return the place of a time or a clock in a log, of `now`, or of `start`, the oldest message that it has.

    Run it under the dispatch lock: then what is delivered later comes after `now`.
    """
    time = at if isinstance(at, datetime) else None
    clock = {NOW: 2**63 - 1, START: None}[at] if isinstance(at, str) else at if isinstance(at, int) else None
    found = yield PLACE.at(schema=schema, log=log)(time=time, clock=0 if clock is None else clock)
    [place] = PLACE.named(found)
    return LogPlace(place.clock, place.opened_at, place.is_short and at != START)


def beginning(schema: str, inboxes: list[str], log: str, since: str | datetime) -> Operation[None]:
    """Have new inboxes read a log, from `since` on."""
    lanes = yield from finding_lanes(schema, log)
    yield DISPATCH_LOCK.at(schema=schema)()
    place = yield from placing(schema, log, since)
    for inbox in inboxes:
        yield TABLES.at(schema=schema, inbox=inbox)()
        yield BEGIN.at(schema=schema, inbox=inbox)(lanes=lanes, clock=place.clock)


READ = Sql(
    """
SELECT r.name, l.lanes::bigint FROM {schema}.inbox_registry AS r JOIN {schema}.log_registry AS l ON l.name = r.log
WHERE r.name = ANY (%(inboxes)s::text[]) ORDER BY r.name
""",
    columns=("text", "bigint"),
)
LOCK = Sql(
    """
SELECT FROM {schema}.lanes_{inbox} WHERE lane IN (
    SELECT {schema}.lane_of(key, {lanes}) FROM {schema}.dead_letter
    WHERE id = ANY (%(ids)s::bigint[]) AND inbox = '{inbox}') ORDER BY lane FOR UPDATE
"""
)


def locking_lanes(schema: str, inboxes: list[str], ids: list[int]) -> Operation[None]:
    """Lock the lanes of these dead letters, of those of the inboxes that read logs, before they are put back there.

    A claim that began before would not see them, and hand out other messages of their keys beside them. It waits for
    batches that are in hand.
    """
    for inbox, lanes in (yield READ.at(schema=schema)(inboxes=inboxes)):
        yield LOCK.at(schema=schema, inbox=inbox, lanes=str(lanes))(ids=ids)


def renaming_reader(schema: str, inbox: str, new: str) -> Operation[None]:
    """Give what is known of an inbox's reading to the inbox of a new name."""
    yield RENAME.at(schema=schema, inbox=inbox, new=new)()


def removing(schema: str, inbox: str) -> Operation[None]:
    """Drop what is known of an inbox's reading."""
    yield REMOVE.at(schema=schema, inbox=inbox)()
