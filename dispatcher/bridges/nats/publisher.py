"""Publishes to a stream of NATS JetStream: in order, and once.

Each record says at which sequence the stream is to end before it, and all but the first which record that is to be
(`Nats-Expected-Last-Sequence`, `Nats-Expected-Last-Msg-Id`). So of what is sent at once the stream has a beginning, in
a row, and a record of somebody else that comes in between ends it: nothing is overtaken.

The mark is in the stream: the clock of its last record of this bridge. What is up to that clock is not published again,
at the start and whenever an acknowledgement was lost. But a stream may delete what it has, and a work queue does so at
once. So the node notes before each try where the stream ended, and what is sent (`plan`). A sequence is never given
out twice: from how far the stream has come since is known how much of that it has had, unless the server says of its
ids that it was less (`asking`).

That is exactly once while this bridge alone writes to the stream. Others may write there, too; then the stream is
looked at again for each of their records that comes in between, which is slow. From then on, what is deleted may have
been theirs, and is published again. If they have written more than `LOOK_BACK` records since the last one of this
bridge, its mark is not found. Then it goes on behind what this node knows to be acknowledged: at least once.
`Nats-Msg-Id` is the message's id, by which the server drops repeats, too, for as long as the stream's duplicate window.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any
from uuid import UUID

from nats.errors import ConnectionClosedError
from nats.js.api import ConsumerConfig, DeliverPolicy, PubAck, RawStreamMsg, RetentionPolicy, StreamInfo
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from dispatcher.bridges.nats.asking import had
from dispatcher.bridges.nats.client import ANSWER_S, PASSING, POLL_S, NatsClient, made, quoted
from dispatcher.bridges.nats.headers import CLOCK, LINK, ORIGIN, headers_of
from dispatcher.bridges.nats.reader import ConsumerLost, StreamReader
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, Numbered, OutBridge, PublishAgain, RecordRefused
from mailroom.bridges.record import Record, id_of

log = logging.getLogger("mailroom.dispatcher")

# D-bridges-6: NATS never gives out a sequence twice, also of what it deletes.
LOOK_BACK = 1_000  # records of the stream, in which the mark is looked for
LOOK_AT_ONCE = 20
READ_S = 1.0
SLACK_S = 1.0  # by which a server may forget an id early
ACKNOWLEDGED_S = 10.0  # then it is looked whether the stream has it
SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*\Z")

WRONG_LAST = (10070, 10071)  # the id of the last record, its sequence
WRONG_STREAM = 10060


class _Unknown(Exception):
    """What the stream has of what was sent has to be looked up.

    With `is_overtaken` another one has written there, and the stream has nothing but what it has acknowledged.
    """

    def __init__(self, why: str, *, is_overtaken: bool = False) -> None:
        super().__init__(why)
        self.is_overtaken = is_overtaken


class NatsPublisher(NatsClient):
    """A publisher to NATS; see `mailroom.bridges.publisher`."""

    def __init__(self, bridge: OutBridge) -> None:
        super().__init__(bridge.name, bridge.settings.address, bridge.options)
        self._bridge = bridge
        self._mine = {ORIGIN: str(bridge.node_id), LINK: str(bridge.link)}
        self._noted: str | None = None
        self._stream = ""
        self._made: str | None = None
        self._last = 0  # the stream's last sequence, as far as it is known
        self._mark = 0  # up to this clock it has had this bridge's records
        self._is_alone = True  # no record of somebody else was seen since the bridge was made
        self._unsure: list[int] = []  # the clocks of records that it may have, in a row behind `_last`
        self._sent_to: tuple[str | None, float] = (None, 0.0)  # which server, and when by `time.monotonic`
        self._sent: set[int] = set()  # the clocks of those that it may ever have had
        self.answered_at: float | None = None
        self._numbered: list[Numbered] = []
        self._put_back_at = 0  # up to this sequence it may have records of a history that this node has lost

    def remember(self, noted: str) -> None:
        """Be told what `plan` has said before what was sent last."""
        self._noted = noted

    async def open(self) -> int:
        """Connect, find the stream, and learn what it has had."""
        await self._connect()
        self._stream = await self._find()
        info = await self._info(self._stream)
        self._made = made(info)
        await self._look(info, is_known=self._recall())
        return self._mark

    def plan(self, records: Sequence[Record]) -> str:
        """Say what is sent when these are published, and behind which sequence."""
        clocks = [record.clock for record in records if record.clock > self._mark]
        noted = {
            "of": self._own(), "last": self._last, "mark": self._mark, "alone": self._is_alone,
            "clocks": clocks[:1] + [after - before for before, after in pairwise(clocks)],
        }  # fmt: skip
        return json.dumps(noted, separators=(",", ":"))

    async def published(self, after: int, since: datetime) -> Collection[tuple[int, UUID]]:
        """Read this bridge's records of that time in the stream."""
        self._put_back_at = self._last
        info = await self._info(self._stream)
        if info.config.retention == RetentionPolicy.WORK_QUEUE:
            return await self._still_queued(info, after)
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

    def numbered(self) -> Sequence[Numbered]:
        """Return the sequences of what was acknowledged."""
        told, self._numbered = self._numbered, []
        return told

    async def ends(self, places: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """Say where the stream ends: it was looked at just now."""
        return {(self._stream, 0): self._last + 1}

    async def _still_queued(self, info: StreamInfo, after: int) -> list[tuple[int, UUID]]:
        """Read what a work queue has yet: it lets nobody read who acknowledges nothing, and deletes what is taken."""
        found: list[tuple[int, UUID]] = []
        at, first = info.state.last_seq, max(1, info.state.first_seq)
        while at >= first:
            sequences = range(at, max(at - LOOK_AT_ONCE, first - 1), -1)
            for message in await asyncio.gather(*map(self._at, sequences)):
                headers = {} if message is None else message.headers or {}
                if (clock := self._clock(headers)) is not None:
                    if clock <= after:
                        return found
                    found.append((clock, id_of({name: text.encode() for name, text in headers.items()})))
            at = sequences[-1] - 1
        return found

    async def publish(self, records: Sequence[Record]) -> None:
        """Publish them one behind the other, and look what the stream has of them if that is not known."""
        for record in records:
            self._check(record)
        left = [record for record in records if record.clock > self._mark]
        try:
            await self._publish(left)
        except _Unknown as unknown:
            self._error = self._error or str(unknown)
            if not unknown.is_overtaken:
                self._unsure = [record.clock for record in left if record.clock > self._mark]
                self._sent.update(self._unsure)
                await self._unless_ended(asyncio.sleep(POLL_S))
            await self._look(await self._info(self._stream), left)
            raise PublishAgain from None  # the node is to note from where
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

    def _own(self) -> list[str | None]:
        """Return what a note is of: another stream, and a copy of the node, has its own."""
        return [self._stream, self._made, *self._mine.values()]

    def _recall(self) -> bool:
        """Take over what was noted of this stream; return whether there was anything."""
        noted = json.loads(self._noted or "{}")
        if noted.get("of") != self._own():
            return False
        self._last, self._mark, self._is_alone = noted["last"], noted["mark"], noted["alone"]
        self._unsure = list(accumulate(noted["clocks"]))
        self._sent = set(self._unsure)
        return True

    async def _look(self, info: StreamInfo, records: Sequence[Record] = (), *, is_known: bool = True) -> None:
        """Learn how far the stream has come, and what it has had of this bridge. `is_known` is where it ended.

        `records` are those that it may have had, if they were sent over this client.
        """
        end, unsure, self._unsure = info.state.last_seq, self._unsure, []
        if end < self._last:
            log.warning(
                "bridges: the stream %s of %s ends at %d and ended at %d: it has lost what it had acknowledged",
                self._stream, self._name, end, self._last,
            )  # fmt: skip
            is_known, self._last, self._mark = False, 0, 0
        at, clock, is_others = await self._last_own(info, max(LOOK_BACK, len(unsure)))
        if clock is not None:
            self._mark = max(self._mark, clock)
        beyond = end - self._last
        if is_known and at < end:  # what lies behind this bridge's last one there is somebody else's, or is deleted
            self._is_alone = self._is_alone and not is_others and beyond <= len(unsure)
            if self._is_alone:
                asked = [record for record in records if record.clock in unsure[:beyond]]
                count = await self._had(info, asked) if len(asked) == beyond else beyond
                self._is_alone = count == beyond
                self._mark = max([self._mark, *unsure[:count]])
        self._last = end

    async def _had(self, info: StreamInfo, records: Sequence[Record]) -> int:
        """Return how many of these the stream has had, if as many records as these are deleted by now.

        Some may have been somebody else's. If the server has forgotten which ones it has had, they all were this
        bridge's, which was alone until then.
        """
        count = await self._unless_ended(had(self._js, self._stream, records))
        to, at = self._sent_to
        # In a cluster another one may answer, which may have started since.
        is_sure = to == self._nats.server_id and info.cluster is None
        forgets_s = (info.config.duplicate_window or 0.0) - SLACK_S
        if count is None or (count < len(records) and not (is_sure and time.monotonic() - at < forgets_s)):
            return len(records)
        return count

    async def _last_own(self, info: StreamInfo, most: int) -> tuple[int, int | None, bool]:
        """Return the sequence and the clock of this bridge's last record there, and whether others lie behind it.

        It is looked for among the last `most` records, behind what is known. If there is none, the clock is None.
        """
        at = info.state.last_seq
        end = max(1, info.state.first_seq, at - most + 1, self._last + 1)
        count, is_others = 1, False  # in a stream of this bridge alone, it is the last one
        while at >= end:
            below = max(at - count, end - 1)
            sequences = range(at, below, -1)
            for sequence, message in zip(sequences, await asyncio.gather(*map(self._at, sequences)), strict=True):
                if message is not None:
                    if (clock := self._clock(message.headers or {})) is not None:
                        return sequence, clock, is_others
                    is_others = True
            at, count = below, LOOK_AT_ONCE
        return self._last, None, is_others

    async def _at(self, sequence: int) -> RawStreamMsg | None:
        """Return the record at a sequence, None if it is deleted."""
        try:
            return await self._asked(lambda: self._js.get_msg(self._stream, sequence))
        except NotFoundError:
            return None

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
        headers = headers_of(record, self._stream, self._last, record.id)
        size = len(record.value or b"") + sum(len(name) + len(text.encode()) + 4 for name, text in headers.items()) + 64
        if size > self._nats.max_payload:
            raise RecordRefused(
                f"the record of message {record.id} has {size:,} bytes with its headers, and the server's max_payload "
                f"is {self._nats.max_payload:,}. Raise it there.",
                code="MR-bridge-record-refused",
            )

    async def _publish(self, records: Sequence[Record]) -> None:
        """Send all, and wait for the acknowledgements; what is acknowledged moves the mark."""
        losses, self._sent_to = self._losses, (self._nats.server_id, time.monotonic())
        self._denied.clear()
        self._asked_for = frozenset(quoted(record.topic) for record in records)
        # Tasks begin in this order, and each sends before it waits. (`publish_async` never tells an error of the
        # server: its future stays as it is.)
        sent = [
            asyncio.create_task(
                self._js.publish(
                    record.topic, record.value or b"", ACKNOWLEDGED_S,
                    headers=headers_of(record, self._stream, self._last + nth, records[nth - 1].id if nth else None),
                )
            )
            for nth, record in enumerate(records)
        ]  # fmt: skip
        for each in sent:
            each.add_done_callback(self._answered)
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

    def _answered(self, sent: "asyncio.Task[PubAck]") -> None:
        if not sent.cancelled() and sent.exception() is None:
            self.answered_at = time.monotonic()

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
        if ack.duplicate and not await self._is_own(record, ack.seq):
            raise RecordRefused(
                f"the stream {self._stream} has a record with the id of message {record.id} at {ack.seq}, which this "
                "bridge has not written. Let one bridge publish a message to a stream.",
                code="MR-bridge-record-refused",
            )
        if not ack.duplicate:
            first = self._numbered[0].first if self._numbered else ack.seq
            self._numbered = [Numbered(self._stream, 0, first, ack.seq)]
        self._mark = record.clock
        self._last = max(self._last, ack.seq)

    async def _is_own(self, record: Record, sequence: int) -> bool:
        """Return whether it is a record of this bridge by whose id the server has dropped this one."""
        message = await self._at(sequence)
        if message is None:
            return record.clock in self._sent or sequence <= self._put_back_at
        return self._clock(message.headers or {}) == record.clock

    async def _meaning(self, record: Record, error: BaseException) -> Exception:
        code = error.err_code if isinstance(error, APIError) else None
        if code in WRONG_LAST:
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
