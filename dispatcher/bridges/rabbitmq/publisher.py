"""Publishes to an exchange of RabbitMQ: in order, and at least once.

Records are sent one behind the other over one channel, and the broker confirms each once the queues that get it keep it
(`mandatory`: a record that no queue gets comes back, and is refused). It confirms each by itself, and may return or
reject one and take the next. So a record is sent only once the one of its key before it is confirmed: what fails is
never overtaken within its key, and what a reader keeps of each key never hides it. Nothing more is sent once one has
failed. A record that was confirmed is not sent again over the same connection, though one before it has failed; over
the next one it is, in order, since nothing at the broker says what it has.
"""

import asyncio
import re
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

from aio_pika.abc import AbstractChannel
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionFrameError,
    DeliveryError,
    PublishError,
)

from dispatcher.bridges.rabbitmq.broker import exchange_of
from dispatcher.bridges.rabbitmq.client import LOST, RabbitClient
from dispatcher.bridges.rabbitmq.headers import MAX_NAME_BYTES, properties_of
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, OutBridge, RecordRefused
from mailroom.bridges.record import Record

POLL_S = 0.5
NACK_S = 0.5  # until what was rejected is sent again
MAX_ROUTING_KEY_BYTES = 255
TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
BLOCKED = "the broker takes nothing now: it is short of memory or disk (connection.blocked)"
REJECTED = "the broker rejects a record (basic.nack): a queue is full (x-overflow), or not available"


class RabbitPublisher(RabbitClient):
    """A publisher to RabbitMQ; see `mailroom.bridges.publisher`."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        self._exchange = exchange_of(bridge.settings.own)
        self._channel: AbstractChannel | None = None
        self._beneath: Channel | None = None
        self.answered_at: float | None = None
        self._max_bytes: int | None = None  # as the broker has said when it refused one
        self._confirmed: set[int] = set()  # the clocks of records that it has, of those that are not acknowledged yet

    async def open(self) -> int:
        """Connect, and look for the exchange. There is no mark."""
        await self._connect()
        channel = await self._opened()
        if self._exchange:
            await self._asked(channel.exchange_declare(self._exchange, passive=True), f"exchange {self._exchange}")
        return 0

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Nobody can read what queues have without taking it from them."""
        return ()

    async def publish(self, records: Sequence[Record]) -> None:
        """Publish them one behind the other, and wait for the confirms."""
        for record in records:
            self._check(record)
        left = [record for record in records if record.clock not in self._confirmed]
        while left:
            await self._unless_ended(self._publish(left))
            left = [record for record in left if record.clock not in self._confirmed]
            if left:
                self._error = REJECTED
                await self._unless_ended(asyncio.sleep(NACK_S))
        self._confirmed.difference_update(record.clock for record in records)
        self._error = None

    async def keep(self) -> None:
        """There is no mark."""

    # -- Records ------------------------------------------------------------------------------------------------------

    async def _opened(self) -> Channel:
        """Return the channel; the broker closes one over which it has refused something."""
        if self._channel is None or self._beneath is None or self._channel.is_closed:
            try:
                self._channel, beneath = await self._unless_ended(self._new_channel())
            except LOST as error:
                raise BrokerTrouble(self._text(error)) from None
            self._beneath = beneath
        return self._beneath

    def _check(self, record: Record) -> None:
        fault = ""
        if len(record.topic.encode()) > MAX_ROUTING_KEY_BYTES:
            fault = f"its routing key has more than {MAX_ROUTING_KEY_BYTES} bytes. Change the template (--topic)"
        elif any(len(name) > MAX_NAME_BYTES for name, _ in record.headers):
            fault = f"the name of one of its headers has more than {MAX_NAME_BYTES} bytes. Correct its sender"
        elif self._max_bytes is not None and (size := len(record.value or b"")) > self._max_bytes:
            fault = f"it has {size:,} bytes, and the broker's max_message_size is {self._max_bytes:,}. Raise it there"
        if fault:
            raise RecordRefused(
                f"message {record.id} is no record for RabbitMQ: {fault}.", code="MR-bridge-record-refused"
            )

    async def _publish(self, records: Sequence[Record]) -> None:
        """Send them, up to one that fails, and wait for the confirms; what is confirmed is noted.

        Raises what the broker says of a record, but for those that it rejects for now.
        """
        channel = await self._opened()
        sent: list[tuple[Record, asyncio.Task[object]]] = []
        last: dict[bytes, asyncio.Task[object]] = {}
        failed = asyncio.Event()
        try:
            for record in records:
                if record.key is not None and (before := last.get(record.key)) is not None:
                    await self._answered([before])
                    if not _is_confirmed(before):
                        break
                if failed.is_set():
                    break
                # Tasks begin in this order, and each sends before it waits.
                task = asyncio.create_task(self._sent(channel, record))
                task.add_done_callback(lambda each: None if _is_confirmed(each) else failed.set())
                sent.append((record, task))
                if record.key is not None:
                    last[record.key] = task
            await self._answered([task for _, task in sent])
        finally:
            for _, task in sent:
                task.cancel()
            answers = await asyncio.gather(*(task for _, task in sent), return_exceptions=True)
            self._confirmed.update(
                record.clock
                for (record, _), answer in zip(sent, answers, strict=True)
                if not isinstance(answer, BaseException)
            )
        errors = [
            (record, answer)
            for (record, _), answer in zip(sent, answers, strict=True)
            if isinstance(answer, BaseException) and not _is_rejected(answer)
        ]
        if errors:
            # Over a channel that is closed by then, the client says only that.
            told = [(record, error) for record, error in errors if isinstance(error, AMQPError)]
            raise self._meaning(*(told or errors)[0])

    async def _sent(self, channel: Channel, record: Record) -> object:
        confirm = channel.basic_publish(
            record.value or b"",
            exchange=self._exchange,
            routing_key=record.topic,
            properties=properties_of(record),
            mandatory=True,
            wait=False,  # no drain for each
        )
        answer = await confirm
        self.answered_at = time.monotonic()
        return answer

    async def _answered(self, tasks: Sequence["asyncio.Task[object]"]) -> None:
        """Wait until the broker has answered all of these."""
        while left := [task for task in tasks if not task.done()]:
            await asyncio.wait(left, timeout=POLL_S)
            if not all(task.done() for task in left):
                self._error = BLOCKED if await self._is_blocked() else None

    async def _is_blocked(self) -> bool:
        transport = None if self._connection is None else self._connection.transport
        if transport is None:
            return False
        try:
            await asyncio.wait_for(transport.ready(), 0.01)
        except TimeoutError:
            return True
        return False

    def _meaning(self, record: Record, error: BaseException) -> Exception:
        text = self._text(error)
        if isinstance(error, PublishError):
            where = f"exchange {self._exchange} has no queue for" if self._exchange else "there is no queue"
            return RecordRefused(
                f"{where} {record.topic}: message {record.id} came back. "
                f"{'Bind one' if self._exchange else 'Make it'}, or change the template (--topic).",
                code="MR-bridge-record-refused",
            )
        if isinstance(error, ChannelPreconditionFailed) and (found := TOO_LARGE.search(text)):
            # Which one it is, `_check` finds when they are given again.
            self._max_bytes = int(found[1])
            return RecordRefused(f"the broker refuses it: {text}.", code="MR-bridge-record-refused")
        if isinstance(error, ChannelAccessRefused) and " topic " not in text:
            return self._refused(text)
        if isinstance(error, ChannelNotFoundEntity):
            return BrokerRefused(
                f"there is no exchange {self._exchange}. Make it, or name another one.", code="MR-bridge-no-topic"
            )
        if isinstance(error, ChannelAccessRefused | ChannelPreconditionFailed | ConnectionFrameError):
            return RecordRefused(f"the broker refuses it: {text}.", code="MR-bridge-record-refused")
        if isinstance(error, asyncio.CancelledError):
            return BrokerTrouble(self._lost or "the connection was lost before it was confirmed")
        if isinstance(error, LOST):
            return BrokerTrouble(text)
        return RecordRefused(f"it cannot be sent: {text}.", code="MR-bridge-record-refused")


def _is_confirmed(task: "asyncio.Task[object]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_rejected(error: BaseException) -> bool:
    """Return whether the broker did not take it for now; one that came back is another matter."""
    return isinstance(error, DeliveryError) and not isinstance(error, PublishError)
