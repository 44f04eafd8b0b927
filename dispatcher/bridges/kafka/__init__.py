"""Kafka, through librdkafka: a log per partition, and transactions that reach over several of them."""

from dispatcher.bridges.kafka.publisher import KafkaPublisher as KafkaPublisher
from dispatcher.bridges.kafka.source import KafkaSource as KafkaSource
