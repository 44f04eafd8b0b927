"""Set an inbox back in its log: it reads again what the log still has."""

from dataclasses import dataclass
from datetime import datetime

from inbox.by_key.parked_keys import NOTIFY
from mailroom.errors import ConfigurationError
from mailroom.logs.readers import LOG, START, LogPlace, placing
from mailroom.order.traits import reading_traits
from mailroom.registry.exclusive import ISOLATION
from mailroom.registry.log_topics import IS_WANTED
from mailroom.schema import acts, checking, finding
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql import locks
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.numbers import whole

SCHEMA_LOCK = Sql("SELECT pg_advisory_xact_lock({lock}, hashtext('{node}')) IS NULL", columns=("boolean",))
# All lanes: batches in hand end first, and none begins before the commit. Then the failing keys, in key order as
# everywhere: a replay of a parked key puts messages into the inbox's own table.
LANES = Sql("SELECT FROM {schema}.lanes_{inbox} ORDER BY lane FOR UPDATE")
# What goes there: batches of failing keys have their messages first, and then what is recorded of the keys.
DIVERTED = Sql("SELECT FROM {schema}.inbox_{inbox} WHERE clock > %(clock)s::bigint ORDER BY key, clock FOR UPDATE")
KEYS = Sql("SELECT FROM {schema}.key_state WHERE inbox = '{inbox}' ORDER BY key FOR UPDATE")
# What was diverted or parked after the place is read from the log again, but for what is no longer wanted there; a dead
# letter that was requeued is not in the log.
# A parked key stays parked, and holds its messages as they come. Attempts count from 1 again, by the rows of a replay.
REWIND = Sql(
    """
WITH diverted AS (
    DELETE FROM {schema}.inbox_{inbox} AS i WHERE clock > %(clock)s::bigint AND {is_in_log} RETURNING 1),
parked AS (
    DELETE FROM {schema}.parked AS i WHERE inbox = '{inbox}' AND clock > %(clock)s::bigint AND {is_in_log} RETURNING 1),
healed AS (
    DELETE FROM {schema}.key_state AS s
    WHERE s.inbox = '{inbox}' AND s.clock > %(clock)s::bigint AND s.parked_at IS NULL AND s.paused_at IS NULL),
resumed AS (
    UPDATE {schema}.key_state SET clock = 0, attempts = 0, last_error = NULL, alone_to = 0, suspect_to = 0,
        resume_at = NULL
    WHERE inbox = '{inbox}' AND clock > %(clock)s::bigint AND parked_at IS NULL AND paused_at IS NOT NULL),
restarted AS (
    INSERT INTO {schema}.attempt (inbox, key, clock, message_id, attempt, outcome, error)
    SELECT DISTINCT ON (key, clock) inbox, key, clock, message_id, 0, 'replay', coalesce(%(why)s::text, 'rewound')
    FROM {schema}.attempt WHERE inbox = '{inbox}' AND clock > %(clock)s::bigint ORDER BY key, clock, id DESC),
later AS (
    UPDATE {schema}.inbox_registry SET epoch = epoch + 1 WHERE name = '{inbox}' RETURNING epoch),
moved AS (
    INSERT INTO {schema}.receipts_{inbox} (inbox, lane, epoch, clock)
    SELECT '{inbox}', at.lane, later.epoch, least(at.clock, %(clock)s::bigint)
    FROM later, (SELECT DISTINCT ON (lane) lane, clock FROM {schema}.receipts_{inbox}
                 ORDER BY lane, epoch DESC, clock DESC) AS at)
SELECT (SELECT count(*) FROM diverted) + (SELECT count(*) FROM parked)
""",
    columns=("bigint",),
    is_in_log="""EXISTS (
        SELECT FROM {schema}.log_{log} AS o WHERE o.lane = {schema}.lane_of(i.key, {lanes}) AND o.clock = i.clock
          AND {is_wanted})""".replace("{is_wanted}", IS_WANTED),
)


@dataclass(frozen=True, slots=True)
class Rewound:
    """Where an inbox that was set back goes on: after `clock`.

    `opened_at`: since when the log has all that was delivered. `is_short`: what was asked for lies before that, and the
    inbox begins with the oldest message that the log has.
    """

    clock: int
    opened_at: datetime
    is_short: bool


def rewinding(schema: str, inbox: str, to: str | int | datetime, actor: str, why: str | None) -> Operation[Rewound]:
    """`Inbox.rewind` as an operation."""
    check_actor(actor, why)
    if isinstance(to, datetime) and to.tzinfo is not None:
        at: str | int | datetime = to
    elif to == START:
        at = START
    elif isinstance(to, int) and not isinstance(to, bool):
        at = whole(to, "to", 1, 2**63 - 1, ConfigurationError) - 1
    else:
        raise ConfigurationError(
            "to is where the inbox goes on: 'start' (the oldest message that the log has), a datetime with a zone, or "
            "the clock of a message.",
            code="MR-invalid-argument",
        )
    return _rewinding(schema, inbox, at, actor, why)


def _rewinding(schema: str, inbox: str, at: str | int | datetime, actor: str, why: str | None) -> Operation[Rewound]:
    yield IN_TRANSACTION
    yield from checking(schema)
    yield SCHEMA_LOCK.at(lock=str(locks.DDL), node=schema)()
    yield from finding(schema, inbox)
    if not (yield from reading_traits(schema, inbox)).reads_log:
        raise ConfigurationError(
            f"Inbox {inbox!r} reads no log: what it has handled is gone. With an archive (keep_reaped_days) single "
            "messages can be replayed: mailroom archive replay.",
            code="MR-inbox-reads-no-log",
        )
    names = {"schema": schema, "inbox": inbox}
    [(log, lanes)] = yield LOG.at(**names)()
    [(level,)] = yield ISOLATION.at()()
    if level != "read committed":
        raise ConfigurationError(
            f"This transaction is {level}, and may not see what was read last. Set inboxes back in a transaction of "
            "READ COMMITTED.",
            code="MR-wrong-isolation",
        )
    yield LANES.at(**names)()
    place: LogPlace = yield from placing(schema, log, at)
    yield DIVERTED.at(**names)(clock=place.clock)
    yield KEYS.at(**names)()
    [(deleted,)] = yield REWIND.at(log=log, lanes=str(lanes), **names)(clock=place.clock, why=why)
    change = f"in log {log} after clock {place.clock}"
    yield from auditing(schema, acts.INBOX_REWIND, [(inbox, None, deleted)], actor, why, change)
    yield NOTIFY.at(**names)()
    return Rewound(place.clock, place.opened_at, place.is_short)
