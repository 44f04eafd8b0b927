"""What the publisher and the source share: a thread for the client's blocking calls, and the meaning of its errors."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from dispatcher.bridges.kafka.options import client_options, hiding
from mailroom.bridges.publisher import BrokerRefused, BrokerTrouble, Fenced, RecordRefused

log = logging.getLogger("mailroom.kafka")

T = TypeVar("T")

COUNTERS = re.compile(r" \(after \d+ms in state \w+(?:, \d+ identical error\(s\) suppressed)?\)")

STEP_S = 2.0  # how long one call of the client may block; between two it is seen whether it is closed
POLL_S = 0.1

# What the broker says of one record or one topic: no trying again helps before something is changed.
OF_THE_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_TIMESTAMP, KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION, KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION,
        KafkaError._GAPLESS_GUARANTEE,  # with the broker's reason in its text
    }
)  # fmt: skip
REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM,
    }
)  # fmt: skip
FENCED = frozenset(
    {
        KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
    }
)  # fmt: skip


# What passes by itself.
PASSING = frozenset(
    {
        KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE,
        KafkaError._WAIT_COORD, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError.CONCURRENT_TRANSACTIONS,
    }
)  # fmt: skip


class KafkaClient:
    """A client of librdkafka for the bridge `name`, at `address`. Its calls block, so they have a thread."""

    def __init__(self, name: str, address: str, options: Mapping[str, str]) -> None:
        self._name = name
        given = client_options(name, options)
        # Its own log would tell each reconnect; what is wrong is told by `trouble`, in one line.
        quiet = {"client.id": "mailroom", "log.connection.close": "false", "log_level": "0"}
        self._options: dict[str, object] = {
            **quiet, **given, "bootstrap.servers": address, "error_cb": self._note,
        }  # fmt: skip
        self._thread = ThreadPoolExecutor(1, "mailroom-kafka")
        self._closed = threading.Event()
        self._error: KafkaError | None = None

    @property
    def trouble(self) -> str | None:
        """What the client has reported last."""
        return None if self._error is None else self._text(self._error)

    async def close(self) -> None:
        """Give up what is under way, and the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drop)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except KafkaException as error:
            raise self._meaning(error.args[0]) from None

    def _drop(self) -> None:
        """Give up the client, in its thread."""

    def _serve_callbacks(self) -> None:
        """Have the client tell what it has to tell, in its thread."""

    def _note(self, error: KafkaError) -> None:
        self._error = error

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise BrokerTrouble("given up")

    def _again(self, call: Callable[[], T]) -> T:
        """Call the client until the broker has answered; what no trying again mends is raised."""
        while True:
            self._check_open()
            try:
                done = call()
            except KafkaException as failed:
                error = failed.args[0]
                self._serve_callbacks()
                if self._error is not None and self._error.code() in REFUSED:
                    raise self._meaning(self._error) from None
                is_passing = error.retriable() or error.code() in PASSING
                if error.fatal() or error.txn_requires_abort() or not is_passing:
                    raise
                self._error = self._error or error
                self._closed.wait(POLL_S)
            else:
                self._error = None
                return done

    def _meaning(self, error: KafkaError) -> Exception:
        text, code = self._text(error), error.code()
        if code in FENCED:
            return Fenced(text)
        if code in REFUSED:
            return BrokerRefused(f"the broker refuses this client: {text}", code="MR-bridge-broker-refused")
        if code in OF_THE_RECORD:
            return RecordRefused(f"the broker refuses it: {text}.", code="MR-bridge-record-refused")
        return BrokerTrouble(text)

    def _text(self, error: KafkaError) -> str:
        # Without what differs each time: trouble that goes on is told once.
        return hiding(self._options, f"{COUNTERS.sub('', error.str())} ({error.name()})")
