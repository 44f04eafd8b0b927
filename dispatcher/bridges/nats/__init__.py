"""NATS JetStream, through nats-py: a stream is one log, and a record is added only behind the one that is expected."""

from dispatcher.bridges.nats.publisher import NatsPublisher as NatsPublisher
from dispatcher.bridges.nats.source import NatsSource as NatsSource
