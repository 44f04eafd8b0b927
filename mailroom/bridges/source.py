"""What takes in from a broker: the protocol that each broker's module has, and that a user can write for another one.

The database says where to go on, never the broker: what a source is told by `begin` is the position of the last commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from mailroom.bridges.arrival import Arrived
from mailroom.bridges.settings import InSettings


@dataclass(frozen=True, slots=True)
class InBridge:
    """A bridge into a node, as a source is given it.

    `origin` is its number, and `node_id` the id of the node. `options` come from the environment of the dispatcher, and
    may be secret.
    """

    name: str
    origin: int
    node_id: UUID
    settings: InSettings
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class BrokerPosition:
    """Where to go on in one partition of a topic: with the record at offset `next`.

    `leader_epoch` is that of the record before it, where the broker has such epochs: by it a log is noticed that was
    cut back and written anew. `log` says which log it is, where the broker tells that: a topic, or stream, that was
    deleted and made anew under the same name is another one.
    """

    topic: str
    part: int
    next: int
    leader_epoch: int | None = None
    log: str | None = None


class PositionGone(Exception):
    """The broker no longer has the record at a position: `why` says so, and `first` is the next offset that it has.

    So it is if another log has the name of that one now.
    """

    def __init__(self, position: BrokerPosition, first: int, why: str) -> None:
        super().__init__(why)
        self.position = position
        self.first = first


class PartsChanged(Exception):
    """There are partitions that `begin` knew nothing of."""


class BrokerWasAway(Exception):
    """The broker was away: before its log is read on, it has to be looked whether it is still the same."""


class RecordSource(Protocol):
    """Reads the records of one bridge, in the order of each partition. Its class is called with an `InBridge`."""

    async def open(self) -> str:
        """Connect; return a name of the cluster that no other one has, unless each record says its `place`."""
        ...

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Read from these positions on; return those at which it begins in partitions that are not among them.

        It reads nothing of the latter until it is called again with them. Raises `PositionGone`.
        """
        ...

    async def read(self, wait_s: float) -> Sequence[Arrived | BrokerPosition]:
        """Return the next records, or none if none came within this many seconds.

        A position among them says that its partition has no more records before it. Raises `PositionGone`,
        `PartsChanged` and `BrokerWasAway`; after the latter two `begin` is called again.
        """
        ...

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Be told that everything before these positions is committed; for a broker that shows it, or deletes it.

        A queue forgets it then, and gives out again what it has given out and was not told of.
        """
        ...

    async def close(self) -> None:
        """End at once, whatever is under way, and whether or not it was opened."""
        ...

    @property
    def trouble(self) -> str | None:
        """What the broker's client has reported last while it waits; None while all is well."""
        ...
