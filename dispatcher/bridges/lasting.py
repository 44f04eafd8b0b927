"""Whether a broker still has what it has acknowledged, as far as its numbers of records tell."""

from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from dispatcher.bridges.tending import BridgeStopped
from dispatcher.links.at_source.source import Source
from mailroom.bridges.lasts import Place, noting_lasts, noting_loss, reading_lasts
from mailroom.bridges.publisher import Numbered

BEHIND = "MR-bridge-mark-behind"
LOST = (
    "partition {place[1]} of {place[0]}: the broker had acknowledged record {last}, and {now}: the log was cut "
    "back, or made anew. What it lost is not published again, and its readers lack it. To go on with what waits: "
    "mailroom bridge resume {name}"
)


class Lasting:
    """Of the bridge `name` out by a link, for one run of it; `source` is this run's session."""

    def __init__(self, source: Source, schema: str, name: str, link: int, run: UUID) -> None:
        self._source = source
        self._schema = schema
        self._name = name
        self._link = link
        self._run = run
        self._lasts: dict[Place, int] = {}
        self._lost: str | None = None

    async def read(self) -> None:
        """Learn from the database what the broker has acknowledged."""
        self._lasts = await self._source.ask(reading_lasts(self._schema, self._link))

    @property
    def places(self) -> Collection[Place]:
        """Where the broker has acknowledged records."""
        return self._lasts.keys()

    async def looked(self, ends: Mapping[Place, int]) -> None:
        """Be told which numbers are next at the broker. Raises `BridgeStopped` if it has lost records."""
        for place, end in ends.items():
            if place in self._lasts and end <= self._lasts[place]:
                await self._lose(place, self._lasts[place], f"its log ends before record {end}", {place: end - 1})
        self.check()

    async def published(self, numbered: Sequence[Numbered]) -> None:
        """Note the numbers of what was published."""
        lasts: dict[Place, int] = {}
        for each in numbered:
            place = each.topic, each.part
            if (last := lasts.get(place, self._lasts.get(place, -1))) >= each.first:
                await self._lose(place, last, f"has given number {each.first} to a later one", {})
            lasts[place] = each.last
        if lasts:
            self._lasts |= lasts
            await self._source.ask(noting_lasts(self._schema, self._link, self._run, lasts))

    def check(self) -> None:
        """Raise `BridgeStopped` if the broker has lost records."""
        if self._lost is not None:
            raise BridgeStopped(self._lost, code=BEHIND)

    async def _lose(self, place: Place, last: int, now: str, lasts: Mapping[Place, int]) -> None:
        self._lost = self._lost or LOST.format(place=place, last=last, now=now, name=self._name)
        self._lasts |= lasts
        note = noting_loss(self._schema, self._link, self._run, self._lost, lasts)
        await self._source.transaction(note)
