"""The writer's side of Mailroom: commit messages in the transaction that changes your data."""

from outbox.outbox import AsyncOutbox, Outbox
from outbox.outgoing import Outgoing

__all__ = ["AsyncOutbox", "Outbox", "Outgoing"]
