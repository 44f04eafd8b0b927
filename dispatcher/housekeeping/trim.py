"""Trim: what both ends of a link keep, and for how long.

The source keeps each row until its reader has acknowledged it, and `link.keep_s` seconds longer, for a reader that is
put back to an earlier time. The age of the row does not matter, since the reader may have been away. The target keeps
its receipts, with the ids of what it received, a day longer than that: if the source is put back, they tell what only
the target has. Both keep their newest row for ever, since it is the position. The target also keeps the newest of those
that are too old, so that there is a row to go back to.

Ids in `known` are kept: a message from a lost history may come again at any time, for example if it was scheduled for
next year. Only if it has come again is its id forgotten, together with its receipt.

Rows go by ranges of their primary key, and each scan begins where the last one stood: under a held snapshot the index
keeps the entries of all deleted rows, and a scan from the beginning would read them again each time.
"""

import logging
from dataclasses import dataclass

from mailroom.figures.links import DONE
from mailroom.links.handshake.diverged import DISPATCHER
from mailroom.schema import acts
from mailroom.schema.audit import auditing
from mailroom.sql.operation import Operation, Sql

log = logging.getLogger("mailroom.dispatcher")

TRIM_ROWS = 10_000  # of transit at once
PARTS = 48  # of `keep_s`: by at most one of them rows stay longer
RECEIPTS = 100  # at once; each may have thousands of ids
BEYOND_S = 86_400.0  # how long a target keeps its receipts beyond the time for which their source keeps its rows

# Rows below `released` were acknowledged long enough ago, however late that was.
LINKS = Sql(
    """
SELECT l.number, l.name, l.acked, least(coalesce(t.seq, 0), l.acked, coalesce((
           SELECT max(a.seq) FROM unnest(l.acks, l.acked_at) AS a (seq, at)
           WHERE a.at <= clock_timestamp() - l.keep_s * interval '1 second'), 0)),
       l.state = 'cut', l.state = 'open' AND coalesce(t.seq - l.acked - {done} > l.max_rows, false), coalesce(t.seq, 0),
       EXISTS (SELECT FROM {schema}.bridge_out AS b WHERE b.link = l.number)
FROM {schema}.link AS l LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit WHERE link = l.number ORDER BY seq DESC LIMIT 1) AS t ON true
ORDER BY l.number
""",
    columns=("bigint", "text", "bigint", "bigint", "boolean", "boolean", "bigint", "boolean"),
    done=DONE,
)
# For each link, what it has acknowledged by now; recorded at most `parts` times within the time for which it is kept.
# Of older records only the newest counts. If the server's clock was set back, a time in the future becomes now. A
# locked row is recorded in a later round.
# D-links-13: What is kept counts from the acknowledgement.
NOTE = Sql(
    """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now),
due AS MATERIALIZED (
    SELECT number, acked, acks, acked_at, now, now - keep_s * interval '1 second' AS until
    FROM {schema}.link AS l, moment,
         LATERAL (SELECT acks[pg_catalog.cardinality(acks)] AS seq, acked_at[pg_catalog.cardinality(acks)] AS at) AS n
    WHERE acked > coalesce(seq, 0) AND coalesce(at <= now - keep_s / %(parts)s::float8 * interval '1 second', true)
       OR at > now
    FOR NO KEY UPDATE OF l SKIP LOCKED)
UPDATE {schema}.link AS l SET acks = n.acks, acked_at = n.acked_at
FROM due AS d, LATERAL (
    SELECT pg_catalog.array_agg(seq ORDER BY at) AS acks, pg_catalog.array_agg(at ORDER BY at) AS acked_at
    FROM (SELECT max(seq) AS seq, at, max(at) FILTER (WHERE at <= d.until) OVER () AS old
          FROM (SELECT seq, least(at, d.now) AS at FROM unnest(d.acks, d.acked_at) AS a (seq, at)
                UNION ALL SELECT d.acked, d.now) AS a
          GROUP BY at) AS a
    WHERE old IS NULL OR at >= old) AS n
WHERE l.number = d.number
"""
)
TRIM = Sql(
    """
WITH last AS MATERIALIZED (
    SELECT max(seq) AS seq FROM (
        SELECT seq FROM {schema}.transit
        WHERE link = %(link)s::bigint AND seq > %(start)s::bigint AND seq < %(below)s::bigint
        ORDER BY seq LIMIT %(rows)s::bigint) AS t),
gone AS (
    DELETE FROM {schema}.transit AS t
    WHERE link = %(link)s::bigint AND seq > %(start)s::bigint AND seq <= (SELECT seq FROM last) RETURNING 1)
SELECT coalesce((SELECT seq FROM last), %(start)s::bigint), (SELECT count(*) FROM gone)
""",
    columns=("bigint", "bigint"),
)
CUT = Sql(
    """
UPDATE {schema}.link AS l SET state = 'cut'
WHERE number = %(link)s::bigint AND state = 'open' AND max_rows < (
    SELECT seq FROM {schema}.transit WHERE link = l.number ORDER BY seq DESC LIMIT 1) - acked - {done}
RETURNING max_rows
""",
    columns=("bigint",),
    done=DONE,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """A link at the source: its reader's name, what was acknowledged, and the newest row (0: none).

    Rows below `released` are no longer needed.
    """

    number: int
    name: str
    acked: int
    released: int
    is_cut: bool
    is_full: bool
    newest: int
    is_bridge: bool


ORIGINS = Sql(
    """
SELECT o.number, o.name, r.last, o.keep_s, EXISTS (SELECT FROM {schema}.known WHERE origin = o.number)
FROM {schema}.origin AS o, LATERAL (
    SELECT last FROM {schema}.receipt WHERE origin = o.number ORDER BY last DESC LIMIT 1) AS r
ORDER BY o.number
""",
    columns=("bigint", "text", "bigint", "float8", "boolean"),
)
# Of those that are too old the newest one stays, without its ids.
RECEIPT = Sql(
    """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() - %(keep_s)s::float8 * interval '1 second' AS until),
portion AS MATERIALIZED (
    SELECT last, received_at > until AS is_young FROM moment, (
        SELECT last, received_at FROM {schema}.receipt
        WHERE origin = %(origin)s::bigint AND last >= %(start)s::bigint
        ORDER BY last LIMIT %(rows)s::bigint) AS r),
old AS MATERIALIZED (
    SELECT max(last) AS last FROM portion
    WHERE last < coalesce((SELECT min(last) FROM portion WHERE is_young), 9223372036854775807)),
gone AS (
    DELETE FROM {schema}.receipt
    WHERE origin = %(origin)s::bigint AND last >= %(start)s::bigint AND last < (SELECT last FROM old)
    RETURNING ids),
emptied AS (
    UPDATE {schema}.receipt AS r SET ids = '{}'::uuid[] FROM {schema}.receipt AS b
    WHERE r.origin = %(origin)s::bigint AND r.last = (SELECT last FROM old) AND pg_catalog.cardinality(r.ids) > 0
      AND b.origin = r.origin AND b.last = r.last
    RETURNING b.ids),
came_again AS (
    DELETE FROM {schema}.known AS k USING (
        SELECT i.id FROM (SELECT ids FROM gone UNION ALL SELECT ids FROM emptied) AS r,
               LATERAL pg_catalog.unnest(r.ids) AS i (id)) AS i
    WHERE %(has_known)s::boolean AND k.origin = %(origin)s::bigint AND k.message_id = i.id)
SELECT coalesce((SELECT last FROM old), %(start)s::bigint), (SELECT count(*) FROM gone)
""",
    columns=("bigint", "bigint"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """A source at the target: its name, the newest receipt, and whether messages of a lost history are known.

    `keep_s` is for how many seconds the source keeps what was acknowledged.
    """

    number: int
    name: str
    newest: int
    keep_s: float
    has_known: bool


class Trim:
    """Trims the links of one node over an autocommit session, a bounded portion at a time.

    It keeps in memory where it stood, for each link and each origin, as long as `over` is given the same session: a
    crash of the server may bring back what an asynchronous commit had deleted.
    """

    def __init__(
        self, schema: str, rows: int = TRIM_ROWS, receipts: int = RECEIPTS, beyond_s: float = BEYOND_S
    ) -> None:
        self._schema = schema
        self._rows = rows
        self._receipts = receipts
        self._beyond_s = beyond_s
        self._session: object = None
        self._rows_up_to: dict[int, int] = {}
        self._receipts_from: dict[int, int] = {}

    def over(self, session: object) -> None:
        """Go on over this session."""
        if session is not self._session:
            self._session = session
            self._rows_up_to.clear()
            self._receipts_from.clear()

    def listing_links(self) -> Operation[list[Kept]]:
        """Return the links that others read here.

        First it records what the readers have acknowledged by now: that is kept from now on, for as long as the link
        says.
        """
        yield NOTE.at(schema=self._schema)(parts=PARTS)
        return [Kept(*row) for row in (yield LINKS.at(schema=self._schema)())]

    def listing_origins(self) -> Operation[list[Held]]:
        """Return the sources of which something was received."""
        return [Held(*row) for row in (yield ORIGINS.at(schema=self._schema)())]

    def cutting_full(self, link: Kept) -> Operation[bool]:
        """Cut a link for which more rows wait than it may have, in a transaction; return whether it was cut."""
        rows = yield CUT.at(schema=self._schema)(link=link.number)
        if not rows:
            return False
        why = f"more than {rows[0][0]} rows waited for it"
        what, act, again = ("bridge", "publish", "out") if link.is_bridge else ("link", "let it in", "allow")
        cut = acts.BRIDGE_CUT if link.is_bridge else acts.LINK_CUT
        waiting = link.newest - link.acked
        yield from auditing(self._schema, cut, [(None, link.name, waiting)], DISPATCHER, why)
        log.error(
            "the %s to %s is cut: %s. To %s again, without what was meant for it: mailroom %s remove %s, then mailroom "
            "%s %s %s",
            what, link.name, why, act, what, link.name, what, again, link.name,
        )  # fmt: skip
        return True

    def trimming_rows(self, link: Kept) -> Operation[bool]:
        """Delete rows of transit that the reader no longer needs; return whether more may be left.

        Of a cut link all rows but the newest are deleted.
        """
        below = link.newest if link.is_cut else link.released
        start = self._rows_up_to.get(link.number, 0)
        if start >= below - 1:
            return False
        [(last, gone)] = yield TRIM.at(schema=self._schema)(link=link.number, start=start, below=below, rows=self._rows)
        self._rows_up_to[link.number] = last
        return bool(gone >= self._rows)

    def trimming_receipts(self, origin: Held) -> Operation[bool]:
        """Delete receipts that are too old to be of use; return whether more may be left."""
        start = self._receipts_from.get(origin.number, 0)
        if start > origin.newest:  # they were cut: the source's history had parted
            start = 0
        [(last, gone)] = yield RECEIPT.at(schema=self._schema)(
            origin=origin.number, start=start, rows=self._receipts, keep_s=origin.keep_s + self._beyond_s,
            has_known=origin.has_known,
        )  # fmt: skip
        self._receipts_from[origin.number] = last
        return bool(gone >= self._receipts - 1)
