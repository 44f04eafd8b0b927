"""What the publisher and the source share: a thread for the client's blocking calls, and the meaning of its errors."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from operator import methodcaller
from typing import TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Message

from dispatcher.bridges.kafka.call_thread import CallThread, Hung
from dispatcher.bridges.kafka.meaning import FENCED, OF_THE_RECORD, PASSING, REFUSED, advice
from dispatcher.bridges.kafka.options import client_options, hiding
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, Fenced, RecordRefused

log = logging.getLogger("mailroom.kafka")
# The client tells each fatal error there, too, whatever its level; it is told once, with the bridge and what to do.
log.addFilter(lambda record: record.levelno < logging.CRITICAL)

T = TypeVar("T")

COUNTERS = re.compile(
    r" \(after \d+ ?ms(?: in state \w+)?(?:, \d+ identical error\(s\) suppressed)?\)"
    r"|(?<= \()broker \d+ PID\{[^}]*\}, (?=base seq)"
)

STEP_S = 2.0  # how long one call of the client may block; between two it is seen whether it is closed
POLL_S = 0.1

# Not `message.headers()`: for such a name that returns a list with a hole in it. Python notices, unless the call is one
# that it has made often and specialized; then whoever looks at the list ends the process.
_HEADERS = methodcaller("headers")


def headers_of(message: Message) -> list[tuple[str, bytes | None]] | None:
    """Return a record's headers, None if one has a name that is not UTF-8, which the client cannot hand out."""
    try:
        return cast("list[tuple[str, bytes | None]]", _HEADERS(message) or [])
    except (SystemError, UnicodeDecodeError):
        return None


class KafkaClient:
    """A client of librdkafka for the bridge `name`, at `address`. Its calls block, so they have a thread.

    `own_name` is that of its group, and of its transactional id.
    """

    def __init__(self, name: str, own_name: str, address: str, options: Mapping[str, str]) -> None:
        self._name = name
        self._own_name = own_name
        given = client_options(name, options)
        # Its own log would tell each reconnect; what is wrong is told by `trouble`, in one line.
        quiet = {"client.id": "mailroom", "log.connection.close": "false", "log_level": "0"}
        self._options: dict[str, object] = {
            **quiet, **given, "bootstrap.servers": address, "error_cb": self._note,
        }  # fmt: skip
        self._thread = CallThread("mailroom-kafka")
        self._closed = threading.Event()
        self._error: KafkaError | None = None
        self._right = ""  # that was used last
        self.answered_at: float | None = None

    @property
    def trouble(self) -> str | None:
        """What the client has reported last."""
        return None if self._error is None else self._text(self._error)

    async def close(self) -> None:
        """Give up what is under way, and the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            await self._thread.call(self._drop)
        except Hung:
            self._leave()
        self._thread.end()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._thread.call(work)
        except KafkaException as error:
            raise self._meaning(error.args[0]) from None
        except Hung:
            self._closed.set()
            self._leave()
            self._thread.end()
            raise BrokerTrouble("its client hangs: a call has not returned. A new one is made") from None

    def _drop(self) -> None:
        """Give up the client, in its thread."""

    def _leave(self) -> None:
        """Have a client whose thread hangs do nothing more: from now on another one works."""

    def _serve_callbacks(self) -> None:
        """Have the client tell what it has to tell, in its thread."""

    def _note(self, error: KafkaError) -> None:
        # That none is left follows from what was wrong with the last one, and would hide it.
        if self._error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._error = error

    def _check_open(self) -> None:
        self._thread.seen()
        if self._closed.is_set():
            raise BrokerTrouble("given up")

    def _pause(self) -> None:
        self._check_open()
        self._closed.wait(POLL_S)

    def _again(self, call: Callable[[], T], within_s: float = inf) -> T:
        """Call the client until the broker has answered. What no trying mends is raised, and what takes longer."""
        until = time.monotonic() + within_s
        while True:
            self._check_open()
            try:
                done = call()
            except KafkaException as failed:
                error = failed.args[0]
                self._serve_callbacks()
                if self._error is not None and self._error.code() in REFUSED:
                    raise KafkaException(self._error) from None
                is_passing = error.retriable() or error.code() in PASSING
                if error.fatal() or error.txn_requires_abort() or not is_passing or time.monotonic() > until:
                    raise
                self._error = self._error or error
                self._closed.wait(POLL_S)
            else:
                self._error = None
                return done

    # D-bridges-12: An error of Kafka is read together with the right that was used.
    @contextmanager
    def _using(self, right: str, *, for_records: bool = False) -> Iterator[None]:
        """Use a right on topics, as in "Read on topic orders". Only what is done `for_records` can be their fault."""
        self._right = right
        try:
            yield
        except KafkaException as error:
            raise self._meaning(error.args[0], right, for_records=for_records) from None

    def _meaning(self, error: KafkaError, right: str = "", *, for_records: bool = False) -> Exception:
        # What is refused in the background, such as the id of a producer, is refused for what was used last.
        text, code = self._text(error, right or self._right), error.code()
        if code in FENCED:
            return Fenced(text)
        if code in OF_THE_RECORD and for_records:
            return RecordRefused(f"the broker refuses it: {text}", code="MR-bridge-record-refused")
        if code in REFUSED | OF_THE_RECORD:
            return BrokerRefused(f"the broker refuses this client: {text}", code="MR-bridge-broker-refused")
        return BrokerTrouble(text)

    def _text(self, error: KafkaError, right: str = "") -> str:
        # Without what differs each time: trouble that goes on is told once.
        text = f"{COUNTERS.sub('', error.str())} ({error.name()})"
        what_to_do = advice(text, right, self._own_name)
        return hiding(self._options, f"{text}.{what_to_do}" if what_to_do else text)
