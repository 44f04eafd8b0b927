"""Who works at a node: workers, also idle ones, and processes that lead a lane or stand by for it.

All of it is there anyway: a worker holds an advisory lock on its number in a session that is named after its inbox, and
has entries of the batches that it has in hand or had last. A process of lanes keeps a session that is named after the
lane, the schema and itself. So nobody writes anything to be listed, and who is gone is not listed as there.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from mailroom.figures.alive import ALIVE, DATABASE, HOLDER
from mailroom.figures.leaders import reading_leaders
from mailroom.sql import locks
from mailroom.sql.operation import Operation, Sql, filled
from mailroom.values.names import APPLICATION

NAME_BYTES = 63  # of an application's name; the rest is cut off
IN_FLIGHT = "worker in flight"  # `inbox.worker.in_flight` calls its sessions so, and `dispatcher.lanes.leading` keepers
KEEPER = "keeper"
# After a session's name come the release, and the process's id and host (`mailroom.session.settings.of_this_process`).
PART = """pg_catalog.split_part(
               pg_catalog.substr(a.application_name, pg_catalog.length({name}) + 1), ' '::text, {nth})"""


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker of an inbox. Two workers of one process are two.

    `state` is busy, idle, dead (its entry is left, and its lock is not), or unknown, as behind a pooler. `host` and
    `pid` are of its process, and `release` is that of its Mailroom; of an idle one whose inbox has a long name they may
    be cut off, or None. `backend` is the process id of its session at the server. `since` is when that session began,
    and `address` where it comes from, None if this role may not see that. `messages` are those that it has in hand, and
    `last_batch_at` is when it took the last batch that is on record, which is none once it sleeps.
    """

    inbox: str
    state: str
    host: str | None
    pid: int | None
    backend: int | None
    since: datetime | None
    address: str | None
    release: str | None
    messages: int
    last_batch_at: datetime | None


@dataclass(frozen=True, slots=True)
class LaneSeen:
    """A process of a lane, which is `role`: it leads, or stands by. `since` is None if this role may not see it.

    `release` is the process's Mailroom's.
    """

    role: str
    state: str
    process: str
    since: datetime | None
    release: str


# A worker's number is its own, so its entries and its session have the same. The session's name may be cut off. One
# whose inbox has no such entry may be of another node of this database that has an inbox of the same name.
WORKERS = Sql(
    """
WITH {alive},
seen AS MATERIALIZED (
    SELECT DISTINCT ON (v.number) v.number, v.pid, r.name AS inbox, a.backend_start AS since,
           pg_catalog.host(a.client_addr) AS address,
           {release} AS release, {process} AS process
    FROM alive AS v JOIN pg_catalog.pg_stat_activity AS a ON a.pid = v.pid
    LEFT JOIN ({schema}.inbox_registry AS r CROSS JOIN LATERAL (
        SELECT pg_catalog.left('{application}{in_flight} '::text || r.name || ' '::text, {bytes})) AS n (name))
      ON a.application_name ^@ n.name
    ORDER BY v.number, r.name),
entry AS MATERIALIZED (
    SELECT w.inbox, w.host, w.pid, w.process_number::bigint & 4294967295 AS number, max(w.claimed_at) AS last_at,
           coalesce(pg_catalog.sum(w.messages) FILTER (WHERE l.pid IS NOT NULL), 0::bigint) AS messages
    FROM {schema}.worker AS w {holder} GROUP BY 1, 2, 3, 4)
SELECT coalesce(e.inbox, s.inbox),
       CASE WHEN s.number IS NOT NULL THEN CASE WHEN e.messages > 0 THEN 'busy' ELSE 'idle' END
            WHEN e.number IS NULL THEN 'unknown' ELSE 'dead' END,
       coalesce(e.host, nullif(pg_catalog.split_part(s.process, '@'::text, 2), ''::text)),
       coalesce(e.pid::bigint, CASE WHEN s.process ~ '^[0-9]{1,9}@'::text
                                    THEN pg_catalog.split_part(s.process, '@'::text, 1)::bigint END),
       s.pid::bigint, s.since, s.address, nullif(s.release, ''::text), coalesce(e.messages, 0::bigint), e.last_at
FROM entry AS e FULL JOIN seen AS s ON s.number = e.number
WHERE coalesce(e.inbox, s.inbox) IS NOT NULL ORDER BY 1, 2, 3, 4, 5
""",
    into=WorkerSeen,
    alive=filled(ALIVE, alive_lock=locks.ALIVE, database=DATABASE),
    holder=HOLDER,
    application=APPLICATION,
    in_flight=IN_FLIGHT,
    bytes=NAME_BYTES,
    release=filled(PART, name="n.name", nth=1),
    process=filled(PART, name="n.name", nth=2),
)
LANES = Sql(
    """
SELECT r.role, 'standing by', {process}, a.backend_start, {release}
FROM (SELECT role, '{application}'::text || role || ' {keeper} {schema_name} '::text AS name
      FROM pg_catalog.unnest(ARRAY['dispatcher', 'executor', 'links']) AS role) AS r
JOIN pg_catalog.pg_stat_activity AS a ON a.application_name ^@ r.name
WHERE a.datname = current_database() ORDER BY 1, 3
""",
    into=LaneSeen,
    application=APPLICATION,
    keeper=KEEPER,
    release=filled(PART, name="r.name", nth=1),
    process=filled(PART, name="r.name", nth=2),
)


def reading_workers(schema: str) -> Operation[list[WorkerSeen]]:
    """Return the workers of a node, by inbox."""
    found: list[WorkerSeen] = WORKERS.named((yield WORKERS.at(schema=schema)()))
    return found


def reading_lanes(schema: str) -> Operation[list[LaneSeen]]:
    """Return the processes of a node's lanes that have a session, by role; who leads is told by the leases."""
    leaders = {each.role: f"{each.pid}@{each.host}" for each in (yield from reading_leaders(schema)) if each.leads}
    found: list[LaneSeen] = LANES.named((yield LANES.at(schema=schema, schema_name=schema)()))
    seen = []
    for each in found:
        # The host's name may be cut off. One leads, even of two in one process.
        leads = bool(each.process) and leaders.get(each.role, "").startswith(each.process)
        if leads:
            del leaders[each.role]
        seen.append(replace(each, state="leading") if leads else each)
    return seen
