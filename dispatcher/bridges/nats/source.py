"""Takes in from streams of NATS JetStream: from the sequence that the database says, and never from where NATS would.

A position is of a stream: its topic is the stream's name, it has one part, and its offsets are the sequences. A
record that does not say its topic has that of its subject (`Arrived.subject`). The log of a position says when the
stream was made: a stream that was deleted and made anew has the same sequences, and other records. Nothing is
acknowledged there. A record that somebody has deleted from within the stream is passed over; if its beginning is gone,
that is an error and never passed over.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from urllib.parse import unquote_to_bytes

from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamInfo

from dispatcher.bridges.nats.client import PASSING, POLL_S, NatsClient, made
from dispatcher.bridges.nats.headers import KEY, ORIGIN
from dispatcher.bridges.nats.reader import ConsumerLost, StreamReader
from mailroom.bridges.arrival import Arrived
from mailroom.bridges.source import BrokerPosition, BrokerWasAway, InBridge, PositionGone


@dataclass(slots=True)
class _Stream:
    """A stream: which sequence is `next`, when the stream was made (`log`), and what reads it, and what is read."""

    name: str
    next: int
    log: str | None
    reader: StreamReader | None = None
    reading: "asyncio.Task[list[Msg]] | None" = None


class NatsSource(NatsClient):
    """A source of records at NATS; see `mailroom.bridges.source`."""

    def __init__(self, bridge: InBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        self._bridge = bridge
        self._streams: dict[str, _Stream] = {}
        self._seen_losses = 0

    async def open(self) -> str:
        """Connect. A cluster has no name of its own, so each record says where it lies."""
        await self._connect()
        for stream in self._bridge.settings.topics:
            await self._info(stream)
        return self._bridge.settings.address

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Go to the positions; `read` finds out whether the streams still have them."""
        for stream in self._streams.values():
            await self._drop(stream)
        self._streams = {}
        positions = {each.topic: each for each in known}
        new = []
        for name in self._bridge.settings.topics:
            if name in positions:
                self._streams[name] = _Stream(name, positions[name].next, positions[name].log)
                continue
            info = await self._info(name)
            is_first = self._bridge.settings.start == "earliest"
            start = max(1, info.state.first_seq) if is_first else info.state.last_seq + 1
            new.append(BrokerPosition(name, 0, start, log=made(info)))
        return new

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        """Read what has come, in whichever stream."""
        if self._seen_losses != self._losses:
            self._seen_losses = self._losses
            raise BrokerWasAway  # what was asked for over the connection before does not come
        for stream in self._streams.values():
            if stream.reading is None:
                stream.reading = asyncio.create_task(self._read(stream, wait_s))
        readings = [stream.reading for stream in self._streams.values() if stream.reading is not None]
        await self._unless_ended(asyncio.wait(readings, return_when=asyncio.FIRST_COMPLETED))
        records: list[Arrived] = []
        is_lost = False
        for stream in self._streams.values():
            if stream.reading is None or not stream.reading.done():
                continue
            try:
                found = stream.reading.result()
            except (ConsumerLost, *PASSING):
                await self._drop(stream)
                is_lost = True
            else:
                stream.reading = None
                records += await self._arrived(stream, found)
        if is_lost and not records:
            await self._unless_ended(asyncio.sleep(POLL_S))
        return records

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Nothing is told: NATS keeps no position of ours."""

    async def close(self) -> None:
        """Give up what is under way, and the connection."""
        await super().close()
        for stream in self._streams.values():
            await self._drop(stream)

    async def _read(self, stream: _Stream, wait_s: float) -> list[Msg]:
        """Read on. It moves nothing, so what it has read can be dropped."""
        reader = stream.reader or await self._begin(stream)
        return await reader.read(wait_s)

    async def _arrived(self, stream: _Stream, found: Sequence[Msg]) -> list[Arrived]:
        """Return what was read, up to where records are gone, and go on behind it."""
        records = []
        for message in found:
            sequence = message.metadata.sequence.stream
            if sequence != stream.next and (await self._info(stream.name)).state.first_seq > stream.next:
                await self._drop(stream)  # the next call finds that they are gone
                break
            records.append(_arrived(stream, message))
            stream.next = sequence + 1
        return records

    async def _begin(self, stream: _Stream) -> StreamReader:
        info = await self._info(stream.name)
        _check(stream, info)
        stream.log = made(info)
        reader = StreamReader(self._nats, self._js, stream.name)
        start = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=stream.next)
        await self._asked(lambda: reader.open(start))
        stream.reader = reader
        return reader

    async def _drop(self, stream: _Stream) -> None:
        """Forget what reads the stream, and what it has read."""
        reading, stream.reading = stream.reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        reader, stream.reader = stream.reader, None
        if reader is not None:
            await reader.close()


def _check(stream: _Stream, info: StreamInfo) -> None:
    """Look whether the stream still has what comes next."""
    first, last = max(1, info.state.first_seq), info.state.last_seq
    position = BrokerPosition(stream.name, 0, stream.next, log=stream.log)
    if stream.next > last + 1 or stream.log not in (None, made(info)):
        why = f"the stream was made anew, or put back: it ends at {last}, and was read up to {stream.next - 1}"
        raise PositionGone(position, first, why)
    if stream.next < first:
        why = f"records {stream.next} to {first - 1} ({first - stream.next:,}) are deleted there"
        raise PositionGone(position, first, why)


def _arrived(stream: _Stream, message: Msg) -> Arrived:
    headers = message.headers or {}
    is_ours = ORIGIN in headers
    key = unquote_to_bytes(headers[KEY]) if is_ours and KEY in headers else None
    # An empty record of ours is a tombstone: its values are JSON or CBOR, and never empty.
    value = None if is_ours and not message.data else message.data
    given = [(name, text.encode()) for name, text in headers.items()]
    at = message.metadata.timestamp.astimezone(UTC)
    sequence = message.metadata.sequence.stream
    place = f"{stream.name} of {stream.log}"
    return Arrived(
        stream.name, 0, sequence, key, value, given, at, subject=message.subject, place=place, log=stream.log
    )  # fmt: skip
