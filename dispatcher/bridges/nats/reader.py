"""Reads a stream in order, by a pull consumer that keeps no state: where to go on is known here, and not there.

It asks by itself, and not through nats-py's `fetch`, which takes a record with a header `Status` for a word of the
server and drops it.
"""

import json
import time

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

ROWS = 500  # at once,
MAX_BYTES = 32 * 1024 * 1024  # and no more than that, should each be as large as the server allows
GATHER_S = 0.005
SLACK_S = 2.0
FORGET_S = 300.0  # the server forgets a consumer that nobody asks for so long
NOTHING = ("404", "408")  # no message now, and none in time


class ConsumerLost(Exception):
    """The server has forgotten the consumer, or what it sent did not all come."""


class StreamReader:
    """Reads `stream` over a connection."""

    def __init__(self, client: Client, context: JetStreamContext, stream: str) -> None:
        self._client = client
        self._context = context
        self._stream = stream
        self._subject = ""
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._delivered = 0
        self._left = 0
        self._until = 0.0

    async def open(self, start: ConsumerConfig) -> int:
        """Begin as `start` says; return how many records are there to read."""
        self._inbox = self._client.new_inbox()
        self._subscription = await self._client.subscribe(self._inbox, pending_msgs_limit=0, pending_bytes_limit=0)
        config = start.evolve(ack_policy=AckPolicy.NONE, inactive_threshold=FORGET_S, mem_storage=True, num_replicas=1)
        info = await self._context.add_consumer(self._stream, config)
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{info.name}"
        return info.num_pending or 0

    async def read(self, wait_s: float) -> list[Msg]:
        """Return the next records, or none if none came in time. Raises `ConsumerLost`, and what the client does."""
        if self._subscription is None:
            raise ConsumerLost
        # Each request is answered, by records or by its end; one to a consumer that is gone is not.
        is_overdue = self._left > 0 and time.monotonic() > self._until
        if self._left <= 0:
            self._left = max(1, min(ROWS, MAX_BYTES // self._client.max_payload))
            self._until = time.monotonic() + wait_s + SLACK_S
            request = {"batch": self._left, "expires": int(wait_s * 1e9)}
            await self._client.publish(self._subject, json.dumps(request).encode(), self._inbox)
        found: list[Msg] = []
        while self._left > 0:
            try:
                message = await self._subscription.next_msg(GATHER_S if found or is_overdue else wait_s)
            except TimeoutError:
                if is_overdue and not found:
                    raise ConsumerLost from None
                break
            if not message.reply.startswith("$JS.ACK."):
                self._left = 0
                if (message.headers or {}).get("Status") not in NOTHING:
                    raise ConsumerLost
                break
            self._left -= 1
            self._delivered += 1
            if message.metadata.sequence.consumer != self._delivered:
                raise ConsumerLost
            found.append(message)
        return found

    async def close(self) -> None:
        """Ask for nothing more."""
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()
