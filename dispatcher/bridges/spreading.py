"""Over how many partitions of its topic each record is spread, at a broker whose topics have partitions."""

import time
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from dispatcher.links.at_source.source import Source
from mailroom.bridges.parts import Spread, reading_spreads, spreading
from mailroom.bridges.record import Record

LOOK_S = 60.0  # between two looks whether a topic has more partitions


class Spreading:
    """Of one link, for one run of its bridge; `source` is this run's session."""

    def __init__(self, source: Source, schema: str, link: int, run: UUID) -> None:
        self._source = source
        self._schema = schema
        self._link = link
        self._run = run
        self._spreads: Mapping[str, Spread] | None = None
        self._looked_at: dict[str, float] = {}

    def due(self, records: Sequence[Record]) -> Collection[str]:
        """Return the topics of these records of which the broker is to be asked how many partitions they have."""
        now = time.monotonic()
        topics = {record.topic for record in records}
        return {topic for topic in topics if now - self._looked_at.get(topic, -LOOK_S) >= LOOK_S}

    def forget(self) -> None:
        """Have the broker asked anew: something was refused."""
        self._looked_at.clear()

    async def looked(self, found: Mapping[str, int]) -> bool:
        """Note how many partitions these topics have now; return whether the link is still this run's."""
        if self._spreads is None:
            self._spreads = await self._source.ask(reading_spreads(self._schema, self._link))
        is_changed = False
        for topic, parts in found.items():
            was = self._spreads[topic][-1][1] if topic in self._spreads else 0
            if parts == was:
                continue
            # With fewer than before it is another topic, which has nothing of this link.
            note = spreading(self._schema, self._link, self._run, topic, parts, is_anew=not was or parts < was)
            if not await self._source.transaction(note):
                return False
            is_changed = True
        if is_changed:
            self._spreads = await self._source.ask(reading_spreads(self._schema, self._link))
        self._looked_at |= dict.fromkeys(found, time.monotonic())
        return True

    def spread(self, records: Sequence[Record]) -> None:
        """Say in each record over how many partitions it is spread."""
        spreads = self._spreads or {}
        for record in records:
            if record.topic in spreads:  # else the broker has no partitions
                record.parts = next(parts for after, parts in reversed(spreads[record.topic]) if after < record.seq)
