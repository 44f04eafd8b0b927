"""What a partition has on Kafka's disk, read without Kafka: who cuts a log has to know what is gone with it."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

HEAD = struct.Struct(">qiibIhiqqqhii")  # of a batch
LENGTH_FROM = 12  # the length of a batch counts from behind itself
# A header "ce_id" of 36 bytes, as varints count them. Nothing is compressed.
ID = re.compile(rb"\x0ace_id\x48([0-9a-f-]{36})")
CLOCK = re.compile(rb"\x1cmailroom-clock.(\d+)", re.S)
TRANSACTIONAL, CONTROL = 0x10, 0x20
CONTROL_TYPE = slice(HEAD.size + 7, HEAD.size + 9)  # behind five varints and the version
COMMIT = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Records from offset `first` on, at `place` in the file. The end of a transaction is one, too, and `is_end`."""

    file: Path
    place: int
    first: int
    count: int
    ids: tuple[UUID, ...]
    producer: int
    is_transactional: bool
    is_end: bool
    is_committed: bool  # by that end
    clock: int


class Partition:
    """The batches of one partition, in order, and the highest `clock` that a bridge has written there."""

    def __init__(self, folder: Path) -> None:
        self.batches = [batch for file in sorted(folder.glob("*.log")) for batch in _batches(file)]
        self.clock = max((batch.clock for batch in self.batches), default=0)
        self.end = self.batches[-1].first + self.batches[-1].count if self.batches else 0

    def records(self, since: int) -> dict[int, UUID]:
        """Return what is there from an offset on, without what was aborted. What is undecided counts."""
        aborted = {at for batch in self.batches if batch.is_end and not batch.is_committed for at in self._of(batch)}
        return {
            at: id for batch in self.batches for at, id in enumerate(batch.ids, batch.first)
            if at >= since and at not in aborted
        }  # fmt: skip

    def _of(self, end: Batch) -> Iterator[int]:
        """Return the offsets of the transaction that ends there."""
        for batch in reversed([each for each in self.batches if each.first < end.first]):
            if batch.producer == end.producer:
                if batch.is_end:
                    return
                yield from range(batch.first, batch.first + batch.count)

    def given_up(self) -> Batch | None:
        """Return the last batch if it is the end of a transaction of a bridge that was given up."""
        if not self.batches or not (last := self.batches[-1]).is_end or last.is_committed:
            return None
        aborted = set(self._of(last))
        ids = [batch.ids for batch in self.batches if batch.first in aborted]
        return last if ids and all(ids) else None

    def closed(self) -> list[Batch]:
        """Return the batches before which no transaction is open: a log may end there for ever."""
        found, is_open = [], set[int]()
        for batch in self.batches:
            if not is_open:
                found.append(batch)
            if batch.is_end:
                is_open.discard(batch.producer)
            elif batch.is_transactional:
                is_open.add(batch.producer)
        return found


def _batches(file: Path) -> Iterator[Batch]:
    data, at = file.read_bytes(), 0
    while at + HEAD.size <= len(data):
        first, length, _, magic, _, attributes, _, _, _, producer, _, _, count = HEAD.unpack_from(data, at)
        whole = data[at : at + LENGTH_FROM + length]
        if magic != 2 or len(whole) < LENGTH_FROM + length:
            return  # what was not written completely is cut off when the server starts
        is_end = bool(attributes & CONTROL)
        ids = tuple(UUID(each.decode()) for each in ID.findall(whole))
        if len(ids) not in (0, count):
            raise ValueError(f"{file}: {len(ids)} ids in {count} records at {first}")
        is_committed = is_end and int.from_bytes(whole[CONTROL_TYPE]) == COMMIT
        clock = max(map(int, CLOCK.findall(whole)), default=0)
        yield Batch(
            file, at, first, count, ids, producer, bool(attributes & TRANSACTIONAL), is_end, is_committed, clock
        )
        at += LENGTH_FROM + length
