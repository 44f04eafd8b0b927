"""Which topics those of a bridge are: one that was made anew under the same name has another id (KIP-516)."""

from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from dispatcher.bridges.kafka.client import STEP_S, log

# D-bridges-18: Topic ids are asked for after each read.
NONE = "A" * 22  # all zeros, in base64: what a cluster older than 2.8 says


class TopicIds:
    """Asks a cluster for the ids of these topics. One that tells none, or not in time, is believed without."""

    def __init__(self, options: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._client = AdminClient(dict(options), logger=log)
        self._topics = TopicCollection(list(topics))
        self._asked: Mapping[str, futures.Future[Any]] = {}

    def ask(self) -> None:
        """Ask; it does not wait."""
        self._asked = self._client.describe_topics(self._topics, request_timeout=STEP_S)

    def told(self, wait_s: float = 0.0) -> dict[str, str]:
        """Return the ids that were told since `ask`, by topic, after so many seconds at most."""
        done, _ = futures.wait(self._asked.values(), wait_s)
        found = {}
        for topic, each in self._asked.items():
            if each in done:
                with suppress(KafkaException):  # that it is gone, or may not be read, the consumer tells
                    found[topic] = str(each.result().topic_id)
        return {topic: id for topic, id in found.items() if id != NONE}
