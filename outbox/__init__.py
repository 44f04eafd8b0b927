"""The writer's side of Mailroom: commit messages in the transaction that changes your data."""

from mailroom.message.outgoing import Outgoing
from mailroom.message.periodic import PeriodicMessage
from outbox.executable import Executable
from outbox.outbox import AsyncOutbox, Outbox
from outbox.periodic.periodic import AsyncPeriodic, Periodic, PeriodicState
from outbox.store import AsyncStore, Books, Store
from outbox.webhooks.app import WebhookApp

__all__ = [
    "AsyncOutbox",
    "AsyncPeriodic",
    "AsyncStore",
    "Books",
    "Executable",
    "Outbox",
    "Outgoing",
    "Periodic",
    "PeriodicMessage",
    "PeriodicState",
    "Store",
    "WebhookApp",
]
