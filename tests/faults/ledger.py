"""The ledgers: what was sent, delivered and reaped, written inside the very transactions that did it.

None of them has a unique constraint or a primary key: a ledger that refused a duplicate would hide it.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg

# `wtx`, `dtx` and `rtx` are the transactions; `turn` is drawn while the key (or the dispatch lock) is held, so that it
# rises in commit order along a key as long as nobody else works on the key meanwhile. `pos` is null for messages that
# no order is promised for (scheduled ones). `seen` is how the campaign learns that a probe was handled. What is sent is
# counted by executables too, in the transaction that sends it: a counter for each topic, and one for all. Those in
# `smuggled` are none, and came past the trigger.
TABLES = """
CREATE SCHEMA faults;
CREATE SEQUENCE faults.turn;
CREATE TABLE faults.route (topic text NOT NULL, inbox text NOT NULL);
CREATE TABLE faults.w_ledger (
    mid uuid NOT NULL, topic text COLLATE "C" NOT NULL, key text COLLATE "C" NOT NULL,
    wtx bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint, pos integer);
CREATE TABLE faults.r_ledger (
    inbox text COLLATE "C" NOT NULL, mid uuid NOT NULL, key text COLLATE "C" NOT NULL, clock bigint NOT NULL,
    rtx bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    turn bigint NOT NULL DEFAULT nextval('faults.turn'));
CREATE TABLE faults.d_ledger (
    inbox text COLLATE "C" NOT NULL, first bigint NOT NULL, last bigint NOT NULL, messages bigint NOT NULL,
    dtx bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    turn bigint NOT NULL DEFAULT nextval('faults.turn'));
CREATE TABLE faults.seen (mid uuid NOT NULL);
CREATE TABLE faults.smuggled (mid uuid NOT NULL);
CREATE FUNCTION faults.counted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO mailroom.outbox_executable (operation, key, amount)
    SELECT 'increment', coalesce(topic, 'all'), count(*) FROM written
    GROUP BY GROUPING SETS ((topic), ()) HAVING count(*) > 0;
    RETURN NULL;
END $$;
CREATE TRIGGER counted AFTER INSERT ON faults.w_ledger REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION faults.counted();
CREATE FUNCTION faults.delivered() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faults.d_ledger (inbox, first, last, messages)
    SELECT inbox, min(clock), max(clock), count(*) FROM arrived GROUP BY inbox;
    RETURN NULL;
END $$;
CREATE TRIGGER faults AFTER INSERT ON mailroom.inbox REFERENCING NEW TABLE AS arrived
    FOR EACH STATEMENT EXECUTE FUNCTION faults.delivered();
"""

SENT = (
    "INSERT INTO faults.w_ledger (mid, topic, key, pos) SELECT mid, topic, key, pos "
    "FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::int[]) AS u (mid, topic, key, pos)"
)
REAPED = (
    "INSERT INTO faults.r_ledger (inbox, mid, key, clock) SELECT %s, mid, key, clock "
    "FROM unnest(%s::uuid[], %s::text[], %s::bigint[]) WITH ORDINALITY AS u (mid, key, clock, nth) ORDER BY nth"
)
ONE_REAPED = "INSERT INTO faults.r_ledger (inbox, mid, key, clock) VALUES (%s, %s, %s, %s)"
SEEN = "INSERT INTO faults.seen (mid) VALUES (%s)"
PROBE = "probe-"  # keys of the campaign's own messages


def create(connection: psycopg.Connection[Any], routes: Sequence[tuple[str, str]]) -> None:
    """Make the ledgers; `routes` are the pairs of topic and inbox in which each message must turn up."""
    connection.execute(TABLES)
    for topic, inbox in routes:
        connection.execute("INSERT INTO faults.route (topic, inbox) VALUES (%s, %s)", [topic, inbox])


def sent(rows: Sequence[tuple[UUID, str, str, int | None]]) -> list[Any]:
    """Return the values of `SENT` for rows of message id, topic, key and position."""
    return [list(column) for column in zip(*rows, strict=True)]
