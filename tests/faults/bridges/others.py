"""The other brokers beside Kafka, each with a network before it: NATS and RabbitMQ, and who uses them straight.

NATS has a stream that keeps what it gets, and a work queue whose customer acknowledges at once, so that it forgets.
"""

import asyncio
import contextlib
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import aio_pika
import nats
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy
from nats.js.errors import APIError

from tests.faults.bridges.checks import QUEUE, RABBIT, STREAM
from tests.faults.bridges.networks import Networks
from tests.faults.links.checks import Handled
from tests.support.nats import Nats
from tests.support.rabbitmq import RabbitMQ
from tests.support.waiting import WITHIN_S

T = TypeVar("T")

DUPLICATES_S = 0.5  # so short that no bridge can rest on it
AT_ONCE = 200
READ_S = 1.0
AWAY_S = 0.2  # before a server that is away is asked again
LOST = (Error, APIError, OSError, TimeoutError)


class OtherBroker:
    """What both have: a server that the nodes reach by `network` only, and `down`, held by who takes it down."""

    name: str

    def __init__(self, server: Nats | RabbitMQ, port: int, seed: int) -> None:
        self.server = server
        self.down = threading.Lock()
        self.network = Networks()
        self.port = self.network.before(seed)(port)

    def close(self) -> None:
        """End it for good."""
        self.server.close()
        self.network.close()


class RabbitBroker(OtherBroker):
    """RabbitMQ, with a queue that one reader has."""

    name = "RabbitMQ"

    def __init__(self, home: Path, seed: int) -> None:
        self._rabbit = RabbitMQ(home / "rabbitmq")
        super().__init__(self._rabbit, self._rabbit.port, seed)
        self.address = f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, with its queue."""
        self.server.start()
        asyncio.run(self._create())

    def situation(self) -> str:
        """Return what there is to know about its queue."""
        self._rabbit.control("list_queues", "name", "messages_ready", "messages_unacknowledged", "consumers", "state")
        return self.server.log.read_text(errors="replace")[-600:]

    async def _create(self) -> None:
        async with await aio_pika.connect(self._rabbit.url) as connection:
            arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-single-active-consumer": True}
            arguments["x-delivery-limit"] = 1_000_000  # a crash is no fault of the message; 3.10 drops all at -1
            await (await connection.channel()).declare_queue(RABBIT, durable=True, arguments=arguments)


class NatsBroker(OtherBroker):
    """NATS, with a stream and a work queue. `customer` is the one who empties the queue."""

    name = "NATS"

    def __init__(self, home: Path, seed: int) -> None:
        self._nats = Nats(home / "nats")
        super().__init__(self._nats, int(self._nats.url.rpartition(":")[2]), seed)
        self.address = f"nats://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nats", daemon=True)
        self._thread.start()
        self._customer: asyncio.Task[None] | None = None
        self._bought: dict[int, Handled] = {}  # by sequence
        self._known: set[tuple[int, UUID]] = (
            set()
        )  # all that was ever bought: a server that was killed gives some again
        self._next = 1
        self._stored: dict[int, UUID] = {}
        self._store = home / "nats" / "streams" / "jetstream" / "$G" / "streams"
        self._copy = home / "copy of the stream"

    def start(self) -> None:
        """Start it, with its streams, and the customer."""
        self.server.start()
        self._do(self._create(STREAM))
        self._do(self._create(QUEUE))
        self._customer = self._do(self._employed())

    def close(self) -> None:
        """End all of it."""
        if self._customer is not None:
            self._do(self._dismissed(self._customer))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN_S)

    @asynccontextmanager
    async def _jetstream(self) -> AsyncIterator[JetStreamContext]:
        client = await nats.connect(self._nats.url, allow_reconnect=False, connect_timeout=READ_S, error_cb=_ignored)
        try:
            yield client.jetstream(timeout=READ_S)
        finally:
            with contextlib.suppress(*LOST):
                await client.close()

    async def _create(self, stream: str) -> None:
        async with self._jetstream() as js:
            await js.add_stream(
                name=stream, subjects=[f"{stream}.>"], duplicate_window=DUPLICATES_S,
                retention=RetentionPolicy.WORK_QUEUE if stream == QUEUE else RetentionPolicy.LIMITS,
            )  # fmt: skip

    # -- The work queue ------------------------------------------------------------------------------------------------

    async def _employed(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._buy())

    async def _dismissed(self, customer: "asyncio.Task[None]") -> None:
        customer.cancel()
        await asyncio.gather(customer, return_exceptions=True)

    async def _buy(self) -> None:
        """Take what the queue has, and acknowledge it at once, for as long as the campaign lasts."""
        while True:
            with contextlib.suppress(*LOST):
                async with self._jetstream() as js:
                    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=READ_S)
                    reading = await js.pull_subscribe(f"{QUEUE}.>", "customer", QUEUE, config)
                    while True:
                        try:
                            messages = await reading.fetch(AT_ONCE, READ_S)
                        except nats.errors.TimeoutError:
                            continue
                        for each in messages:
                            self._bought[each.metadata.sequence.stream] = _handled(each)
                            await each.ack()
            await asyncio.sleep(AWAY_S)

    def take_bought(self) -> list[Handled]:
        """Return what the customer got since the last time, in the order of the queue. Only at rest.

        A message that a bridge publishes twice has two sequences. One that has the same sequence again was published
        once: the server had not kept that it was acknowledged.
        """
        bought, self._bought = self._bought, {}
        new = {at: each for at, each in bought.items() if (at, each.id) not in self._known}
        self._known.update((at, each.id) for at, each in new.items())
        return [new[at] for at in sorted(new)]

    def is_sold_out(self) -> bool:
        """Tell whether the queue is empty."""
        return self._do(self._left()) == 0

    async def _left(self) -> int:
        async with self._jetstream() as js:
            return int((await js.stream_info(QUEUE)).state.messages)

    # -- The stream ----------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """Read the stream to its end; return that."""
        return self._do(self._read())

    async def _read(self) -> int:
        async with self._jetstream() as js:
            end = (await js.stream_info(STREAM)).state.last_seq
            if end < self._next:
                return end
            config = ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._next, ack_policy=AckPolicy.NONE
            )
            reading = await js.pull_subscribe("", stream=STREAM, config=config)
            while self._next <= end:
                for each in await reading.fetch(AT_ONCE, READ_S):
                    self._stored[each.metadata.sequence.stream] = _handled(each).id
                    self._next = each.metadata.sequence.stream + 1
            await reading.unsubscribe()
            return end

    def take_stored(self) -> "Counter[UUID]":
        """Return how often each message is in the stream, of what came since the last time."""
        stored, self._stored = self._stored, {}
        return Counter(stored.values())

    def copy(self) -> int:
        """Copy the stream, as a cold backup does; return where it ends."""
        self.server.stop()
        shutil.rmtree(self._copy, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self._store / STREAM), str(self._copy)], check=True)
        self.server.start()
        return self.end()

    def put_back(self) -> None:
        """Put the stream back to the copy."""
        self.server.kill()
        shutil.rmtree(self._store / STREAM)
        subprocess.run(["cp", "-a", str(self._copy), str(self._store / STREAM)], check=True)
        self.server.start()

    def made_anew(self) -> None:
        """Delete the stream, and make another one of its name."""
        self._do(self._made_anew())

    async def _made_anew(self) -> None:
        async with self._jetstream() as js:
            await js.delete_stream(STREAM)
        await self._create(STREAM)

    def forget(self, since: int) -> dict[int, UUID]:
        """Forget what the stream had from a sequence on; return that."""
        gone = {at: id for at, id in self._stored.items() if at >= since}
        self._stored = {at: id for at, id in self._stored.items() if at < since}
        self._next = min(self._next, since)
        return gone


async def _ignored(error: Exception) -> None:
    """Others that ask are told of it, too."""


def _handled(message: Msg) -> Handled:
    headers = message.headers or {}
    clock = int(headers["mailroom-clock"])
    id = UUID(headers["ce_id"])
    key = headers.get("mailroom-key", str(id))
    return Handled(QUEUE, id, UUID(headers["mailroom-origin"]), key, clock, clock)
