"""Mailroom: transactional messaging inside PostgreSQL. What the writer's and the consumer's side agree on."""

__version__ = "0.1.0"
