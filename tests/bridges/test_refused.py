"""A record that Kafka itself refuses is told from a broker that is away, at both levels."""

from uuid import uuid4

import pytest
from confluent_kafka import KafkaError

from dispatcher.bridges.kafka.publisher import KafkaPublisher
from mailroom.bridges import Form, OutBridge, OutSettings, RecordRefused
from mailroom.bridges.record import record_of
from tests.bridges.messages import SENDER, message
from tests.support.kafka_mock import MockKafka

PRODUCE = 0


@pytest.mark.parametrize("exactly_once", [False, True], ids=["at least once", "exactly once"])
async def test_record_that_the_broker_refuses_is_refused_and_not_tried_again(
    mock_kafka: MockKafka, exactly_once: bool
) -> None:
    mock_kafka.create(f"small-{exactly_once}", 1)
    form = Form(f"small-{exactly_once}")
    settings = OutSettings("kafka", mock_kafka.bootstrap, form, exactly_once, form.topic if exactly_once else None)
    publisher = KafkaPublisher(OutBridge("small", 1, uuid4(), "paris", settings))
    try:
        assert await publisher.open() == 0
        mock_kafka.errors(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE)
        with pytest.raises(RecordRefused, match="Message size too large") as refused:
            await publisher.publish([record_of(message(), form, SENDER)])
    finally:
        await publisher.close()
    assert refused.value.code == "MR-bridge-record-refused"
