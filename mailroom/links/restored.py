"""What an operator says about a node that was moved, copied or put back to an earlier time.

Nothing in the database tells a move from a copy, or a machine that was put back while it ran from one that was not. So
the node waits with its readers until an operator says which it is.
"""

from dataclasses import dataclass
from uuid import UUID

from mailroom.errors import MailroomError
from mailroom.links.handshake.diverged import reading_incarnation, renewing_locked
from mailroom.links.start import jumping, reading_home
from mailroom.order.clock import DISPATCH_LOCK
from mailroom.order.total import raising_stable
from mailroom.schema import acts
from mailroom.schema.audit import auditing, check_actor
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.sql.sight import NODE_ROW, the_one

# Its next start notes where it is, and the clock jumps once.
NEW_ID = Sql(
    """
UPDATE {schema}.node
SET id = gen_random_uuid(), incarnation = 1, resumed = 1, life = gen_random_uuid(), system_id = NULL,
    database_oid = NULL, timeline = NULL, started_at = NULL
RETURNING id
""",
    columns=("uuid",),
)
LEFT = Sql(
    """
SELECT id, (SELECT count(*) FROM {schema}.link), (SELECT count(*) FROM {schema}.transit),
       (SELECT count(*) FROM {schema}.origin) FROM {schema}.node
""",
    columns=("uuid", "bigint", "bigint", "bigint"),
)
TABLES = (
    *("link", "link_topic", "link_allowed", "transit", "origin", "receipt", "known"),
    *("bridge_out", "bridge_known", "bridge_parts", "bridge_last", "bridge_done"),
    *("bridge_in", "bridge_position", "bridge_mark"),
)
EMPTY = Sql("DELETE FROM {schema}.{table}")


@dataclass(frozen=True, slots=True)
class NewId:
    """A copy's id before and after (the same in a dry run), and what it gives up.

    That are links of readers, rows stamped for them, and sources.
    """

    before: UUID
    id: UUID
    links: int
    rows: int
    origins: int


def taking_new_id(schema: str) -> Operation[UUID]:
    """Turn a copy into another node, since its links belong to the node that was copied; return its id.

    It reads no node and no node reads it any more, its incarnation is 1, and everything else stays as it is. In a READ
    COMMITTED transaction of its own: nothing is delivered before it ends.
    """
    yield DISPATCH_LOCK.at(schema=schema)()
    for table in TABLES:
        yield EMPTY.at(schema=schema, table=table)()
    (id,) = the_one((yield NEW_ID.at(schema=schema)()), NODE_ROW, schema)
    return UUID(str(id))


def saying_copied(schema: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[NewId]:
    """Do `taking_new_id`, with an entry in the audit; with `dry_run` only count what it would give up."""
    check_actor(actor, why)
    yield IN_TRANSACTION
    before, links, rows, origins = the_one((yield LEFT.at(schema=schema)()), NODE_ROW, schema)
    if dry_run:
        return NewId(before, before, links, rows, origins)
    id = yield from taking_new_id(schema)
    yield from raising_stable(schema)  # total inboxes wait for nobody any more
    yield from auditing(schema, acts.NODE_NEW_ID, [(None, str(id), rows)], actor, why, f"{before} -> {id}")
    return NewId(before, id, links, rows, origins)


def saying_moved(schema: str, *, actor: str, why: str | None = None, dry_run: bool = False) -> Operation[bool]:
    """Let readers in again at the place where the node is now; return False if it is where it was noted.

    It was moved, and lives nowhere else. What it lost on the way, if anything, its readers find out. In a READ
    COMMITTED transaction, durable once that commits.
    """
    check_actor(actor, why)
    yield IN_TRANSACTION
    home = yield from reading_home(schema)
    if dry_run or not home.is_elsewhere:
        return home.is_elsewhere
    yield from jumping(schema, is_here=True)
    yield from auditing(schema, acts.NODE_MOVED, [(None, None, 0)], actor, why)
    return True


def saying_restored(
    schema: str, *, above: int = 0, actor: str, why: str | None = None, dry_run: bool = False
) -> Operation[int]:
    """Take a new incarnation, and return it: history was lost without a start that would have shown it.

    So it is with a machine that was put back while it ran, a dump that was restored into the same database, or changes
    by hand. `above` is an incarnation that readers have seen; the new one is beyond it too. In a READ COMMITTED
    transaction, durable once that commits. Raises `MailroomError` for a node that was moved: that is to be said first.
    """
    check_actor(actor, why)
    yield IN_TRANSACTION
    home = yield from reading_home(schema)
    if home.is_elsewhere:
        raise MailroomError(
            "This node is in another database or server than before. Say so first: mailroom node moved, or for a copy "
            "of a node that lives on: mailroom node new-id",
            code="MR-node-moved",
        )
    if dry_run:  # a clock that jumps would not come back with the transaction
        return max((yield from reading_incarnation(schema)), above) + 1
    yield from jumping(schema, is_here=True)
    renewed = yield from renewing_locked(schema, restored=True, above=above, actor=actor, why=why)
    if renewed is None:
        raise AssertionError("a restored node always takes a new incarnation")
    if not renewed.claims:
        yield from auditing(
            schema, acts.NODE_RESTORED, [(None, None, 0)], actor, why, f"incarnation {renewed.incarnation}"
        )
    return renewed.incarnation
