"""Kafka, through librdkafka: a log per partition, and transactions that reach over several of them."""
