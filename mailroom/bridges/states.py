"""The state of a node's bridges."""

from dataclasses import dataclass
from datetime import datetime

from mailroom.bridges.into import reading_positions
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.bridges.source import BrokerPosition
from mailroom.links.states import reading_readers, reading_sources
from mailroom.schema.checks import checking
from mailroom.sql.operation import Operation, Sql
from mailroom.values.readable import ReadableRepr


@dataclass(frozen=True, slots=True, repr=False)
class OutState(ReadableRepr):
    """A bridge out of this node.

    `state` is open, or something is not published: `since` says since when, and `why` why and what to do. The state is
    then unreachable or failing, or refused if some keys wait, which is tried again and again; stopped, which is tried
    again as well, and needs somebody to act; or cut, when nothing is stamped for it any more. One that is stopped since
    the broker has lost records is not tried again before somebody resumes it. `backlog` counts the
    messages that wait for it, or that were given up when it was cut, and `lag_s` is the age in seconds of the oldest of
    them, 0 if there is none. Up to row `acked` of its link the broker has everything; `seen_at` is when it last
    acknowledged something or was connected to, None if never. `topics` are those that it publishes, `commands` those
    whose commands and replies it gets unless an inbox here does. With more than `max_rows` waiting it is cut, and what
    it has published is kept for `keep_s` seconds more.
    """

    name: str
    state: str
    why: str | None
    since: datetime | None
    backlog: int
    lag_s: float
    acked: int
    topics: tuple[str, ...]
    commands: tuple[str, ...]
    seen_at: datetime | None
    settings: OutSettings
    keep_s: float
    max_rows: int | None


@dataclass(frozen=True, slots=True, repr=False)
class InState(ReadableRepr):
    """A bridge into this node.

    `state` is open, or nothing is taken in: `since` says since when, and `why` why and what to do. The state is then
    unreachable or failing, which is tried again and again; stopped, which is tried again as well, and needs somebody to
    act; or excluded by hand. One that is stopped since records are lost at the broker is not tried again before
    somebody resumes it. `received` counts the messages that came by it, and `received_at` is when the last one did,
    None if none came. `positions` say where it goes on at the broker. `topics` are those that inboxes here subscribe to
    from it. If this node was put back in time, `lacks` are the times between which it may have taken from a queue what
    it has no longer, until somebody resumes the bridge; the first is None if it had taken nothing before.
    """

    name: str
    state: str
    why: str | None
    since: datetime | None
    received: int
    received_at: datetime | None
    positions: tuple[BrokerPosition, ...]
    topics: tuple[str, ...]
    settings: InSettings
    lacks: tuple[datetime | None, datetime] | None = None

    @property
    def flows(self) -> bool:
        """Whether it takes in, or somebody has excluded it."""
        return self.state in ("open", "excluded")


@dataclass(frozen=True, slots=True, repr=False)
class BridgeStates(ReadableRepr):
    """The bridges of a node, by name: those `out` of it, and those `into` it."""

    out: tuple[OutState, ...]
    into: tuple[InState, ...]


def cut_text(name: str, max_rows: int | None) -> str:
    """Return why the bridge `name` is cut, and what to do."""
    by_hand = "somebody has cut it"
    cause = by_hand if max_rows is None else f"more than {max_rows:,} messages waited for it, or {by_hand}"
    return (
        f"{cause}. What waited is given up, and nothing is stamped for it any more. To publish again what is sent from "
        f"then on: mailroom bridge remove {name}, then mailroom bridge out {name} ..."
    )


# D-bridges-1: A bridge is a link or an origin, not a third thing.
OUTS = Sql(
    "SELECT link, settings::text, coalesce(trouble, state), why, since FROM {schema}.bridge_out",
    columns=("bigint", "text", "text", "text", "timestamptz"),
)


def reading_bridges(schema: str) -> Operation[BridgeStates]:
    """`Bridges.status` as an operation."""
    yield from checking(schema)
    links = yield from reading_readers(schema, bridges=True)
    rows = yield OUTS.at(schema=schema)()
    outs = {link: others for link, *others in rows}
    found = []
    for link in links:
        if link.link not in outs:  # removed between the two statements
            continue
        settings, state, why, since = outs[link.link]
        if link.state == "cut":  # whatever was wrong with its broker
            state, why, since = "cut", f"{cut_text(link.name, link.max_rows)} [MR-bridge-cut]", None
        found.append(
            OutState(
                link.name, state, why, since, link.backlog, link.lag_s, link.acked, link.topics, link.commands,
                link.seen_at, OutSettings.of(settings), link.keep_s, link.max_rows,
            )
        )  # fmt: skip
    return BridgeStates(tuple(found), (yield from _reading_ins(schema)))


INS = Sql(
    """
SELECT o.name, o.number, b.settings::text, b.lost, b.lacks_from, b.lacks_to
FROM {schema}.bridge_in AS b JOIN {schema}.origin AS o ON o.number = b.origin
""",
    columns={
        "name": "text",
        "origin": "bigint",
        "settings": "text",
        "lost": "text",
        "since": "timestamptz",
        "until": "timestamptz",
    },
)


def _reading_ins(schema: str) -> Operation[tuple[InState, ...]]:
    bridges = {
        each.name: (
            each.origin,
            InSettings.of(each.settings),
            each.lost,
            None if each.until is None else (each.since, each.until),
        )
        for each in INS.named((yield INS.at(schema=schema)()))
    }
    found = []
    for source in (yield from reading_sources(schema, bridges=True)):
        if source.name not in bridges:  # added between the two statements
            continue
        origin, settings, lost, lacks = bridges[source.name]
        state, why = source.state, source.why
        if lost is not None and state != "excluded":  # whatever else is wrong meanwhile
            state, why = "stopped", f"{lost} [MR-bridge-position-gone]"
        positions = yield from reading_positions(schema, origin)
        found.append(
            InState(
                source.name, state, why, source.since, source.position, source.received_at,
                tuple(positions), source.topics, settings, lacks,
            )
        )  # fmt: skip
    return tuple(found)
