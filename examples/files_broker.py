"""A broker of files: a folder, and in it a file of JSON lines for each topic. See docs/guides/own-broker.md.

Each bridge holds a lock on the folder, so a predecessor that still runs keeps its successor waiting. A line is written
to the disk before the next one is begun, so the last line of a bridge says up to which clock all of it is there.
"""

import asyncio
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from uuid import UUID

from mailroom.bridges import (
    Arrived,
    Broker,
    BrokerPosition,
    BrokerTrouble,
    Fenced,
    InBridge,
    OutBridge,
    PositionGone,
    PublishesTo,
    Record,
    RecordRefused,
    TakesFrom,
)

FILES = Broker(
    "files",
    "a folder of files",
    "FOLDER",
    publishes=PublishesTo("files_broker:FilePublisher", "bridge", "always"),
    takes_from=TakesFrom("files_broker:FileSource", starts=("earliest",)),
)


def packed(raw: bytes | None) -> str | None:
    """Return bytes as they stand in a line: a character each."""
    return None if raw is None else raw.decode("latin-1")


def arrived(file: Path, first: int = 0) -> Iterator[Arrived]:
    """Yield the records of a topic from line `first` on. A line that is not ended is not there yet."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for offset, line in enumerate(lines[first:], first):
        at, *pairs = json.loads(line)
        (_, key), (_, value), *headers = [(name, text and text.encode("latin-1")) for name, text in pairs]
        yield Arrived(file.name, 0, offset, key, value, headers, datetime.fromisoformat(at))


class FilePublisher:
    """Appends records to the files of their topics."""

    trouble: str | None = None

    def __init__(self, bridge: OutBridge) -> None:
        self._folder = Path(bridge.settings.address)
        self._own = {"mailroom-origin": str(bridge.node_id).encode(), "mailroom-link": str(bridge.link).encode()}
        self._lock: int | None = None

    async def open(self) -> int:
        """Lock the folder, cut off a line that was begun, and return the last clock of this bridge."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._folder / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise BrokerTrouble("another process publishes to this folder") from None
        self._lock = lock
        for file in self._folder.glob("[!.]*"):
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        return max((clock for clock, *_ in self._ours()), default=0)

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Return what the files have of this bridge from then on."""
        return [(clock, id_) for clock, id_, at in self._ours() if clock > after and at >= since]

    async def publish(self, records: Sequence[Record]) -> None:
        """Append each record, and have it on the disk before the next one."""
        for record in records:
            if self._lock is None:
                raise Fenced("this publisher is closed")
            if "/" in record.topic or record.topic.startswith("."):
                raise RecordRefused(f"{record.topic} cannot be the name of a file.")
            pairs = [("key", record.key), ("value", record.value), *record.headers]
            with (self._folder / record.topic).open("a") as file:
                file.write(json.dumps([record.at.isoformat(), *((name, packed(raw)) for name, raw in pairs)]) + "\n")
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())

    async def keep(self) -> None:
        """The mark is in the files, which forget nothing."""

    async def close(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _ours(self) -> Iterator[tuple[int, UUID, datetime]]:
        for record in chain.from_iterable(map(arrived, self._folder.glob("[!.]*"))):
            named = dict(record.headers)
            if self._own.items() <= named.items() and record.at is not None:
                id_ = next(named[name] for name in ("mailroom-id", "ce_id", "id") if name in named)
                yield int(named["mailroom-clock"] or 0), UUID((id_ or b"").decode()), record.at


class FileSource:
    """Reads the files of the bridge's topics: the offset of a record is the number of its line."""

    trouble: str | None = None

    def __init__(self, bridge: InBridge) -> None:
        self._folder = Path(bridge.settings.address)
        self._topics = bridge.settings.topics
        self._at: dict[str, BrokerPosition] = {}

    async def open(self) -> str:
        """Return what names this folder."""
        return str(self._folder.resolve())

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Go on from these lines; a topic that is new begins with its first."""
        self._at = {each.topic: each for each in known}
        return [BrokerPosition(topic, 0, 0) for topic in self._topics if topic not in self._at]

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        """Return what is there, or wait for a while."""
        found: list[Arrived] = []
        for topic, position in list(self._at.items()):
            has = sum(1 for _ in arrived(self._folder / topic))
            if has < position.next:
                raise PositionGone(position, has, f"the file has {has} lines only")
            found += arrived(self._folder / topic, position.next)
            self._at[topic] = BrokerPosition(topic, 0, has)
        if not found:
            await asyncio.sleep(wait_s)
        return found

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Nobody else wants to know."""

    async def close(self) -> None:
        """Nothing is open."""
