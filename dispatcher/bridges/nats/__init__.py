"""NATS JetStream, through nats-py: a stream is one log, and a record is added only behind the one that is expected."""
