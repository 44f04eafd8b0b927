"""The lease: which dispatcher leads, by database time. It avoids double work; safety never rests on it."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

from mailroom.session.acting import CURRENT, LOGIN, if_acting
from mailroom.sql.operation import Operation, Sql

LEASE_S = 3.0
RENEW_S = 1.0

# A lease that runs for longer was taken before the server's clock was set back. It counts from now, so that a leader
# who lives keeps it, and one who does not is replaced as soon as ever.
LATEST = "clock_timestamp() + %(lease_s)s::float8 * interval '1 s'"
# From this on it is noted. Those who noted it within a minute found the same one. `mailroom.figures.leaders` tells it.
LEAST = "interval '1 s'"
NOTED = """set_back_at = clock_timestamp(),
    set_back_by = greatest({by}, CASE WHEN {recent} THEN l.set_back_by END),
    brought_back = {keys} + CASE WHEN {recent} THEN l.brought_back ELSE 0 END"""
RECENT = "l.set_back_at BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp()"


def noting(by: str, keys: str) -> str:
    """Return what an UPDATE of a lease `l` sets, to note a clock that was set back by `by`, and keys brought back."""
    return NOTED.format(by=by, keys=keys, recent=RECENT)


HOLDER = Sql(
    "SELECT holder, backend_pid::bigint, backend_from, until > {latest} FROM {schema}.lease "
    "WHERE role = %(role)s::text",
    columns=("uuid", "bigint", "timestamptz", "boolean"),
    latest=LATEST,
)
NOTE = Sql(
    "UPDATE {schema}.lease AS l SET {noted} WHERE l.role = %(role)s::text AND l.until >= {latest} + {least}",
    noted=noting(by="l.until - ({latest})", keys="0"),
    latest=LATEST,
    least=LEAST,
)
BOUND = Sql(
    "UPDATE {schema}.lease SET until = {latest} WHERE role = %(role)s::text AND until > {latest}", latest=LATEST
)
# Takes and renews: it succeeds for the holder, and for any process once the lease has expired.
# D-daemon-1: Safety never rests on the lease.
TAKE = Sql(
    """
INSERT INTO {schema}.lease AS l
    (role, holder, epoch, until, host, pid, backend_pid, backend_from, state, counts)
VALUES (%(role)s::text, %(holder)s::uuid, 1, clock_timestamp() + %(lease_s)s::float8 * interval '1 s',
        %(host)s::text, %(pid)s::bigint, %(backend_pid)s::bigint, %(backend_from)s::timestamptz, %(state)s::text,
        %(counts)s::text::jsonb)
ON CONFLICT (role) DO UPDATE SET
    holder = excluded.holder, epoch = l.epoch + (l.holder <> excluded.holder)::integer, until = excluded.until,
    host = excluded.host, pid = excluded.pid, backend_pid = excluded.backend_pid, backend_from = excluded.backend_from,
    state = excluded.state, counts = excluded.counts
WHERE l.holder = excluded.holder OR l.until < clock_timestamp()
RETURNING epoch
""",
    columns=("bigint",),
)
# A leader that hangs may still hold "awake", so that writers do not ring for the new one, or the dispatch lock in the
# middle of a delivery. In this database only: in a copy restored beside it, the lease names a session of the original's
# leader. The conditions are the server's own; where they fail, `idle_in_transaction_session_timeout` ends the session,
# and the new leader polls meanwhile.
ENDING = """
SELECT pg_terminate_backend(a.pid)
FROM {acting}, LATERAL pg_stat_get_activity({pid}) AS a JOIN pg_roles AS r ON r.oid = a.usesysid
     JOIN pg_database AS d ON d.oid = a.datid,
     (SELECT rolsuper AS is_super FROM pg_roles WHERE rolname = {me}) AS me
WHERE a.backend_start = %(backend_from)s::timestamptz AND d.datname = current_database()
  AND (is_super OR NOT r.rolsuper AND (pg_has_role(a.usesysid, 'USAGE')
                                       OR pg_has_role('pg_signal_backend'::name, 'USAGE')))
"""
BACKEND_PID = if_acting("%(backend_pid)s::integer")
TERMINATE = (
    Sql(ENDING, ("boolean",), acting=LOGIN, me="session_user", pid=BACKEND_PID),
    Sql(ENDING, ("boolean",), acting=CURRENT, me="current_user", pid=BACKEND_PID),
)
GIVE_UP = Sql(
    """
UPDATE {schema}.lease SET until = clock_timestamp() - interval '1 s', state = 'stopped'
WHERE role = %(role)s::text AND holder = %(holder)s::uuid
"""
)


@dataclass(frozen=True, slots=True)
class Backend:
    """A session of PostgreSQL. `since` distinguishes it from later ones with the same process id."""

    pid: int
    since: datetime


class Lease:
    """One process's claim to a role of a node."""

    def __init__(self, schema: str, role: str = "dispatcher") -> None:
        self._schema = schema
        self._role = role
        self.holder: UUID = uuid4()
        self.epoch: int | None = None

    def taking(self, backend: Backend, state: str, counts: Mapping[str, object]) -> Operation[bool]:
        """Take or renew the lease; return whether this process leads. A new leader ends its predecessor's session.

        It also ends a session of its own that it has lost: that may still run a batch that never commits, and make
        all others wait.
        """
        before = yield HOLDER.at(schema=self._schema)(role=self._role, lease_s=LEASE_S)
        if before and before[0][3]:
            yield NOTE.at(schema=self._schema)(role=self._role, lease_s=LEASE_S)
            yield BOUND.at(schema=self._schema)(role=self._role, lease_s=LEASE_S)
        rows = yield TAKE.at(schema=self._schema)(
            role=self._role,
            holder=self.holder,
            lease_s=LEASE_S,
            host=platform.node(),
            pid=os.getpid(),
            backend_pid=backend.pid,
            backend_from=backend.since,
            state=state,
            counts=json.dumps(counts),
        )
        self.epoch = rows[0][0] if rows else None
        if rows and before and before[0][1:3] != (backend.pid, backend.since):
            for terminate in TERMINATE:
                if (yield terminate.at()(backend_pid=before[0][1], backend_from=before[0][2])):
                    break
        return bool(rows)

    def giving_up(self) -> Operation[None]:
        """Give up the lease, so that a standby takes over at once."""
        yield GIVE_UP.at(schema=self._schema)(role=self._role, holder=self.holder)


BACKEND = Sql(
    "SELECT a.pid::bigint, a.backend_start FROM {login}, LATERAL pg_stat_get_activity({own_pid}) AS a",
    columns=("bigint", "timestamptz"),
    login=LOGIN,
    own_pid=if_acting("pg_backend_pid()"),
)


def reading_backend() -> Operation[Backend]:
    """Return the session that runs this."""
    [row] = yield BACKEND.at()()
    return Backend(*row)
