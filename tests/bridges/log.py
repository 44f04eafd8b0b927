"""A broker of the tests' own: a log in memory that can hold, refuse and lose, by the protocols that users implement."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from mailroom.bridges.arrival import Arrived
from mailroom.bridges.publisher import BrokerTrouble, Numbered, OutBridge, RecordRefused
from mailroom.bridges.record import Record
from mailroom.bridges.source import BrokerPosition, InBridge, PartsChanged, PositionGone


@dataclass
class Log:
    """The broker: what was published, and what can be read, by topic and partition.

    Each topic has so many `partitions`. `mark` is kept for publishers that are exactly once. `refuse` says why a record
    is refused, None if it is not. `away` says why nobody is reached. While `held` is set, what is in the log is not
    acknowledged; who waits is told by `answers` that records flow nevertheless, and `asked` counts that.
    """

    records: list[Record] = field(default_factory=list)
    partitions: int = 1
    mark: int = 0
    parts: dict[tuple[str, int], list[Arrived | None]] = field(default_factory=dict)
    refuse: Callable[[Record], str | None] = lambda record: None
    away: str | None = None
    held: bool = False
    answers: bool = False
    asked: int = 0
    opened: int = 0
    is_queued: bool = False  # what is added is
    told: dict[tuple[str, int], int] = field(default_factory=dict)

    def ids(self) -> list[object]:
        """Return the ids of what was published, in order."""
        return [record.id for record in self.records]

    def add(self, topic: str, value: bytes | None, part: int = 0, key: bytes | None = b"k", **headers: str) -> None:
        """Put a record that no bridge has written into the log."""
        given = [(name.replace("_", "-"), text.encode()) for name, text in headers.items()]
        self.put(topic, part, key, value, given)

    def put(
        self, topic: str, part: int, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        """Put a record into the log."""
        log = self.parts.setdefault((topic, part), [])
        log.append(
            Arrived(topic, part, len(log), key, value, list(headers), datetime.now(UTC), is_queued=self.is_queued)
        )

    def copy(self, records: Sequence[Record], part: int = 0) -> None:
        """Put published records where they can be read."""
        for record in records:
            self.put(record.topic, part, record.key, record.value, record.headers)


LOGS: dict[str, Log] = {}


class LogPublisher:
    """Publishes to the log that the bridge's address names."""

    trouble: str | None = None

    def __init__(self, bridge: OutBridge) -> None:
        self._log = LOGS[bridge.settings.address]
        self._exactly_once = bridge.settings.exactly_once
        self._closed = asyncio.Event()

    @property
    def answered_at(self) -> float | None:
        """When it has last answered."""
        self._log.asked += 1
        return time.monotonic() if self._log.answers else None

    async def open(self) -> int:
        """Connect, unless the broker is away."""
        self._log.opened += 1
        if self._log.away is not None:
            raise BrokerTrouble(self._log.away)
        return self._log.mark if self._exactly_once else 0

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Return what of it the log has."""
        return [(each.clock, each.id) for each in self._log.records if each.clock > after and each.at >= since]

    async def parts(self, topics: Collection[str]) -> Mapping[str, int]:
        """Return how many partitions the topics have."""
        return dict.fromkeys(topics, self._log.partitions)

    async def publish(self, records: Sequence[Record]) -> None:
        """Append to the log, and acknowledge it unless it is held."""
        if self._log.away is not None:
            raise BrokerTrouble(self._log.away)
        for nth, record in enumerate(records):
            if (why := self._log.refuse(record)) is not None:
                if not self._exactly_once:
                    self._log.records += records[:nth]
                raise RecordRefused(why, code="MR-bridge-record-refused")
        self._log.records += records
        self._log.mark = records[-1].clock
        while self._log.held:
            if self._closed.is_set():
                raise BrokerTrouble("given up")
            await asyncio.sleep(0.01)

    async def keep(self) -> None:
        """The mark is not forgotten."""

    async def close(self) -> None:
        """Give up what is not acknowledged."""
        self._closed.set()


class NumberedLogPublisher(LogPublisher):
    """Publishes to a log that says where each record lies."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge)
        self._numbered: list[Numbered] = []

    async def publish(self, records: Sequence[Record]) -> None:
        """Remember where they begin and end."""
        first = len(self._log.records)
        await super().publish(records)
        self._numbered.append(Numbered("log", 0, first, first + len(records) - 1))

    def numbered(self) -> Sequence[Numbered]:
        """Return that."""
        told, self._numbered = self._numbered, []
        return told

    async def ends(self, places: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """Return where the log ends."""
        return {("log", 0): len(self._log.records)}


class LogSource:
    """Reads from the log that the bridge's address names."""

    trouble: str | None = None

    def __init__(self, bridge: InBridge) -> None:
        self._log = LOGS[bridge.settings.address]
        self._topics = bridge.settings.topics
        self._next: dict[tuple[str, int], int] = {}

    async def open(self) -> str:
        """Connect, unless the broker is away."""
        self._log.opened += 1
        if self._log.away is not None:
            raise BrokerTrouble(self._log.away)
        return "log"

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Go to where the database says."""
        self._next = {(each.topic, each.part): each.next for each in known}
        return [BrokerPosition(*part, 0) for part in self._parts() if part not in self._next]

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        """Return what there is, partition by partition. A record that is None was deleted."""
        found: list[Arrived] = []
        for part in self._parts():
            if part not in self._next:
                raise PartsChanged
            for record in self._log.parts[part][self._next[part] :]:
                if record is None:
                    kept = [each.offset for each in self._log.parts[part] if each is not None]
                    raise PositionGone(BrokerPosition(*part, self._next[part]), min(kept), "records are deleted there")
                found.append(record)
                self._next[part] = record.offset + 1
        if not found:
            await asyncio.sleep(min(wait_s, 0.02))
        return found

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Remember what was told."""
        self._log.told |= {(each.topic, each.part): each.next for each in positions}

    async def close(self) -> None:
        """Nothing is open."""

    def _parts(self) -> list[tuple[str, int]]:
        return sorted(part for part in self._log.parts if part[0] in self._topics)
