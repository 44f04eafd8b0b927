"""Refusal: find all messages of a batch that the database refuses, as `dispatcher.delivery.refusal` does of a
delivery."""

from datetime import datetime

from dispatcher.delivery.sift import sift_of_messages, sifting
from dispatcher.links.at_source.fetch import FetchedBatch
from mailroom.links.handshake.wire import MARK, NAMES, READ, WIRE_COLUMNS
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.registry.routing import ORIGIN_LOG_ROUTE, ORIGIN_SINCE
from mailroom.sql.operation import Operation, Sql

# A DO block has no parameters, so the batch is passed as settings of the transaction: as text, which must mean the same
# when it is read again. A temporary table would need a right that a role may lack.
FORMS = Sql(
    "SELECT set_config('datestyle', 'ISO', true), set_config('timezone', 'UTC', true), "
    "set_config('bytea_output', 'hex', true), set_config('array_nulls', 'on', true)",
    columns=("text", "text", "text", "text"),
)
# Of what may be large, it returns only the length.
ASK = Sql(
    "SELECT {settings}, set_config('mailroom.asked_by', %(origin)s::bigint::text, true), set_config("
    "'mailroom.asked_at', coalesce(%(now)s::timestamptz, clock_timestamp())::text, true), set_config("
    "'mailroom.asked_rows', coalesce(%(most)s::bigint, pg_catalog.cardinality(%(seq)s::bigint[]))::text, true)",
    columns=(*("integer",) * len(WIRE_COLUMNS), "text", "text", "text"),
    settings=", ".join(
        f"octet_length(set_config('mailroom.asked_{name}', %({name})s::{kind}[]::text, true))"
        for name, (kind, _, _) in WIRE_COLUMNS.items()
    ),
)
TRY = sift_of_messages(
    """WITH source AS MATERIALIZED (
            SELECT id, name FROM {schema}.origin WHERE number = current_setting('mailroom.asked_by')::bigint),
        came AS MATERIALIZED (
            SELECT {read}, nth FROM unnest({spread}) WITH ORDINALITY AS r ({names}, nth)
            WHERE nth <= current_setting('mailroom.asked_rows')::bigint AND kind <> '{mark}'),
        {route}
        SELECT r.inbox, r.lanes, r.segment, c.*, (SELECT id FROM source) AS origin
        FROM came AS c JOIN route AS r ON r.topic = c.topic AND sent_clock > {gets_since}
        WHERE is_bounded OR (expires_at > current_setting('mailroom.asked_at')::timestamptz) IS NOT FALSE
        ORDER BY nth""",
    number="nth",
    sent_clock="copy.sent_clock",
    spread=", ".join(
        f"current_setting('mailroom.asked_{name}')::{kind}[]" for name, (kind, _, _) in WIRE_COLUMNS.items()
    ),
    names=NAMES,
    read=READ,
    mark=MARK,
    route=ORIGIN_LOG_ROUTE,
    source="source",
    sent="came",
    gets_since=ORIGIN_SINCE,
)


def finding_refused(
    schema: str, origin: int, batch: FetchedBatch, *, most: int | None = None, now: datetime | None = None
) -> Operation[list[str | None]]:
    """Return for each row of a batch, or of its first `most`, the reason if the database refuses it by itself."""
    yield DISPATCH_LOCK.at(schema=schema)()
    yield FORMS.at()()
    yield ASK.at()(**batch.columns, origin=origin, most=most, now=now)
    refused = yield from sifting(TRY.at(schema=schema)())
    reasons: list[str | None] = [None] * batch.rows
    for [nth], reason in refused:
        reasons[nth - 1] = reason
    return reasons
