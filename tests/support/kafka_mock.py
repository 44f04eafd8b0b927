"""librdkafka's mock cluster as a process: Kafka's protocol without Java, whose answers can be made to fail.

    python -m tests.support.kafka_mock BROKERS TOPIC:PARTITIONS ...

It prints the bootstrap servers, and then answers each line on its standard input with one line. It ends with that
input, so with whoever started it.
"""

import ctypes
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.support.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]
_OK = "ok"


class MockKafka:
    """A mock cluster of this test's, as a context manager; `topics` as in "orders:3", which has three partitions.

    It keeps nothing on disk. It makes topics that clients ask for, as a real one with auto.create.topics.enable does.
    """

    def __init__(self, brokers: int = 1, *topics: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(brokers), *topics],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.bootstrap = self._answer()
        assert self.bootstrap, f"the mock cluster ended with {self._process.wait()}"

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def __enter__(self) -> "MockKafka":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate(timeout=WITHIN_S)

    def errors(self, api_key: int, *codes: int) -> None:
        """Answer the next requests of this kind with these errors, one each; 0 lets one pass, -195 cuts it off.

        Kinds: 0 Produce, 1 Fetch, 3 Metadata, 8 OffsetCommit, 22 InitProducerId, 24 AddPartitionsToTxn, 26 EndTxn.
        """
        self._do("errors", api_key, *codes)

    def down(self, broker: int = 1) -> None:
        """Cut off a broker's connections and refuse new ones."""
        self._do("down", broker)

    def up(self, broker: int = 1) -> None:
        """Let the broker take connections again; it has lost nothing."""
        self._do("up", broker)

    def rtt(self, broker: int, ms: int) -> None:
        """Let each answer of the broker take so long."""
        self._do("rtt", broker, ms)

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic."""
        self._do("create", topic, partitions)

    def _do(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer == _OK, f"{words}: {answer or 'the mock cluster has ended'}"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], WITHIN_S)
        assert readable, f"the mock cluster did not answer within {WITHIN_S} s"
        return self._process.stdout.readline().strip()


class _Cluster:
    """The mock cluster in this process: the Python client has no functions for it, but its library has them."""

    def __init__(self, brokers: int) -> None:
        from confluent_kafka import cimpl

        # A look-up in the extension module also finds what is in the library that it is linked to, wherever that is.
        self._library = library = ctypes.CDLL(cimpl.__file__)
        library.rd_kafka_err2str.restype = ctypes.c_char_p
        library.rd_kafka_conf_new.restype = ctypes.c_void_p
        library.rd_kafka_conf_set.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        library.rd_kafka_new.restype = ctypes.c_void_p
        library.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        library.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
        why = ctypes.create_string_buffer(500)
        settings = library.rd_kafka_conf_new()
        # It would say that the client of which the cluster is a part has no bootstrap servers.
        library.rd_kafka_conf_set(settings, b"log_level", b"0", why, len(why))
        client = library.rd_kafka_new(0, settings, why, len(why))
        assert client, why.value.decode()
        self._cluster = library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), brokers)
        self.bootstrap = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        # A group would wait for three seconds for others to join it.
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(ctypes.c_void_p(self._cluster), ctypes.c_int32(0))

    def create(self, topic: str, partitions: int) -> None:
        self._call("topic_create", topic.encode(), ctypes.c_int(partitions), ctypes.c_int(1))

    def do(self, words: list[str]) -> None:
        match words:
            case ["errors", api_key, *codes]:
                values = (ctypes.c_int * len(codes))(*map(int, codes))
                # It returns nothing, unlike the others.
                self._library.rd_kafka_mock_push_request_errors_array(
                    ctypes.c_void_p(self._cluster), ctypes.c_int16(int(api_key)), ctypes.c_size_t(len(codes)), values
                )
            case ["down", broker]:
                self._call("broker_set_down", ctypes.c_int32(int(broker)))
            case ["up", broker]:
                self._call("broker_set_up", ctypes.c_int32(int(broker)))
            case ["rtt", broker, ms]:
                self._call("broker_set_rtt", ctypes.c_int32(int(broker)), ctypes.c_int(int(ms)))
            case ["create", topic, partitions]:
                self.create(topic, int(partitions))
            case _:
                raise ValueError("no such command")

    def _call(self, name: str, *arguments: object) -> None:
        error = self._library[f"rd_kafka_mock_{name}"](ctypes.c_void_p(self._cluster), *arguments)
        if error:
            raise ValueError(self._library.rd_kafka_err2str(error).decode())


def _main(brokers: str, *topics: str) -> None:
    cluster = _Cluster(int(brokers))
    for topic in topics:
        name, _, partitions = topic.rpartition(":")
        cluster.create(name, int(partitions))
    _say(cluster.bootstrap)
    for line in sys.stdin:
        try:
            cluster.do(line.split())
        except ValueError as error:
            _say(str(error))
        else:
            _say(_OK)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
