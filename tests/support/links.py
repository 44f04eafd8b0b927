"""Two nodes with a link between them, as the commands leave them, without a daemon: by plain SQL."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from dispatcher.links.at_source.bounds import Position, bounding, reading_position
from dispatcher.links.at_source.fetch import FetchedBatch, fetching
from dispatcher.links.receive import Reception, receiving
from mailroom.links.handshake.target import wanted_subscriptions
from mailroom.sql.operation import Operation
from mailroom.sql.runner import run
from tests.support.node import SCHEMA, Node

# What a row of transit has if a test does not say it. Seq, sent_clock and id are given to each.
PLAIN: dict[str, Any] = {
    "topic": "order.paid", "key": "k", "kind": "M", "message_type": "U", "value": b"\xf6", "sent_at": "2026-01-01 UTC",
}  # fmt: skip


@dataclass(frozen=True)
class Linked:
    """`target` reads `source`: the numbers of the link at the source and of the origin at the target."""

    source: Node
    target: Node
    link: int
    origin: int
    name: str
    run: UUID

    @property
    def source_id(self) -> UUID:
        """The source's node id."""
        found: UUID = self.source.value("SELECT id FROM mailroom.node")
        return found

    def inbox(self, name: str, *topics: str, origin: str | None = None, since: int = 0, order: str = "key") -> None:
        """Make an inbox at the target that subscribes to the source's messages of these topics."""
        if not self.target.rows("SELECT FROM mailroom.inbox_registry WHERE name = %s", name):
            self.target.inbox(name, order=order)
        for topic in topics:
            self.target.connection.execute(
                "INSERT INTO mailroom.subscription (topic, inbox, origin, since) VALUES (%s, %s, %s, %s)",
                [topic, name, self.name if origin is None else origin, since],
            )

    def put(self, *rows: dict[str, Any], first: int | None = None) -> list[UUID]:
        """Put rows into transit as a stamp does, with the columns given, from `first` on; return their message ids.

        Each has the next seq, and a sent_clock that is one more than the one before if it gives none.
        """
        newest = self.source.rows(
            "SELECT seq, sent_clock FROM mailroom.transit WHERE link = %s ORDER BY seq DESC LIMIT 1", self.link
        )
        seq, clock = newest[0] if newest else (0, 0)
        seq = seq if first is None else first - 1
        inserts: list[tuple[str, dict[str, Any]]] = []
        for row in rows:
            seq, clock = seq + 1, row.get("sent_clock", clock + 1)
            given = PLAIN | {"message_id": uuid4(), "source": "tests"} | row
            given |= {"link": self.link, "seq": seq, "sent_clock": clock}
            names = ", ".join(given)
            marks = ", ".join(f"%({name})s" for name in given)
            inserts.append(
                (f"INSERT INTO mailroom.transit ({names}, stamped_at) VALUES ({marks}, clock_timestamp())", given)
            )
        with self.source.connection.pipeline():
            for insert, given in inserts:
                self.source.connection.execute(insert.encode(), given)
        return [given["message_id"] for _, given in inserts]

    def trim(self, below: int) -> None:
        """Delete the rows below a seq, as the source does once they are acknowledged."""
        self.source.connection.execute("DELETE FROM mailroom.transit WHERE link = %s AND seq < %s", [self.link, below])

    def position(self) -> Position:
        """Return the target's position."""
        return run(self.target.connection, reading_position(SCHEMA, self.origin))

    def batch(self, position: Position, rows: int = 10_000, max_bytes: int = 2**25) -> FetchedBatch:
        """Fetch the rows after a position, which the source must still have."""
        found = run(self.source.connection, bounding(SCHEMA, self.link, position, rows=rows, max_bytes=max_bytes))
        assert found.verdict == "agrees"
        assert found.last is not None
        return run(self.source.connection, fetching(SCHEMA, self.link, after=position.seq, to=found.last))

    def take(self, *, rows: int = 10_000, **options: Any) -> Reception:
        """Fetch one batch and receive it in a transaction of the target."""
        position = self.position()
        with self.target.connection.transaction():
            return run(
                self.target.connection,
                receiving(SCHEMA, self.origin, self.batch(position, rows), position, **options),
            )

    def receipts(self, columns: str = "first, last, sent_clock") -> Sequence[Any]:
        """Return the target's receipts, oldest first."""
        return self.target.rows(f"SELECT {columns} FROM mailroom.receipt WHERE origin = %s ORDER BY last", self.origin)


def linked(source: Node, target: Node, topics: Iterable[str], *, name: str = "north", reader: str = "south") -> Linked:
    """Link two nodes: `target` calls `source` by `name`, wants these topics, and is called `reader` there.

    The target gets a node id of its own if both come from one template.
    """
    source_id = source.value("SELECT id FROM mailroom.node")
    if source_id == target.value("SELECT id FROM mailroom.node"):
        target.connection.execute("UPDATE mailroom.node SET id = gen_random_uuid()")
    source.connection.execute("UPDATE mailroom.node SET name = %s", [name])
    run = uuid4()
    reader_id = target.value("SELECT id FROM mailroom.node")
    link = source.value(
        "INSERT INTO mailroom.link (name, reader_id, run, seen_at) VALUES (%s, %s, %s, now()) RETURNING number",
        reader, reader_id, run,
    )  # fmt: skip
    for topic in topics:
        source.connection.execute("INSERT INTO mailroom.link_topic (topic, link) VALUES (%s, %s)", [topic, link])
    origin = target.value(
        "INSERT INTO mailroom.origin (name, reader, id, incarnation, link) VALUES (%s, %s, %s, 1, %s) RETURNING number",
        name, reader, source_id, link,
    )  # fmt: skip
    return Linked(source, target, link, origin, name, run)


def wanted_topics(schema: str, origin: str) -> Operation[list[str]]:
    """Return what the node subscribes to at the source of that name, each topic once."""
    return sorted({*(yield from wanted_subscriptions(schema, origin)).values()})
