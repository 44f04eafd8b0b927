"""What publishes to a broker: the protocol that each broker's module has, and that a user can write for another one.

A publisher is used by one task, over one run of the bridge; after any error it is closed, and another one is made. It
gives no record up by itself: what was not acknowledged when it is closed is always a suffix of what it was given, in
each partition of the broker.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, runtime_checkable
from uuid import UUID

from mailroom.bridges.record import Record
from mailroom.bridges.settings import OutSettings
from mailroom.errors import Coded


@dataclass(frozen=True, slots=True)
class OutBridge:
    """A bridge out of a node, as a publisher is given it.

    `link` is the number of its link, and `node_id` and `node` are the id and the name of the node. `options` come from
    the environment of the dispatcher, and may be secret.
    """

    name: str
    link: int
    node_id: UUID
    node: str
    settings: OutSettings
    options: Mapping[str, str] = field(default_factory=dict, repr=False)


class BrokerTrouble(Exception):
    """The broker is not reached now. It is tried again and again; the text says why."""


class BrokerRefused(Coded):
    """Nothing can be done before somebody acts. It is tried again, at longer intervals; the text says what to do."""

    code = "MR-bridge-broker-refused"


class Fenced(Exception):
    """Another process publishes for this bridge by now."""


class PublishAgain(Exception):
    """Not all of the records were published. They are given again, from what is not acknowledged on."""


class RecordRefused(Coded):
    """The broker refuses one of the records that it was given; the text says why.

    With several records it does not matter which one: they are given again, one at a time.
    """

    code = "MR-bridge-record-refused"


class Answered(str):
    """A trouble of a broker that is reached, and refuses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A record that waits, with all later ones of its key, while others are published around it.

    `why` is what became of its last attempt, `Answered` if it was answered. With `error` no further attempt helps.
    """

    why: str
    error: RecordRefused | None = None


# D-bridges-5: Marks are clocks and not seqs.
class Publisher(Protocol):
    """Publishes the records of one bridge, in order. Its class is called with an `OutBridge`."""

    async def open(self) -> int:
        """Connect; return the clock up to which the broker is known to have everything, 0 if it keeps no mark.

        A predecessor that still runs must be unable to publish from then on, or the bridge is at least once.
        """
        ...

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Return the clocks and ids of this bridge's records at the broker that have a clock above `after`.

        None of them is from before `since`. It is asked when the node may have lost history, and would publish such
        messages again with other clocks. A broker that cannot be read returns none: then they come twice.
        """
        ...

    async def publish(self, records: Sequence[Record]) -> None:
        """Publish the records, and return once the broker has acknowledged all of them, however long that takes."""
        ...

    async def keep(self) -> None:
        """Set the mark anew as it is, so that the broker does not forget it. Called daily of an idle bridge."""
        ...

    async def close(self) -> None:
        """End at once, whatever is under way, and whether or not it was opened; `publish` then raises."""
        ...

    @property
    def trouble(self) -> str | None:
        """What the broker's client has reported last while it waits; None while all is well."""
        ...


@runtime_checkable
class Partitioned(Protocol):
    """A publisher whose broker has topics with partitions: each record says over how many it is spread (`parts`)."""

    async def parts(self, topics: Collection[str]) -> Mapping[str, int]:
        """Return how many partitions each of these topics has now. Raises `RecordRefused` if there is no such topic."""
        ...


@dataclass(frozen=True, slots=True)
class Numbered:
    """The numbers that the broker gave to the first and the last of some records, in one partition of a topic."""

    topic: str
    part: int
    first: int
    last: int


@runtime_checkable
class Numbering(Protocol):
    """A publisher whose broker gives each record of a partition a higher number: so it shows if it has lost records."""

    def numbered(self) -> Sequence[Numbered]:
        """Return what the broker has acknowledged since the last call, in the order in which it was published."""
        ...

    async def ends(self, places: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """Return which number is next in these partitions of topics, for those of which the broker tells it."""
        ...


@runtime_checkable
class NotingPublisher(Publisher, Protocol):
    """A publisher whose broker may delete what it has: the node notes for it what it sends."""

    def remember(self, noted: str) -> None:
        """Be told, before it is opened, what `plan` has said last for this bridge."""
        ...

    def plan(self, records: Sequence[Record]) -> str:
        """Return what is to be known when these records were published, and nobody knows which of them.

        It is noted, durably, before `publish` is called with the same records.
        """
        ...


@runtime_checkable
class PublishesAround(Publisher, Protocol):
    """A publisher that has a key wait for itself: `publish` returns once all other ones are acknowledged.

    It goes on to try those that wait. `publish` raises what ends all of them, also without records.
    """

    @property
    def waiting(self) -> Mapping[int, WaitingRow | None]:
        """Which rows it was given and are not acknowledged, the oldest first; None stands for those after others."""
        ...

    def leave_out(self, row: int) -> None:
        """Give a record up that waits; the next one of its key is tried."""
        ...
