"""What Mailroom knows of Kafka; no client is imported for it."""

from mailroom.bridges.broker import ApiBinding, Broker, PublishesTo, TakesFrom

KAFKA = Broker(
    "kafka",
    "Kafka",
    "HOST:PORT[,...]",
    about="by some of its servers",
    publishes=PublishesTo("dispatcher.bridges.kafka.publisher:KafkaPublisher", "key", "option"),
    takes_from=TakesFrom("dispatcher.bridges.kafka.source:KafkaSource"),
    library="confluent_kafka",
    install="pip install 'pg-mailroom[kafka]'",
    tested="Apache Kafka 4.3, confluent-kafka from 2.6",
    asyncapi=ApiBinding(message={"kafka": {"key": {"type": "string"}, "bindingVersion": "0.5.0"}}),
)
