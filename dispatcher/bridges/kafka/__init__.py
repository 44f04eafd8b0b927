"""Kafka, through librdkafka: a log per partition, and transactions that reach over several of them."""

from dispatcher.bridges.kafka.publisher import KafkaPublisher

__all__ = ["KafkaPublisher"]
