"""Who is who: what the place of a node means, and which hellos are refused. Pure decisions, no database.

A node is known by its id. Its `Place` says where it is: a node that is found at another place was moved, or is a copy.
A dispatcher compares its node's place with the recorded one (`start`). At each hello the source compares both sides
with what each has recorded about the other (`refusal`).
"""

from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from mailroom.links.handshake.wire import VERSION
from mailroom.order.clock import fitting

# More clocks than a lost tail of history can have given out: at a million messages per second, those of an hour. There
# is room for two billion jumps.
JUMP = 2**32

# The versions of the columns that cross a link: the lowest and the highest that this program speaks.
WIRES = (1, VERSION)
ENCODING = "UTF8"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is: the server's system identifier, the database's oid, the timeline, and when the server started.

    A copy of the server's files keeps the first three; a promoted standby the first two. The start's time differs
    after each.
    """

    system_id: int
    database_oid: int
    timeline: int
    started_at: datetime

    def is_where(self, other: "Place") -> bool:
        """Return whether it is the same database of the same server, though perhaps of another time."""
        return (self.system_id, self.database_oid) == (other.system_id, other.database_oid)


@dataclass(frozen=True, slots=True)
class Start:
    """What a dispatcher does when it connects.

    With `jumps`, in one durable transaction under the dispatch lock: clock and ceiling become `jumped`, `life` is made
    anew, and `note` is written. Otherwise nothing is written. With `moved`, readers are refused until
    `mailroom node moved` or `mailroom node new-id` notes the place found.
    """

    jumps: bool
    moved: bool
    note: Place


def start(noted: Place | None, found: Place, *, is_linked: bool = True) -> Start:
    """Decide what follows from the place `found`, if `noted` was written down before; None if nothing was.

    The same place: nothing is lost, unless a machine was put back while it ran, which its readers find out. Otherwise
    history may be lost, and the clock jumps. Of a node that was moved, system identifier and oid stay as noted: that is
    how the next hello and the next start know it. It jumps at each start: a dump put into another database of the same
    server has its timeline and the time of its start. A node without links is at home wherever it is: it has no readers
    that could mistake it for another one.
    """
    if noted is None or not is_linked:
        return Start(jumps=found != noted, moved=False, note=found)
    note = replace(found, system_id=noted.system_id, database_oid=noted.database_oid)
    return Start(jumps=found != noted, moved=not found.is_where(noted), note=note)


def jumped(clock: int, ceiling: int) -> int:
    """Return the clock and ceiling of a node that may have lost history: beyond all clocks that it can have given out.

    Raises `ClockOverflow` if there are no clocks left.
    """
    return fitting(max(clock, ceiling) + JUMP)


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a link at a hello, as it is now.

    `name` is what the other side calls it. `wires` are the lowest and the highest version of the columns that it
    speaks, `encoding` is its database's.
    """

    name: str
    id: UUID
    place: Place
    wires: tuple[int, int] = WIRES
    encoding: str = ENCODING


@dataclass(frozen=True, slots=True)
class Pinned:
    """What the target has recorded about its source; all None before the first hello.

    `link` is the number that the source gives the link. `origin` is the number that the target gives the source, and
    never gives again: what the target has received is noted under it.
    """

    id: UUID | None = None
    incarnation: int | None = None
    system_id: int | None = None
    timeline: int | None = None
    link: int | None = None
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Noted:
    """What the source has recorded: its own place and incarnation, its reader's id and place; None before the first.

    `link` is the number of the link, and `reader_origin` the number that the reader gave this source then.
    """

    place: Place | None
    incarnation: int
    reader_id: UUID | None = None
    reader_system_id: int | None = None
    reader_database_oid: int | None = None
    link: int = 0
    reader_origin: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a hello is refused, and the command that helps, with the side at which it is run; `code` is the error's."""

    reason: str
    at: str
    command: str
    code: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.reason}; at {self.at}: {self.command}"


def common_wire(source: tuple[int, int], reader: tuple[int, int]) -> int | None:
    """Return the highest version of the columns that both sides speak, None if there is none."""
    highest = min(source[1], reader[1])
    return highest if highest >= max(source[0], reader[0]) else None


def refusal(source: Party, reader: Party, noted: Noted, pinned: Pinned) -> Refusal | None:
    """Return why `source` and `reader` must not go on, None if they may.

    `noted` is what the source has recorded, `pinned` what the reader has. The order of the checks: what one side could
    not even write down, then who they are, then where and when.
    """
    return (
        _unreadable(source, reader)
        or _other_node(source, reader, noted, pinned)
        or _elsewhere(source, reader, noted)
        or _older(source, reader, noted, pinned)
        or _other_link(source, reader, noted, pinned)
    )


def _unreadable(source: Party, reader: Party) -> Refusal | None:
    for party in (source, reader):
        if party.encoding != ENCODING:
            return Refusal(
                f"the database of {party.name} has the encoding {party.encoding}, and links need {ENCODING}",
                party.name,
                f"createdb --template=template0 --encoding={ENCODING} ..., and move the node there with pg_dump",
                code="MR-link-encoding",
            )
    if common_wire(source.wires, reader.wires) is None:
        older, newer = sorted((source, reader), key=lambda party: party.wires)
        return Refusal(
            f"{older.name} speaks the link's columns up to version {older.wires[1]}, and {newer.name} from version "
            f"{newer.wires[0]} on",
            older.name,
            "pip install --upgrade pg-mailroom, then mailroom migrate",
            code="MR-link-versions",
        )
    return None


def _other_node(source: Party, reader: Party, noted: Noted, pinned: Pinned) -> Refusal | None:
    if source.id == reader.id:
        return Refusal(
            f"{source.name} and {reader.name} have one node id, {source.id}: one is a copy of the other, or both are "
            "one database",
            "the copy",
            "mailroom node new-id",
            code="MR-link-one-node-id",
        )
    if pinned.id not in (None, source.id):
        return Refusal(
            f"{source.name} is another node than before: {source.id}, not {pinned.id}. Correct the way to it, or if "
            "another node is meant",
            reader.name,
            f"mailroom link remove {source.name}, then mailroom link add {source.name}",
            code="MR-link-another-source",
        )
    if noted.reader_id not in (None, reader.id):
        return Refusal(
            f"{reader.name} is another node than the one that {source.name} knows by this name: {reader.id}, not "
            f"{noted.reader_id}. If it takes the place of that one",
            source.name,
            f"mailroom link moved {reader.name}",
            code="MR-link-another-reader",
        )
    return None


def _elsewhere(source: Party, reader: Party, noted: Noted) -> Refusal | None:
    if noted.place is not None and not source.place.is_where(noted.place):
        return Refusal(
            f"{source.name} is in another database or server than before: it was moved, or is a copy of a node that "
            "lives on",
            source.name,
            "mailroom node moved, or for a copy mailroom node new-id",
            code="MR-link-source-moved",
        )
    before = (noted.reader_system_id, noted.reader_database_oid)
    if before != (None, None) and before != (reader.place.system_id, reader.place.database_oid):
        return Refusal(
            f"{reader.name} reads from another database or server than before. If it was moved, and is not a copy of a "
            "node that lives on",
            source.name,
            f"mailroom link moved {reader.name}",
            code="MR-link-reader-moved",
        )
    return None


def _older(source: Party, reader: Party, noted: Noted, pinned: Pinned) -> Refusal | None:
    is_same_server = pinned.system_id == source.place.system_id
    if is_same_server and pinned.timeline is not None and source.place.timeline < pinned.timeline:
        return Refusal(
            f"{source.name} is on timeline {source.place.timeline}, and timeline {pinned.timeline} of the same server "
            "was seen: this is an old primary. If it is to be the source again",
            reader.name,
            f"mailroom link moved {source.name}",
            code="MR-link-old-primary",
        )
    if pinned.incarnation is not None and noted.incarnation < pinned.incarnation:
        return Refusal(
            f"{source.name} has incarnation {noted.incarnation}, and incarnation {pinned.incarnation} of it was read: "
            "it was put back to a time before that",
            source.name,
            f"mailroom node restored --above {pinned.incarnation}",
            code="MR-link-source-put-back",
        )
    return None


def _other_link(source: Party, reader: Party, noted: Noted, pinned: Pinned) -> Refusal | None:
    # Both would read rows again whose receipt is recorded elsewhere, or no longer anywhere.
    anew = f"mailroom link remove {reader.name}, then mailroom link allow {reader.name}"
    if pinned.link is not None and noted.link < pinned.link:
        return Refusal(
            f"{source.name} has its link {noted.link} for {reader.name}, and link {pinned.link} was read: it was put "
            "back to a time before that",
            source.name,
            anew,
            code="MR-link-put-back",
        )
    if noted.reader_origin is not None and pinned.origin > noted.reader_origin:
        return Refusal(
            f"{reader.name} has removed {source.name} and added it again, and so has forgotten what it received",
            source.name,
            anew,
            code="MR-link-forgotten",
        )
    return None
