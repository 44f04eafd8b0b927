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
# `smuggled` are none, and came past the trigger. What reads a log has a ledger of its own, by epochs: where it was set
# back to is in `rewound`, and what it skips counts as handled there. Its epoch cannot change while its lane is held.
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
CREATE TABLE faults.seen (mid uuid NOT NULL, inbox text COLLATE "C" NOT NULL);
CREATE TABLE faults.log_route (topic text NOT NULL, inbox text COLLATE "C" NOT NULL);
CREATE TABLE faults.l_ledger (
    inbox text COLLATE "C" NOT NULL, epoch bigint NOT NULL, mid uuid NOT NULL, key text COLLATE "C" NOT NULL,
    clock bigint NOT NULL, place text NOT NULL DEFAULT 'read',
    rtx bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    turn bigint NOT NULL DEFAULT nextval('faults.turn'));
CREATE TABLE faults.rewound (inbox text COLLATE "C" NOT NULL, epoch bigint NOT NULL, clock bigint NOT NULL);
CREATE INDEX ON faults.rewound (inbox, epoch);
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
    SELECT inbox, min(clock), max(clock), count(*) FROM arrived
    WHERE inbox NOT IN (SELECT inbox FROM faults.log_route) GROUP BY inbox;
    RETURN NULL;
END $$;
CREATE TRIGGER faults AFTER INSERT ON mailroom.inbox REFERENCING NEW TABLE AS arrived
    FOR EACH STATEMENT EXECUTE FUNCTION faults.delivered();
CREATE FUNCTION faults.skipped() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO faults.l_ledger (inbox, epoch, mid, key, clock, place)
    SELECT r.name, r.epoch, d.message_id, d.key, d.clock, 'dead'
    FROM dead AS d JOIN mailroom.inbox_registry AS r ON r.name = d.inbox
    WHERE r.name IN (SELECT inbox FROM faults.log_route) ORDER BY d.clock;
    RETURN NULL;
END $$;
CREATE TRIGGER faults AFTER INSERT ON mailroom.dead_letter REFERENCING NEW TABLE AS dead
    FOR EACH STATEMENT EXECUTE FUNCTION faults.skipped();
"""

SENT = (
    "INSERT INTO faults.w_ledger (mid, topic, key, pos) SELECT mid, topic, key, pos "
    "FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::int[]) AS u (mid, topic, key, pos)"
)
REAPED = (
    "INSERT INTO faults.r_ledger (inbox, mid, key, clock) SELECT %s, mid, key, clock "
    "FROM unnest(%s::uuid[], %s::text[], %s::bigint[]) WITH ORDINALITY AS u (mid, key, clock, nth) ORDER BY nth"
)
READ = (
    "INSERT INTO faults.l_ledger (inbox, epoch, mid, key, clock) SELECT r.name, r.epoch, u.mid, u.key, u.clock "
    "FROM unnest(%s::text[], %s::uuid[], %s::text[], %s::bigint[]) WITH ORDINALITY AS u (inbox, mid, key, clock, nth) "
    "JOIN mailroom.inbox_registry AS r ON r.name = u.inbox ORDER BY u.nth"
)
REWOUND = (
    "INSERT INTO faults.rewound (inbox, epoch, clock) "
    "SELECT name, epoch, %s::bigint FROM mailroom.inbox_registry WHERE name = %s"
)
SEEN = "INSERT INTO faults.seen (mid, inbox) VALUES (%s, %s)"
PROBE = "probe-"  # keys of the campaign's own messages


def create(
    connection: psycopg.Connection[Any], routes: Sequence[tuple[str, str]], of_logs: Sequence[tuple[str, str]] = ()
) -> None:
    """Make the ledgers; `routes` are the pairs of topic and inbox in which each message must turn up.

    `of_logs` are those of inboxes that read logs.
    """
    connection.execute(TABLES)
    for table, pairs in (("route", routes), ("log_route", of_logs)):
        for pair in pairs:
            connection.execute(f"INSERT INTO faults.{table} (topic, inbox) VALUES (%s, %s)".encode(), pair)
    for reader in sorted({inbox for _, inbox in of_logs}):
        connection.execute(REWOUND.encode(), [0, reader])  # it begins there


def sent(rows: Sequence[tuple[UUID, str, str, int | None]]) -> list[Any]:
    """Return the values of `SENT` for rows of message id, topic, key and position."""
    return [list(column) for column in zip(*rows, strict=True)]
