"""Hello: what a reader does at its source when it connects, and what it writes into its own link there.

All of it runs in the source's database, over the reader's session. Nothing here locks more than the row of the link,
so the source's dispatcher never waits for a reader.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from mailroom.errors import LinkRefused, MailroomError
from mailroom.links.handshake.identity import Noted, Party, Pinned, Place, refusal
from mailroom.links.handshake.place import reading_place
from mailroom.roles.advice import grant_command
from mailroom.sql.operation import IN_TRANSACTION, Operation, Sql
from mailroom.values.names import DEFAULT_SCHEMA

# A daemon that loses its link this often, within this many seconds, has a rival.
RIVAL_TIMES = 3
RIVAL_WITHIN_S = 300.0


class LinkTaken(MailroomError):
    """Another daemon has said hello since, and has the link now."""

    code = "MR-link-taken"


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the source answers to a hello.

    `link` is the number of the link. `place` is where the source is, and `life` one stretch of its history in which
    nothing was lost. The link is `in_doubt` until the reader has found its position there in this life (`matching`).
    What was acknowledged is kept there for `keep_s` seconds. `taken_from` is the run that had the link before, if
    another one had.
    """

    link: int
    id: UUID
    incarnation: int
    place: Place
    life: UUID
    in_doubt: bool
    acked: int
    claim_seq: int | None
    claim_clock: int | None
    wanted_clock: int
    keep_s: float
    taken_from: UUID | None


HAS_LINKS = Sql("SELECT pg_catalog.to_regclass('{schema}.link') IS NOT NULL", columns=("boolean",))
# If two hellos come at once, the second one waits here, and then sees what the first one recorded.
HOLD = Sql("SELECT {schema}.link_hold(%(name)s::text), session_user::text", columns=("boolean", "text"))
LINK = Sql(
    """
SELECT number, reader_id, reader_system_id, reader_database_oid, reader_origin, run, acked, matched, claim_seq,
       claim_clock, wanted_clock, keep_s, state
FROM {schema}.link WHERE name = %(name)s::text
""",
    columns={
        "number": "bigint", "reader_id": "uuid", "reader_system_id": "bigint", "reader_database_oid": "bigint",
        "reader_origin": "bigint", "run": "uuid", "acked": "bigint", "matched": "uuid", "claim_seq": "bigint",
        "claim_clock": "bigint", "wanted_clock": "bigint", "keep_s": "float8", "state": "text",
    },
)  # fmt: skip
NODE = Sql(
    """
SELECT id, incarnation, system_id, database_oid, timeline, started_at, life, wire::bigint,
       pg_catalog.current_setting('server_encoding')
FROM {schema}.node
""",
    columns={
        "id": "uuid", "incarnation": "bigint", "system_id": "bigint", "database_oid": "bigint", "timeline": "bigint",
        "started_at": "timestamptz", "life": "uuid", "wire": "bigint", "encoding": "text",
    },
)  # fmt: skip
TWIN = Sql(
    "SELECT name FROM {schema}.link WHERE reader_id = %(id)s::uuid AND number <> %(link)s::bigint", columns=("text",)
)
NOTE = Sql(
    """
SELECT {schema}.link_hello(%(link)s::bigint, %(id)s::uuid, %(system_id)s::bigint, %(oid)s::bigint,
                           %(origin)s::bigint, %(run)s::uuid)
""",
    columns=("boolean",),
)


# Whether policies may hide rows of a table from this session, and whose it is.
HIDES = Sql(
    "SELECT current_user::text WHERE pg_catalog.row_security_active('{schema}.{table}'::regclass)", columns=("text",)
)
# Unseen rows may not be the reader's fault, and are not what they look like.
POLICIES = "policies of row security that show it all rows, or ALTER TABLE ... DISABLE ROW LEVEL SECURITY"
# What this role sees after a row, and what exists, in one snapshot. An older role has no right to ask.
MAY_ASK = Sql(
    """
SELECT coalesce(pg_catalog.has_function_privilege(
    pg_catalog.to_regprocedure('{schema}.link_next(bigint, bigint)')::oid, 'EXECUTE'), false)
""",
    columns=("boolean",),
)
HIDDEN = Sql(
    """
SELECT (SELECT t.seq FROM {schema}.transit AS t WHERE t.link = %(link)s::bigint AND t.seq > %(behind)s::bigint
        ORDER BY t.seq LIMIT 1) IS DISTINCT FROM {schema}.link_next(%(link)s::bigint, %(behind)s::bigint)
""",
    columns=("boolean",),
)


def hidden_from(schema: str, table: str) -> Operation[str | None]:
    """Return the role of this session if policies may hide rows of the table from it, else None."""
    rows = yield HIDES.at(schema=schema, table=table)()
    return str(rows[0][0]) if rows else None


def checking_sight(schema: str, source: str, link: int, seq: int, *, is_odd: bool = False) -> Operation[None]:
    """Raise `LinkRefused` if the source's policies hide the link's row `seq`, or the first one after it.

    `is_odd`: they look as if the source had lost them. Where that cannot be told from a policy, it is refused too.
    """
    role = yield from hidden_from(schema, "transit")
    if role is None:
        return
    [(may_ask,)] = yield MAY_ASK.at(schema=schema)()
    if not may_ask:
        if is_odd:
            raise LinkRefused(
                f"{source} has lost rows of the link, or its policies hide them from role {role}, which may not ask",
                source,
                grant_command("link-reader", role, schema=schema),
                code="MR-link-rows-lost-or-hidden",
            )
        return
    # Where nothing was read yet, there is no row to see.
    for behind in {max(0, seq - 1), seq}:
        [(is_hidden,)] = yield HIDDEN.at(schema=schema)(link=link, behind=behind)
        if is_hidden:
            raise LinkRefused(_hides(source, role, "rows of transit"), source, POLICIES, code="MR-link-rows-hidden")


def _hides(source: str, role: str, what: str) -> str:
    return f"{source} hides from role {role} {what}"


def greeting(schema: str, source: str, reader: Party, pinned: Pinned, run: UUID) -> Operation[Greeting]:
    """Say hello: one transaction in the database of the source, whose schema is `schema`; it has the link from then on.

    `source` is the reader's name for it, `pinned` what the reader has noted of it, `run` a random id of this daemon.
    Raises `LinkRefused`, and then writes nothing.
    """
    yield IN_TRANSACTION
    yield from _checking_links(schema, source)
    link = yield from _holding_link(schema, source, reader)
    node, party = yield from _reading_node(schema, source)
    noted_place = (
        None if node.system_id is None
        else Place(node.system_id, node.database_oid, node.timeline, node.started_at)
    )  # fmt: skip
    noted = Noted(
        noted_place, node.incarnation, link.reader_id, link.reader_system_id, link.reader_database_oid, link.number,
        link.reader_origin,
    )  # fmt: skip
    if refused := refusal(party, reader, noted, pinned):
        raise LinkRefused(refused.reason, refused.at, refused.command, code=refused.code)
    if twins := (yield TWIN.at(schema=schema)(id=reader.id, link=link.number)):
        [(twin,)] = twins
        raise LinkRefused(
            f"{reader.name} reads {source} by its link {twin} too, and by two links all would come twice",
            source,
            f"mailroom link remove {twin}, or mailroom link remove {reader.name}",
            code="MR-link-read-twice",
        )
    _check_open(source, reader, link.state, is_started=noted_place == party.place)
    [(noted_it,)] = yield NOTE.at(schema=schema)(
        link=link.number, id=reader.id, system_id=reader.place.system_id, oid=reader.place.database_oid,
        origin=pinned.origin, run=run,
    )  # fmt: skip
    check_held(noted_it)
    return Greeting(
        link.number, node.id, node.incarnation, party.place, node.life, link.matched != node.life, link.acked,
        link.claim_seq, link.claim_clock, link.wanted_clock, link.keep_s,
        link.run if link.run not in (None, run) else None,
    )  # fmt: skip


def _checking_links(schema: str, source: str) -> Operation[None]:
    [(has_links,)] = yield HAS_LINKS.at(schema=schema)()
    if not has_links:
        option = "" if schema == DEFAULT_SCHEMA else f" --schema {schema}"
        raise LinkRefused(
            f"{source} has no schema {schema!r} with links",
            source,
            f"mailroom migrate{option}",
            code="MR-link-no-schema",
        )


def _holding_link(schema: str, source: str, reader: Party) -> Operation[Any]:
    """Lock the reader's link at the source, and return its row."""
    [(is_mine, login)] = yield HOLD.at(schema=schema)(name=reader.name)
    rows = LINK.named((yield LINK.at(schema=schema)(name=reader.name)))
    if not rows:
        if role := (yield from hidden_from(schema, "link")):
            raise LinkRefused(
                _hides(source, role, f"its link {reader.name}"),
                source,
                POLICIES,
                code="MR-link-rows-hidden",
            )
        raise LinkRefused(
            f"{source} allows no reader {reader.name}",
            source,
            f"mailroom link allow {reader.name}",
            code="MR-link-not-allowed",
        )
    if not is_mine:
        raise LinkRefused(
            f"{source} knows another login for its link {reader.name} than {login}. If this one takes its place",
            source,
            f"mailroom link moved {reader.name}",
            code="MR-link-another-login",
        )
    return rows[0]


def _reading_node(schema: str, source: str) -> Operation[tuple[Any, Party]]:
    """Return the row of the source, and what it says of itself as one side of the link."""
    rows = NODE.named((yield NODE.at(schema=schema)()))
    if not rows:
        role = (yield from hidden_from(schema, "node")) or "its role"
        raise LinkRefused(_hides(source, role, "the row of node"), source, POLICIES, code="MR-link-rows-hidden")
    [node] = rows
    return node, Party(source, node.id, (yield from reading_place()), (node.wire, node.wire), node.encoding)


def _check_open(source: str, reader: Party, state: str, *, is_started: bool) -> None:
    # Only after a start is it known what was lost with the server: whether the link is in doubt, and the clock.
    if not is_started:
        raise LinkRefused(
            f"no dispatcher of {source} has started since its server did",
            source,
            "mailroom dispatcher run",
            code="MR-link-source-not-started",
        )
    if state == "cut":
        raise LinkRefused(
            f"{source} has cut its link {reader.name}: it keeps nothing more for it, and what it had kept is gone",
            source,
            f"mailroom link remove {reader.name}, then mailroom link allow {reader.name}",
            code="MR-link-cut",
        )


# Only for the run that has the link.
TOPICS = Sql(
    """
SELECT ARRAY(SELECT topic FROM {schema}.link_topic WHERE link = l.number)::text[] FROM {schema}.link AS l
WHERE l.number = %(link)s::bigint AND l.run = %(run)s::uuid
""",
    columns=("text[]",),
)
ASK = Sql("SELECT {schema}.link_ask(%(link)s::bigint, %(run)s::uuid, %(topics)s::text[])", columns=("boolean",))


def asking_topics(schema: str, link: int, run: UUID, topics: Collection[str]) -> Operation[frozenset[str]]:
    """Have exactly these topics stamped for the link from now on, at the source; return those that will be.

    Writes nothing if nothing changes. Raises `LinkTaken` if another daemon has the link, and then changes nothing.
    """
    there = yield from _stamped(schema, link, run)
    if there == set(topics):
        return there
    [(held,)] = yield ASK.at(schema=schema)(link=link, run=run, topics=sorted(topics))
    check_held(held)
    return (yield from _stamped(schema, link, run))


def _stamped(schema: str, link: int, run: UUID) -> Operation[frozenset[str]]:
    rows = yield TOPICS.at(schema=schema)(link=link, run=run)
    check_held(bool(rows))
    return frozenset(rows[0][0])


# It returns whether that is new, and null if another daemon has the link.
MATCH = Sql("SELECT {schema}.link_match(%(link)s::bigint, %(run)s::uuid)", columns=("boolean",))


def matching(schema: str, link: int, run: UUID) -> Operation[bool]:
    """Note at the source that the reader has found its position there, in this session; return whether that is new.

    A claim of the reader is settled with it. Call it after each comparison that agreed: a life of the source that began
    since is matched as well, since history is only lost when the server goes down, and the session with it. Raises
    `LinkTaken`.
    """
    [(matched,)] = yield MATCH.at(schema=schema)(link=link, run=run)
    check_held(matched is not None)
    return bool(matched)


def check_held(is_held: bool) -> None:
    """Raise `LinkTaken` unless this daemon has the link."""
    if not is_held:
        raise LinkTaken("another daemon has said hello to the source since, and has the link now")


class Rivals:
    """Notices that two daemons take a link from each other in turns, as two copies of one reader would."""

    def __init__(self) -> None:
        self._lost: list[float] = []

    def lost(self, at: float) -> bool:
        """Count that the link was taken, at this time in seconds; return whether it was so again and again."""
        self._lost = [*(before for before in self._lost if at - before < RIVAL_WITHIN_S), at]
        return len(self._lost) >= RIVAL_TIMES
