"""The state of a node's links, on either side."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from mailroom.figures.links import DONE
from mailroom.schema.checks import checking
from mailroom.sql.operation import Operation, Sql
from mailroom.values.readable import ReadableRepr


@dataclass(frozen=True, slots=True, repr=False)
class ReaderState(ReadableRepr):
    """A node that reads this one, as this node sees it.

    `state` is open, or cut: then nothing is stamped for it any more. `in_doubt`: the reader has not found its position
    here since this node may last have lost something. `backlog` counts the messages that are stamped for it and not
    acknowledged, those above `acked` up to `last`, and `lag_s` is the age in seconds of the oldest of them, 0 if there
    is none. `topics` are those that it wants, `allowed` those that it may ask for, empty for all messages and events,
    and `commands` those whose commands and replies it gets unless an inbox here does. `seen_at` is when a daemon of it
    last said hello or acknowledged something, None if none ever did. What is acknowledged is kept for `keep_s` seconds
    more; with `max_rows` waiting the link is cut.
    """

    name: str
    state: str
    in_doubt: bool
    backlog: int
    lag_s: float
    acked: int
    last: int
    topics: tuple[str, ...]
    allowed: tuple[str, ...]
    commands: tuple[str, ...]
    seen_at: datetime | None
    id: UUID | None
    link: int
    keep_s: float
    max_rows: int | None


@dataclass(frozen=True, slots=True, repr=False)
class SourceState(ReadableRepr):
    """A node that this one reads, as this node sees it.

    `state` is open, or the source is not read: `since` says since when, and `why` says why and what to do. The state is
    then unreachable, if there is no way to it, or failing, if it is reached and something goes wrong; both are tried
    again and again. Or it is stopped, until an operator acts, or excluded by hand. `position` is the last row of its
    link that was received, and `shown` the clock up to which everything of it is here. `received_at` is when that was;
    None if nothing came yet. `topics` are those that inboxes here subscribe to there. The source has not yet been told
    of those in `pending`, and refuses those in `refused`. `service` is the entry of the service file that leads there;
    None if the environment does. `reader` is this node's name there.
    """

    name: str
    state: str
    why: str | None
    position: int
    shown: int
    received_at: datetime | None
    topics: tuple[str, ...]
    pending: tuple[str, ...]
    refused: tuple[str, ...]
    reader: str
    service: str | None
    id: UUID | None
    incarnation: int | None
    link: int | None
    since: datetime | None

    @property
    def flows(self) -> bool:
        """Whether everything that is subscribed to comes, or an operator has excluded the source."""
        return self.state == "excluded" or (self.state == "open" and not self.refused)


@dataclass(frozen=True, slots=True, repr=False)
class LinkStates(ReadableRepr):
    """The links of a node: the `readers` that may read it, and the `sources` that it reads, each by name."""

    readers: tuple[ReaderState, ...]
    sources: tuple[SourceState, ...]


# Each probe walks one row of the primary key.
READERS = Sql(
    """
SELECT l.name, l.state, l.matched IS DISTINCT FROM n.life,
       greatest(coalesce(newest.seq, 0::bigint) - l.acked - {done}, 0::bigint),
       greatest(extract(epoch FROM clock_timestamp() - oldest.stamped_at)::float8, 0::float8), l.acked,
       coalesce(newest.seq, 0::bigint),
       ARRAY(SELECT topic FROM {schema}.link_topic AS t WHERE t.link = l.number ORDER BY topic)::text[],
       ARRAY(SELECT topic FROM {schema}.link_allowed AS a WHERE a.link = l.number ORDER BY topic)::text[],
       ARRAY(SELECT topic FROM {schema}.link_allowed AS a WHERE a.link = l.number AND commands ORDER BY topic)::text[],
       l.seen_at, l.reader_id, l.number, l.keep_s, l.max_rows
FROM {schema}.link AS l CROSS JOIN {schema}.node AS n
LEFT JOIN LATERAL (
    SELECT seq FROM {schema}.transit AS t WHERE t.link = l.number ORDER BY seq DESC LIMIT 1) AS newest ON true
LEFT JOIN LATERAL (
    SELECT stamped_at FROM {schema}.transit AS t WHERE t.link = l.number AND t.seq > l.acked
    ORDER BY seq LIMIT 1) AS oldest ON true
WHERE %(bridges)s::boolean = EXISTS (SELECT FROM {schema}.bridge_out AS b WHERE b.link = l.number)
ORDER BY l.name
""",
    into=ReaderState,
    done=DONE,
)
SOURCES = Sql(
    """
SELECT o.name, coalesce(o.trouble, o.state), o.why,
       coalesce(r.last, 0::bigint), greatest(o.shown, r.sent_clock), r.received_at,
       ARRAY(SELECT DISTINCT topic FROM {schema}.subscription WHERE origin IN (o.name, '*') ORDER BY topic)::text[],
       ARRAY(SELECT DISTINCT topic FROM {schema}.subscription AS s WHERE origin IN (o.name, '*')
             AND s.id <> ALL (o.told || o.refused) ORDER BY topic)::text[],
       ARRAY(SELECT DISTINCT topic FROM {schema}.subscription AS s WHERE origin IN (o.name, '*')
             AND s.id = ANY (o.refused) ORDER BY topic)::text[],
       coalesce(o.reader, n.name), o.service, o.id, o.incarnation, o.link, o.since
FROM {schema}.origin AS o CROSS JOIN {schema}.node AS n
LEFT JOIN LATERAL (
    SELECT last, sent_clock, received_at FROM {schema}.receipt WHERE origin = o.number
    ORDER BY last DESC LIMIT 1) AS r ON true
WHERE %(bridges)s::boolean = EXISTS (SELECT FROM {schema}.bridge_in AS b WHERE b.origin = o.number)
ORDER BY o.name
""",
    into=SourceState,
)


def reading_states(schema: str) -> Operation[LinkStates]:
    """`Links.status` as an operation."""
    yield from checking(schema)
    return LinkStates((yield from reading_readers(schema)), (yield from reading_sources(schema)))


def reading_readers(schema: str, *, bridges: bool = False) -> Operation[tuple[ReaderState, ...]]:
    """Return the state of the nodes that read this one, by name; or of its bridges, whose reader is a broker."""
    rows = yield READERS.at(schema=schema)(bridges=bridges)
    return tuple(READERS.named(rows))


def reading_sources(schema: str, *, bridges: bool = False) -> Operation[tuple[SourceState, ...]]:
    """Return the state of the nodes that this one reads, by name; or of its bridges, whose source is a broker."""
    rows = yield SOURCES.at(schema=schema)(bridges=bridges)
    return tuple(SOURCES.named(rows))
