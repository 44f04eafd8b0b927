"""Takes in from queues of RabbitMQ: each message is acknowledged there once it is committed here.

A queue has no places. So the position of one counts what was taken in from it: it says to the next dispatcher nothing
but that it is the next, and of two that take in one is overtaken. What was delivered and not acknowledged comes again,
behind another count, and then the id says that it has come (`Arrived.is_queued`). It comes again in its order, which
rests on a bridge being the only consumer. Nothing is ever rejected: the broker would put it elsewhere in the queue.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused

from dispatcher.bridges.rabbitmq.client import LOST, RabbitClient
from dispatcher.bridges.rabbitmq.headers import KEY, ORIGIN, headers_in, id_in
from dispatcher.bridges.rabbitmq.options import prefetch
from mailroom.bridges.arrival import Arrived
from mailroom.bridges.publisher import BrokerTrouble
from mailroom.bridges.source import BrokerPosition, InBridge

ROWS = 500  # at once,
MAX_BYTES = 4 * 1024 * 1024  # and that much
SINGLE_ACTIVE = "single active consumer"
CANCELLED = "the broker delivers nothing more of queue {} (it was deleted, or its node has gone)"


class _Queue:
    """What was delivered of one queue. `beyond` is the position behind that."""

    def __init__(self, name: str, channel: Channel, beyond: int) -> None:
        self.name = name
        self.channel = channel
        self.beyond = beyond
        self.tag = ""
        self.left: deque[tuple[int, int]] = deque()  # offsets, and by what they are acknowledged

    @property
    def is_read(self) -> bool:
        """Whether the broker still delivers."""
        return not self.channel.is_closed and self.tag in self.channel.consumers


class RabbitSource(RabbitClient):
    """A source of records at RabbitMQ; see `mailroom.bridges.source`."""

    def __init__(self, bridge: InBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        self._names = bridge.settings.topics
        self._prefetch = prefetch(bridge.name, bridge.options)
        self._queues: dict[str, _Queue] = {}
        self._arrived: deque[Arrived] = deque()
        self._rung = asyncio.Event()

    async def open(self) -> str:
        """Connect, and look for the queues. The place is the cluster's name, and the virtual host."""
        await self._connect()
        for name in self._names:
            await self._count(name)
        connection = self._connection
        told = connection.transport.connection.server_properties if connection and connection.transport else {}
        return f"{told.get('cluster_name', self._server.host)!s}, virtual host {self._server.vhost}"

    async def begin(self, known: Sequence[BrokerPosition]) -> Sequence[BrokerPosition]:
        """Consume the queues once each has a position."""
        positions = {each.topic: each for each in known}
        if new := [BrokerPosition(name, 0, 0) for name in self._names if name not in positions]:
            return new
        for name in self._names:
            self._queues[name] = await self._consumed(name, positions[name].next)
        return []

    async def read(self, wait_s: float) -> Sequence[Arrived]:
        """Return what was delivered."""
        self._look()
        if not self._arrived:
            self._rung.clear()
            try:
                await self._unless_ended(asyncio.wait_for(self._rung.wait(), wait_s))
            except TimeoutError:
                return []
        records: list[Arrived] = []
        size = 0
        while self._arrived and len(records) < ROWS and size <= MAX_BYTES:
            records.append(self._arrived.popleft())
            size += len(records[-1].value or b"")
        return records

    async def taken(self, positions: Sequence[BrokerPosition]) -> None:
        """Acknowledge what lies before these positions."""
        for position in positions:
            queue, last = self._queues.get(position.topic), None
            while queue is not None and queue.left and queue.left[0][0] < position.next:
                _, last = queue.left.popleft()
            if queue is not None and last is not None:
                try:
                    await self._unless_ended(queue.channel.basic_ack(last, multiple=True, wait=False))
                except LOST as error:
                    raise BrokerTrouble(self._lost or self._text(error)) from None

    # -- Queues -------------------------------------------------------------------------------------------------------

    async def _count(self, name: str) -> int:
        """Return how many consumers a queue has. Raises `BrokerRefused` if it is not there."""
        channel, beneath = await self._asked(self._new_channel(), "channel")
        declared = await self._asked(beneath.queue_declare(name, passive=True), f"queue {name}")
        await self._asked(channel.close(), "channel")
        return declared.consumer_count or 0

    async def _consumed(self, name: str, position: int) -> _Queue:
        """Consume a queue alone: with another consumer each would get some of its messages, in no order."""
        if await self._count(name):
            raise _shared(name)
        try:
            queue = await self._consuming(name, position, exclusive=True)
        except ChannelAccessRefused as error:
            if SINGLE_ACTIVE not in str(error):
                if "exclusive" in str(error):
                    raise _shared(name) from None
                raise self._refused(self._text(error)) from None
            queue = await self._asked(self._consuming(name, position, exclusive=False), f"queue {name}")
        except LOST as error:
            raise BrokerTrouble(self._text(error)) from None
        # Quorum queues know no exclusive consumers, and another one may have looked at the same time.
        if await self._count(name) > 1:
            raise _shared(name)
        return queue

    async def _consuming(self, name: str, position: int, *, exclusive: bool) -> _Queue:
        _, channel = await self._unless_ended(self._new_channel())
        queue = _Queue(name, channel, position)
        await self._unless_ended(channel.basic_qos(prefetch_count=self._prefetch))
        told = await self._unless_ended(channel.basic_consume(name, partial(self._take, queue), exclusive=exclusive))
        queue.tag = told.consumer_tag or ""
        return queue

    async def _take(self, queue: _Queue, message: DeliveredMessage) -> None:
        tag = message.delivery_tag
        if tag is None:
            return
        record = _arrived(queue, message)
        queue.left.append((queue.beyond, tag))
        queue.beyond += 1
        self._arrived.append(record)
        self._rung.set()

    def _look(self) -> None:
        """Look whether the broker still delivers."""
        if self._ended.is_set():
            raise BrokerTrouble(self._lost or "given up")
        for queue in self._queues.values():
            if not queue.is_read:
                raise BrokerTrouble(CANCELLED.format(queue.name))


def _shared(name: str) -> BrokerTrouble:
    return BrokerTrouble(
        f"queue {name} has another consumer, and a bridge takes in alone, since order rests on it. End that one, or "
        "wait for it"
    )


def _arrived(queue: _Queue, message: DeliveredMessage) -> Arrived:
    properties = message.header.properties
    headers = headers_in(properties)
    named = dict(headers)
    is_ours = ORIGIN in named
    # An empty record of ours is a tombstone: its values are JSON or CBOR, and never empty.
    value = None if is_ours and not message.body else message.body
    return Arrived(
        queue.name, 0, queue.beyond, named.get(KEY) if is_ours else None, value, headers, properties.timestamp,
        None, message.routing_key or None, id=id_in(properties), is_queued=True,
    )  # fmt: skip
