"""Publishes to a stream of NATS JetStream: in order, and once.

Each record says at which sequence the stream is to end before it (`Nats-Expected-Last-Sequence`). So what is missing
after an end is a suffix, and of two publishers only one goes on: the other finds records of this bridge that it has not
written, and is fenced. The mark is in the stream: the clock of its last record of this bridge. What is up to that clock
is not published again, at the start and whenever an acknowledgement was lost.

That is exactly once while this bridge alone writes to the stream. Others may write there, too; then the stream is
looked at again for each of their records that comes in between, which is slow. If they have written more than
`LOOK_BACK` records since the last one of this bridge, its mark is not found. Then it goes on behind what this node
knows to be acknowledged: at least once. `Nats-Msg-Id` is the message's id, by which the server drops repeats, too, for
as long as the stream's duplicate window.
"""

import asyncio
import json
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from nats.errors import ConnectionClosedError
from nats.js.api import ConsumerConfig, DeliverPolicy, PubAck
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from dispatcher.bridges.nats.client import ANSWER_S, PASSING, POLL_S, NatsClient, quoted
from dispatcher.bridges.nats.headers import CLOCK, LINK, ORIGIN, headers_of
from dispatcher.bridges.nats.reader import ConsumerLost, StreamReader
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, Fenced, OutBridge, RecordRefused
from mailroom.bridges.record import Record, id_of

LOOK_BACK = 1_000  # records of the stream, in which the mark is looked for
LOOK_AT_ONCE = 20
READ_S = 1.0
ACKNOWLEDGED_S = 10.0  # then it is looked whether the stream has it
SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*\Z")

WRONG_LAST_SEQUENCE = 10071
WRONG_STREAM = 10060


class _Unknown(Exception):
    """What the stream has of a batch has to be looked up. With `is_overtaken`, another one has written there."""

    def __init__(self, why: str, *, is_overtaken: bool = False) -> None:
        super().__init__(why)
        self.is_overtaken = is_overtaken


class NatsPublisher(NatsClient):
    """A publisher to NATS; see `mailroom.bridges.publisher`."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        self._bridge = bridge
        self._mine = {ORIGIN: str(bridge.node_id), LINK: str(bridge.link)}
        self._stream = ""
        self._last = 0  # the stream's last sequence
        self._mark = 0

    async def open(self) -> int:
        """Connect, find the stream, and read the mark in it."""
        await self._connect()
        self._stream = await self._find()
        self._mark = await self._look()
        return self._mark

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Read this bridge's records of that time in the stream."""
        while True:
            reader = StreamReader(self._nats, self._js, self._stream)
            start = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=since)
            left = await self._asked(lambda reader=reader, start=start: reader.open(start))  # type: ignore[misc]  # bound at once
            found = []
            try:
                while left > 0:
                    for message in await self._unless_ended(reader.read(READ_S)):
                        left = message.metadata.num_pending
                        headers = message.headers or {}
                        if (clock := self._clock(headers)) is not None and clock > after:
                            found.append((clock, id_of({name: text.encode() for name, text in headers.items()})))
                await reader.close()
            except (ConsumerLost, *PASSING):
                await self._unless_ended(asyncio.sleep(POLL_S))
            else:
                return found

    async def publish(self, records: Sequence[Record]) -> None:
        """Publish them one behind the other, and look what the stream has of them if that is not known."""
        for record in records:
            self._check(record)
        is_unsure = False
        while records:
            try:
                await self._publish(records)
            except _Unknown as unknown:
                self._error = self._error or str(unknown)
                mark = await self._look()
                is_unsure = is_unsure or not unknown.is_overtaken
                # What was on its way when an acknowledgement was lost may be ours; else nobody but another publisher
                # of this bridge can have written it.
                if mark > self._mark and not is_unsure:
                    raise Fenced(f"another one publishes to {self._stream}") from None
                self._mark = max(mark, self._mark)
                records = [record for record in records if record.clock > self._mark]
                if not unknown.is_overtaken:
                    await self._unless_ended(asyncio.sleep(POLL_S))
            else:
                break
        self._error = None

    async def keep(self) -> None:
        """The mark is in the stream."""

    # -- The stream ---------------------------------------------------------------------------------------------------

    async def _find(self) -> str:
        """Return the name of the one stream that has the subjects of this bridge."""
        subjects = _wildcard(self._bridge.settings.form.topic)
        names = await self._asked(lambda: self._names(subjects))
        if not names:
            raise BrokerRefused(
                f"there is no stream with the subjects {subjects}. Make one, or let the bridge publish to another "
                "subject (--topic).",
                code="MR-bridge-no-topic",
            )
        if len(names) > 1:
            raise BrokerRefused(
                f"the subjects {subjects} belong to several streams ({', '.join(sorted(names))}), and a bridge "
                "publishes to one. Give it a subject that only one of them has (--topic).",
                code="MR-bridge-no-topic",
            )
        return names[0]

    async def _names(self, subjects: str) -> list[str]:
        # nats-py would say one of them only.
        asked = json.dumps({"subject": subjects}).encode()
        answer = json.loads((await self._nats.request("$JS.API.STREAM.NAMES", asked, ANSWER_S)).data)
        if "error" in answer:
            APIError.from_error(answer["error"])
        return [str(name) for name in answer["streams"] or ()]

    async def _look(self) -> int:
        """Learn at which sequence the stream ends; return the clock of its last record of this bridge, or 0."""
        state = (await self._info(self._stream)).state
        self._last = at = state.last_seq
        end = max(1, state.first_seq, at - LOOK_BACK + 1)
        count = 1  # in a stream of this bridge alone, it is the last one
        while at >= end:
            below = max(at - count, end - 1)
            found = await asyncio.gather(*(self._clock_at(sequence) for sequence in range(at, below, -1)))
            if clocks := [clock for clock in found if clock is not None]:
                return clocks[0]
            at, count = below, LOOK_AT_ONCE
        return 0

    async def _clock_at(self, sequence: int) -> int | None:
        try:
            message = await self._asked(lambda: self._js.get_msg(self._stream, sequence))
        except NotFoundError:
            return None  # it is deleted
        return self._clock(message.headers or {})

    def _clock(self, headers: dict[str, Any]) -> int | None:
        """Return the clock of a record of this bridge, None of another one's."""
        return int(headers[CLOCK]) if self._mine.items() <= headers.items() else None

    # -- Records ------------------------------------------------------------------------------------------------------

    def _check(self, record: Record) -> None:
        if not SUBJECT.match(record.topic):
            raise RecordRefused(
                f"message {record.id} has the subject {record.topic}, and NATS takes none with empty parts, spaces, * "
                "or >. Change the template (--topic).",
                code="MR-bridge-record-refused",
            )
        headers = headers_of(record, self._stream, self._last)
        size = len(record.value or b"") + sum(len(name) + len(text.encode()) + 4 for name, text in headers.items()) + 64
        if size > self._nats.max_payload:
            raise RecordRefused(
                f"the record of message {record.id} has {size:,} bytes with its headers, and the server's max_payload "
                f"is {self._nats.max_payload:,}. Raise it there.",
                code="MR-bridge-record-refused",
            )

    async def _publish(self, records: Sequence[Record]) -> None:
        """Send all, and wait for the acknowledgements; what is acknowledged moves the mark."""
        losses = self._losses
        self._denied.clear()
        self._asked_for = frozenset(quoted(record.topic) for record in records)
        # Tasks begin in this order, and each sends before it waits. (`publish_async` never tells an error of the
        # server: its future stays as it is.)
        sent = [
            asyncio.create_task(
                self._js.publish(
                    record.topic, record.value or b"", ACKNOWLEDGED_S,
                    headers=headers_of(record, self._stream, self._last + nth),
                )
            )
            for nth, record in enumerate(records)
        ]  # fmt: skip
        try:
            while (left := self._unanswered(records, sent)) and self._losses == losses:
                await self._unless_ended(asyncio.wait(left, timeout=POLL_S))
            if self._denied:
                # The server tells each denial before it answers this. So none is left that could be taken for one of
                # the next records.
                await self._unless_ended(self._nats.flush(int(ANSWER_S)))
        except PASSING as error:
            raise _Unknown(self._text(error)) from None
        finally:
            self._asked_for = frozenset()
            for each in sent:
                each.cancel()
            answers = await asyncio.gather(*sent, return_exceptions=True)
        for record, answer in zip(records, answers, strict=True):
            if isinstance(answer, BaseException):
                raise await self._meaning(record, answer)
            await self._acknowledged(record, answer)

    def _unanswered(
        self, records: Sequence[Record], sent: Sequence["asyncio.Task[PubAck]"]
    ) -> list["asyncio.Task[PubAck]"]:
        """Return what has no answer yet, up to the first record whose subject is denied: that one gets none."""
        left = []
        for record, each in zip(records, sent, strict=True):
            if quoted(record.topic) in self._denied:
                break
            if not each.done():
                left.append(each)
        return left

    async def _acknowledged(self, record: Record, ack: PubAck) -> None:
        # The server has dropped it by its id. So the stream has it, unless that is the id of another one's record.
        if ack.duplicate and await self._clock_at(ack.seq) != record.clock:
            raise RecordRefused(
                f"the stream {self._stream} has a record with the id of message {record.id} at {ack.seq}, which this "
                "bridge has not written. Let one bridge publish a message to a stream.",
                code="MR-bridge-record-refused",
            )
        self._mark = record.clock
        self._last = max(self._last, ack.seq)

    async def _meaning(self, record: Record, error: BaseException) -> Exception:
        code = error.err_code if isinstance(error, APIError) else None
        if code == WRONG_LAST_SEQUENCE:
            return _Unknown(self._text(error), is_overtaken=True)
        if isinstance(error, NoStreamResponseError):
            await self._info(self._stream)  # nobody answers if the stream is gone, too
        if code == WRONG_STREAM or isinstance(error, NoStreamResponseError):
            return RecordRefused(
                f"subject {record.topic} does not belong to the stream {self._stream}. Add it there, or change the "
                "template (--topic).",
                code="MR-bridge-record-refused",
            )
        if quoted(record.topic) in self._denied:
            return RecordRefused(
                f"the server denies this client the right to publish to {record.topic}. Grant it, or change the "
                "template (--topic).",
                code="MR-bridge-record-refused",
            )
        if isinstance(error, asyncio.CancelledError):
            return _Unknown("the connection was lost before it was acknowledged")
        if isinstance(error, PASSING):
            self._error = self._text(error)
            return _Unknown(self._error)
        if isinstance(error, ConnectionClosedError):
            return BrokerTrouble(self._error or self._text(error))
        return RecordRefused(f"the broker refuses it: {self._text(error)}.", code="MR-bridge-record-refused")


def _wildcard(template: str) -> str:
    """Return the subjects that a template of topics stands for."""
    before, topic, _ = template.partition("{topic}")
    if not topic:
        return template
    parts = before.split(".")
    return ".".join([*parts[:-1], ">"])
