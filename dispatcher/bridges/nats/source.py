"""Takes in from a stream of NATS JetStream: from the sequence that the database says, and never from where NATS would.

A position is of the stream: its topic is the stream's name, it has one part, and its offsets are the sequences. A
record that does not say its topic has that of its subject (`Arrived.subject`). The epoch of a position says when the
stream was made: a stream that was deleted and made anew has the same sequences, and other records. Nothing is
acknowledged there. A record that somebody has deleted from within the stream is passed over; if its beginning is gone,
that is an error and never passed over.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC
from urllib.parse import unquote_to_bytes

from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamInfo

from dispatcher.bridges.nats.client import PASSING, POLL_S, NatsClient
from dispatcher.bridges.nats.headers import KEY, ORIGIN
from dispatcher.bridges.nats.reader import ConsumerLost, StreamReader
from mailroom.bridges.arrival import Arrived
from mailroom.bridges.source import BrokerPosition, InBridge, PositionGone
from mailroom.errors import ConfigurationError


class NatsSource(NatsClient):
    """A source of records at NATS; see `mailroom.bridges.source`."""

    def __init__(self, bridge: InBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        if len(bridge.settings.topics) != 1:
            raise ConfigurationError(
                f"Bridge {bridge.name}: a bridge takes in from one stream of NATS. Make one for each stream.",
                code="MR-bridge-settings",
            )
        self._bridge = bridge
        [self._stream] = bridge.settings.topics
        self._next = 0
        self._epoch: int | None = None
        self._reader: StreamReader | None = None
        self._seen_losses = 0

    async def open(self) -> str:
        """Connect. A cluster has no name of its own, so it is that of the stream, and when it was made."""
        await self._connect()
        return f"{self._stream} of {_made(await self._info(self._stream))}"

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Go to the position; `read` finds out whether the stream still has it."""
        await self._drop()
        found = [each for each in known if each.topic == self._stream]
        if not found:
            info = await self._info(self._stream)
            is_first = self._bridge.settings.start == "earliest"
            start = max(1, info.state.first_seq) if is_first else info.state.last_seq + 1
            return [BrokerPosition(self._stream, 0, start, _made(info))]
        [position] = found
        self._next, self._epoch = position.next, position.leader_epoch
        return []

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        """Read what has come."""
        if self._reader is not None and self._seen_losses != self._losses:
            await self._drop()  # what was asked for over the connection before does not come
        try:
            if self._reader is None:
                await self._begin()
            found = await self._unless_ended(self._going().read(wait_s))
        except (ConsumerLost, *PASSING):
            await self._drop()
            await self._unless_ended(asyncio.sleep(POLL_S))
            return []
        records = []
        for message in found:
            sequence = message.metadata.sequence.stream
            if sequence != self._next and (await self._info(self._stream)).state.first_seq > self._next:
                await self._drop()  # the next call finds that it is gone
                break
            records.append(_arrived(self._stream, message, self._epoch))
            self._next = sequence + 1
        return records

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Nothing is told: NATS keeps no position of ours."""

    async def _begin(self) -> None:
        info = await self._info(self._stream)
        self._check(info)
        self._epoch = _made(info)
        self._seen_losses = self._losses
        reader = StreamReader(self._nats, self._js, self._stream)
        start = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._next)
        await self._asked(lambda: reader.open(start))
        self._reader = reader

    async def _drop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    def _going(self) -> StreamReader:
        if self._reader is None:
            raise ConsumerLost
        return self._reader

    def _check(self, info: StreamInfo) -> None:
        """Look whether the stream still has what comes next."""
        first, last = max(1, info.state.first_seq), info.state.last_seq
        position = BrokerPosition(self._stream, 0, self._next, self._epoch)
        if self._next > last + 1 or self._epoch not in (None, _made(info)):
            why = f"the stream was made anew, or put back: it ends at {last}, and was read up to {self._next - 1}"
            raise PositionGone(position, first, why)
        if self._next < first:
            why = f"records {self._next} to {first - 1} ({first - self._next:,}) are deleted there"
            raise PositionGone(position, first, why)


def _made(info: StreamInfo) -> int | None:
    """Return when the stream was made, in microseconds."""
    return None if info.created is None else int(info.created.timestamp() * 1_000_000)


def _arrived(stream: str, message: Msg, epoch: int | None) -> Arrived:
    headers = message.headers or {}
    is_ours = ORIGIN in headers
    key = unquote_to_bytes(headers[KEY]) if is_ours and KEY in headers else None
    # An empty record of ours is a tombstone: its values are JSON or CBOR, and never empty.
    value = None if is_ours and not message.data else message.data
    given = [(name, text.encode()) for name, text in headers.items()]
    at = message.metadata.timestamp.astimezone(UTC)
    sequence = message.metadata.sequence.stream
    return Arrived(stream, 0, sequence, key, value, given, at, epoch, message.subject)
